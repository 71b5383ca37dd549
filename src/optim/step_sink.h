// A gradient sink that ends in updated weights. One training step is
//   sink.BeginStep(micro_batches, learning_rate);
//   for each micro-batch: forward, backward(..., sink)
//   StepResult result = sink.Finish();
// whatever the sink does in between: keep all gradients until Finish, or apply each update as
// soon as its gradient is complete.
#pragma once

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
  // The first tensor, in the model's order, whose gradient is not finite; then no weight and no
  // state was changed, but for gradient buffers that outlive the step. Null when all is well.
  const Parameter* fault = nullptr;
};

class StepSink : public GradientSink {
 public:
  // micro_batches: backward passes until Finish. Forgets an unfinished step.
  virtual void BeginStep(int64_t micro_batches, float learning_rate) = 0;
  // Throws Error ("internal: ...") when a parameter had more or fewer contributions than
  // micro_batches times its own.
  virtual StepResult Finish() = 0;
};

}  // namespace terrace
