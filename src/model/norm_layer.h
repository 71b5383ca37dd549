// LayerNorm or RMSNorm with its parameters. Letters as in backend/backend.h.
#pragma once

#include "backend/backend.h"
#include "model/gradient_sink.h"
#include "model/parameter.h"

namespace terrace {

class NormLayer {
 public:
  // `bias` is null for RMSNorm.
  NormLayer(NormKind kind, float epsilon, const Parameter* weight, const Parameter* bias)
      : kind_(kind), epsilon_(epsilon), weight_(weight), bias_(bias) {}

  // x f32 [N, D] -> y any [N, D]; statistics f32 [N, 2].
  void Forward(Backend& backend, TensorView x, TensorView y, TensorView statistics) const;

  // Backward over one or several micro-batches: Begin, Backward of each, End.
  struct Slots {
    GradientSlot weight;
    GradientSlot bias;  // an empty view for none
  };
  Slots Begin(GradientSink& sink) const;
  // dx f32 [N, D] += gradient of x, given dy any [N, D].
  void Backward(Backend& backend, TensorView dy, TensorView x, TensorView statistics, TensorView dx,
                Slots& slots) const;
  void End(GradientSink& sink, const Slots& slots) const;

 private:
  NormKind kind_;
  float epsilon_;
  const Parameter* weight_;  // f32 [D]
  const Parameter* bias_;    // f32 [D]
};

}  // namespace terrace
