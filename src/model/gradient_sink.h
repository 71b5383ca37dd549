// Where a layer's backward pass leaves the gradients of its parameters.
#pragma once

#include "backend/backend.h"
#include "core/tensor.h"
#include "model/parameter.h"

namespace terrace {

struct GradientSlot {
  TensorView view;     // shape of the parameter; float32 or bfloat16 (norms: float32)
  Adding add = false;  // how it is left there; who has done so moves on to add.Next()
};

// A layer says Begin(p), leaves dL/dp in the slot, in one addition or several, says End(p) with the
// slot as the last of them left it; it does not care what
// happens then. Begin/End pairs of different parameters may nest, but not interleave, and what a
// layer allocates between Begin and End it gives back before End: a sink may put its slots on the
// arena's stacks. For a parameter with `contributions` c, a backward pass makes c pairs.
class GradientSink {
 public:
  virtual ~GradientSink() = default;
  virtual GradientSlot Begin(const Parameter& parameter) = 0;
  virtual void End(const Parameter& parameter, const GradientSlot& slot) = 0;
  // In place of a Begin/End pair: no token reached the parameter in the micro-batches of this
  // backward call (an idle expert). A parameter that was skipped all through a step is not updated.
  virtual void Skip(const Parameter& parameter) = 0;
};

}  // namespace terrace
