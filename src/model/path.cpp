#include "model/path.h"

namespace terrace {

const Parameter* LayerContext::Find(std::string_view name) const {
  return Named(fmt::format("{}.weight", name));
}

const Parameter* LayerContext::Named(std::string_view name) const {
  return parameters.at(fmt::format("layers.{}.{}", layer, name));
}

NormLayer LayerContext::Norm(std::string_view name) const {
  return MakeNorm(config, parameters, fmt::format("layers.{}.{}", layer, name));
}

NormLayer MakeNorm(const ModelConfig& config, const ParameterIndex& parameters,
                   std::string_view name) {
  const Parameter* weight = parameters.at(fmt::format("{}.weight", name));
  const Parameter* bias =
      config.norm == NormKind::kLayerNorm ? parameters.at(fmt::format("{}.bias", name)) : nullptr;
  return NormLayer(config.norm, config.norm_epsilon, weight, bias);
}

TensorView Activation(Backend& backend, DType dtype, Shape shape, const char* name) {
  return backend.arena().Allocate(Memory::kActivations, dtype, shape, name);
}

TensorView ZeroedActivation(Backend& backend, Shape shape, const char* name) {
  const TensorView view = Activation(backend, DType::kF32, shape, name);
  backend.Zero(view);
  return view;
}

TensorView Downcast(Backend& backend, TensorView wide, DType dtype, const char* name) {
  if (wide.dtype == dtype) return wide;
  const TensorView narrow = Activation(backend, dtype, wide.shape, name);
  backend.Copy(wide, narrow);
  return narrow;
}

void LeaveWeightGradient(Backend& backend, const Parameter& parameter,
                         std::span<const WeightProduct> products, GradientSink& sink) {
  GradientSlot slot = sink.Begin(parameter);
  for (const WeightProduct& product : products) {
    backend.LinearBackwardWeight(product.dy, product.x, slot.view, slot.add);
    slot.add = slot.add.Next();
  }
  sink.End(parameter, slot);
}

}  // namespace terrace
