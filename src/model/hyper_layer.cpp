#include "model/hyper_layer.h"

#include <vector>

namespace terrace {

HyperLayer::HyperLayer(const ModelConfig& config, const ParameterIndex& parameters,
                       std::string_view name)
    : config_(config.hyper_connection),
      norm_epsilon_(config.norm_epsilon),
      weight_(parameters.at(fmt::format("{}.weight", name))),
      base_(parameters.at(fmt::format("{}.base", name))),
      scale_(parameters.at(fmt::format("{}.scale", name))) {}

void HyperLayer::Read(Backend& backend, TensorView x, TensorView z, Saved& saved) const {
  const Shape shape{x.rows(), weight_->value.rows()};
  saved.x = x;
  saved.products = Activation(backend, DType::kF32, shape, "hyper.products");
  saved.inverse_rms = Activation(backend, DType::kF32, {x.rows()}, "hyper.inverse_rms");
  saved.weights = Activation(backend, DType::kF32, shape, "hyper.weights");
  backend.Linear(x, weight_->value, saved.products, false);
  backend.HyperWeights(config_, x, norm_epsilon_, saved.products, scale_->value, base_->value,
                       saved.inverse_rms, saved.weights);
  backend.HyperRead(config_, x, saved.weights, z);
}

void HyperLayer::Write(Backend& backend, const Saved& saved, TensorView y, TensorView out) const {
  backend.HyperWrite(config_, saved.x, y, saved.weights, out);
}

void HyperLayer::WriteBackward(Backend& backend, const Saved& saved, TensorView y, TensorView dx,
                               TensorView dy, TensorView dweights) const {
  backend.HyperWriteBackward(config_, saved.x, y, saved.weights, dx, dy, dweights);
}

void HyperLayer::ReadBackward(Backend& backend, std::span<const Work> work,
                              GradientSink& sink) const {
  const Arena::Frame frame(backend.arena());
  std::vector<WeightProduct> products;
  for (const Work& item : work) {
    const TensorView dproducts =
        Activation(backend, DType::kF32, item.saved->products.shape, "hyper.dproducts");
    products.push_back({dproducts, item.saved->x});
  }
  GradientSlot scale_slot = sink.Begin(*scale_);
  GradientSlot base_slot = sink.Begin(*base_);
  for (size_t i = 0; i < work.size(); ++i) {
    const auto& [saved, dz, dweights, dx] = work[i];
    backend.HyperReadBackward(config_, dz, saved->x, saved->weights, dx, dweights);
    backend.HyperWeightsBackward(config_, saved->x, saved->products, scale_->value, base_->value,
                                 saved->inverse_rms, dweights, products[i].dy, dx, scale_slot.view,
                                 scale_slot.add, base_slot.view, base_slot.add);
    scale_slot.add = scale_slot.add.Next();
    base_slot.add = base_slot.add.Next();
  }
  sink.End(*base_, base_slot);
  sink.End(*scale_, scale_slot);
  for (size_t i = 0; i < work.size(); ++i) {
    backend.LinearBackwardInput(products[i].dy, weight_->value, work[i].dx, true);
  }
  LeaveWeightGradient(backend, *weight_, products, sink);
}

}  // namespace terrace
