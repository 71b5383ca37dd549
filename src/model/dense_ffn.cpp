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
      w1_(context.Find("ff.w1")),
      w2_(context.Find("ff.w2")),
      w3_(context.Find("ff.w3")) {}

std::unique_ptr<SubLayer::Saved> DenseFfn::Forward(const Pass&, TensorView x, TensorView out,
                                                   LayerRouting*) {
  const Shape hidden{x.rows(), w1_->value.rows()};
  auto saved = std::make_unique<SavedFfn>();
  NormalizeInput(backend_, norm_, x, dtype_, *saved);
  saved->gate = Activation(backend_, dtype_, hidden, "ffn.gate");
  saved->up = Activation(backend_, dtype_, hidden, "ffn.up");
  backend_.Linear(saved->y, w1_->value, saved->gate, false);
  backend_.Linear(saved->y, w2_->value, saved->up, false);

  const Arena::Frame temporaries(backend_.arena());
  const TensorView h = Activation(backend_, dtype_, hidden, "ffn.h");
  backend_.SwiGlu(saved->gate, saved->up, {}, h);
  backend_.Linear(h, w3_->value, out, true);
  return saved;
}

void DenseFfn::Backward(std::span<const Work> work, GradientSink& sink) {
  const Arena::Frame frame(backend_.arena());
  std::vector<TensorView> dy;  // f32 [N, D] each
  std::vector<WeightProduct> w1_products, w2_products, w3_products;
  for (const Work& item : work) {
    const auto& saved = static_cast<const SavedFfn&>(*item.saved);
    const TensorView dout = Narrowed(backend_, item.dx, dtype_, "ffn.dout");
    const TensorView h = Activation(backend_, dtype_, saved.gate.shape, "ffn.h");
    dy.push_back(Activation(backend_, DType::kF32, item.dx.shape, "ffn.dy"));
    backend_.LinearBackwardInput(dout, w3_->value, h, false);  // dh, which h then replaces
    backend_.SwiGluBackward(h, saved.gate, saved.up, {}, saved.gate, saved.up, {});
    backend_.LinearBackwardInput(saved.gate, w1_->value, dy.back(), false);
    backend_.LinearBackwardInput(saved.up, w2_->value, dy.back(), true);
    w1_products.push_back({saved.gate, saved.y});
    w2_products.push_back({saved.up, saved.y});
    w3_products.push_back({dout, h});
  }
  LeaveWeightGradient(backend_, *w3_, w3_products, sink);
  LeaveWeightGradient(backend_, *w2_, w2_products, sink);
  LeaveWeightGradient(backend_, *w1_, w1_products, sink);
  NormBackward(backend_, norm_, work, dy, sink);
}

}  // namespace terrace
