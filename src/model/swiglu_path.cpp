#include "model/swiglu_path.h"

#include <vector>

namespace terrace {

SwiGluPath::SwiGluPath(const LayerContext& context, std::string_view prefix)
    : backend_(context.backend),
      dtype_(context.config.weight_dtype),
      gate_proj_(context.Find(fmt::format("{}.gate_proj", prefix))),
      up_proj_(context.Find(fmt::format("{}.up_proj", prefix))),
      down_proj_(context.Find(fmt::format("{}.down_proj", prefix))) {}

SwiGluPath::Saved SwiGluPath::Forward(TensorView y, TensorView out) const {
  const Shape hidden{y.rows(), gate_proj_->value.rows()};
  const Saved saved{Activation(backend_, dtype_, hidden, "ffn.gate"),
                    Activation(backend_, dtype_, hidden, "ffn.up")};
  backend_.Linear(y, gate_proj_->value, saved.gate, false);
  backend_.Linear(y, up_proj_->value, saved.up, false);

  const Arena::Frame temporaries(backend_.arena());
  const TensorView h = Activation(backend_, dtype_, hidden, "ffn.h");
  backend_.SwiGlu(saved.gate, saved.up, {}, h);
  backend_.Linear(h, down_proj_->value, out, true);
  return saved;
}

void SwiGluPath::Backward(std::span<const Work> work, GradientSink& sink) const {
  const Arena::Frame frame(backend_.arena());
  std::vector<WeightProduct> gate_products, up_products, down_products;
  for (const Work& item : work) {
    const auto& [gate, up] = item.saved;
    const TensorView h = Activation(backend_, dtype_, gate.shape, "ffn.h");
    backend_.LinearBackwardInput(item.dout, down_proj_->value, h, false);  // dh, which becomes h
    backend_.SwiGluBackward(h, gate, up, {}, gate, up, {});
    backend_.LinearBackwardInput(gate, gate_proj_->value, item.dy, false);
    backend_.LinearBackwardInput(up, up_proj_->value, item.dy, true);
    gate_products.push_back({gate, item.y});
    up_products.push_back({up, item.y});
    down_products.push_back({item.dout, h});
  }
  LeaveWeightGradient(backend_, *down_proj_, down_products, sink);
  LeaveWeightGradient(backend_, *up_proj_, up_products, sink);
  LeaveWeightGradient(backend_, *gate_proj_, gate_products, sink);
}

}  // namespace terrace
