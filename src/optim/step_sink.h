// A gradient sink that ends in updated weights. One training step is
//   sink.BeginStep(micro_batches, learning_rate);
//   do {
//     for each micro-batch, or once for all of them together: forward, backward(..., sink)
//   } while (sink.AnotherPass());
//   StepResult result = sink.Finish();
// whatever the sink does in between: keep all gradients until Finish, or apply each update as
// soon as its gradient is complete.
#pragma once

#include <algorithm>
#include <cstdint>

#include "model/gradient_sink.h"
#include "optim/optimizer.h"

namespace terrace {

struct StepResult {
  // L2 norm of all gradients of the step, before clipping. 0 in a dry run.
  double gradient_norm = 0;
  // What global-norm clipping multiplied the gradients by; 1 with other kinds.
  float gradient_scale = 1;
  int64_t updated_tensors = 0;
  int64_t skipped_tensors = 0;  // no token reached them in any micro-batch
  PopulationReports reports{};  // by population: entries of the second moment on the eps floor
  // A tensor whose gradient is not finite, the first in the model's order or, of those that are
  // updated one after the other, in time. From then on no weight and no state was changed, but for
  // hidden buffers. Null when all is well.
  const Parameter* not_finite = nullptr;
};

// What a gradient is kept in: `gradient_dtype` (float32 or bfloat16) for bfloat16 weights, float32
// else.
inline DType GradientTypeOf(const Parameter& parameter, DType gradient_dtype) {
  return parameter.value.dtype == DType::kBF16 ? gradient_dtype : DType::kF32;
}

inline int64_t TrainedTensors(const Parameters& parameters) {
  return std::count_if(parameters.begin(), parameters.end(),
                       [](const Parameter& parameter) { return parameter.trained(); });
}

class StepSink : public GradientSink {
 public:
  // Whether every backward call has to be given all micro-batches of the step; else each its own.
  virtual bool together() const { return false; }
  // micro_batches: of the step. Forgets an unfinished step.
  virtual void BeginStep(int64_t micro_batches, float learning_rate) = 0;
  // Whether the sink needs the same gradients once more. Asked once they are complete.
  virtual bool AnotherPass() { return false; }
  // Throws InternalError when a parameter had more or fewer contributions than micro_batches times
  // its own.
  virtual StepResult Finish() = 0;
};

}  // namespace terrace
