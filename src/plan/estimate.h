// What a step costs beside memory. These are estimates, from counts alone.
#pragma once

#include <cstdint>

#include "plan/memory_plan.h"
#include "plan/subject.h"

namespace terrace {

// Full-size tensors in bytes: what one pass over all of them moves.
struct TensorBytes {
  int64_t weights = 0;
  int64_t gradients = 0;       // all of them, also where only one is alive at a time
  int64_t hidden_buffers = 0;  // of these, what outlives a step
  int64_t state = 0;
};

struct StepCost {
  int64_t tokens = 0;
  // Of the model's products (SizeOf), without what is computed again.
  double flops_per_token = 0;
  // With recomputation, and with the second pass of the release sink under clipping by the global
  // norm: what the step executes.
  double step_flops = 0;
  double repeated_share = 0;  // of the model's own: 1/3 with activation checkpointing
  // Between memory and processor, as if every use of a tensor fetched all of it once and nothing
  // stayed in caches. Weights: read by each forward and backward pass of each micro-batch, read and
  // written by the update. Gradients: written, and read again for each further micro-batch and by
  // the update. State: read and written. Activations, and rules that read twice, are left out.
  double weight_bytes = 0;
  double gradient_bytes = 0;
  double state_bytes = 0;
};

// `config` says how it is trained; the model is that of `size` and `bytes`.
StepCost CostOf(const ModelSize& size, const TensorBytes& bytes, const RunConfig& config);

// Compute of a step over that of the model's products: 4/3 with activation checkpointing, twice as
// much where the release sink clips by the global norm.
double RelativeCompute(const RunConfig& config);

}  // namespace terrace
