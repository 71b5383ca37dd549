#include "model/dense_ffn.h"

#include <vector>

namespace terrace {

struct DenseFfn::SavedFfn final : Saved {
  TensorView gate, up;  // compute [N, F]; become their gradients
};

DenseFfn::DenseFfn(const LayerContext& context)
    : backend_(context.backend),
      norm_(context.Norm("norm2")),
      dtype_(context.config.weight_dtype),
      gate_proj_(context.Find("ff.gate_proj")),
      up_proj_(context.Find("ff.up_proj")),
      down_proj_(context.Find("ff.down_proj")) {}

std::unique_ptr<SubLayer::Saved> DenseFfn::Forward(const Pass&, TensorView x, TensorView out,
                                                   LayerRouting*) {
  const Shape hidden{x.rows(), gate_proj_->value.rows()};
  auto saved = std::make_unique<SavedFfn>();
  NormalizeInput(backend_, norm_, x, dtype_, *saved);
  saved->gate = Activation(backend_, dtype_, hidden, "ffn.gate");
  saved->up = Activation(backend_, dtype_, hidden, "ffn.up");
  backend_.Linear(saved->y, gate_proj_->value, saved->gate, false);
  backend_.Linear(saved->y, up_proj_->value, saved->up, false);

  const Arena::Frame temporaries(backend_.arena());
  const TensorView h = Activation(backend_, dtype_, hidden, "ffn.h");
  backend_.SwiGlu(saved->gate, saved->up, {}, h);
  backend_.Linear(h, down_proj_->value, out, true);
  return saved;
}

void DenseFfn::Backward(std::span<const Work> work, GradientSink& sink) {
  const Arena::Frame frame(backend_.arena());
  std::vector<TensorView> dy;  // f32 [N, D] each
  std::vector<WeightProduct> gate_proj_products, up_proj_products, down_proj_products;
  for (const Work& item : work) {
    const auto& saved = static_cast<const SavedFfn&>(*item.saved);
    const TensorView dout = Downcast(backend_, item.dx, dtype_, "ffn.dout");
    const TensorView h = Activation(backend_, dtype_, saved.gate.shape, "ffn.h");
    dy.push_back(Activation(backend_, DType::kF32, item.dx.shape, "ffn.dy"));
    backend_.LinearBackwardInput(dout, down_proj_->value, h, false);  // dh, which h then replaces
    backend_.SwiGluBackward(h, saved.gate, saved.up, {}, saved.gate, saved.up, {});
    backend_.LinearBackwardInput(saved.gate, gate_proj_->value, dy.back(), false);
    backend_.LinearBackwardInput(saved.up, up_proj_->value, dy.back(), true);
    gate_proj_products.push_back({saved.gate, saved.y});
    up_proj_products.push_back({saved.up, saved.y});
    down_proj_products.push_back({dout, h});
  }
  LeaveWeightGradient(backend_, *down_proj_, down_proj_products, sink);
  LeaveWeightGradient(backend_, *up_proj_, up_proj_products, sink);
  LeaveWeightGradient(backend_, *gate_proj_, gate_proj_products, sink);
  NormBackward(backend_, norm_, work, dy, sink);
}

}  // namespace terrace
