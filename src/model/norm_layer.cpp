#include "model/norm_layer.h"

namespace terrace {

void NormLayer::Forward(Backend& backend, TensorView x, TensorView y, TensorView statistics) const {
  backend.Norm(kind_, x, weight_->value, bias_ ? bias_->value : TensorView{}, epsilon_, y,
               statistics);
}

NormLayer::Slots NormLayer::Begin(GradientSink& sink) const {
  Slots slots{sink.Begin(*weight_), {}};
  if (bias_) slots.bias = sink.Begin(*bias_);
  return slots;
}

void NormLayer::Backward(Backend& backend, TensorView dy, TensorView x, TensorView statistics,
                         TensorView dx, Slots& slots) const {
  backend.NormBackward(kind_, dy, x, weight_->value, statistics, dx, slots.weight.view,
                       slots.weight.add, slots.bias.view, slots.bias.add);
  slots.weight.add = slots.weight.add.Next();
  slots.bias.add = slots.bias.add.Next();
}

void NormLayer::End(GradientSink& sink, const Slots& slots) const {
  if (bias_) sink.End(*bias_, slots.bias);
  sink.End(*weight_, slots.weight);
}

}  // namespace terrace
