// One training step:
// batch -> forward(blocks) -> head and loss -> backward(blocks, reversed) -> sink.finish.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/error.h"
#include "model/model.h"
#include "optim/step_sink.h"

namespace terrace {

struct StepLosses {
  double loss = 0;      // mean over counted tokens of the cross-entropy, in nats
  int64_t tokens = 0;   // counted: those whose target is not ignored
  double aux_loss = 0;  // with its coefficient; sum over layers, mean over micro-batches
  double z_loss = 0;    // likewise
  std::vector<LayerRouting> routing;  // one a MoE layer; counts summed over micro-batches
};

struct PassSettings {
  uint64_t noise_key = 0;  // one per (seed, step)
  // A block keeps its input only and is run again for its backward pass.
  bool checkpointing = false;
  // All micro-batches take a layer before any takes the next, and share backward calls; else one
  // goes forward and back before the next.
  bool together = false;
};
// Runs `micro_batches` forward and back, and leaves in `sink` the gradient of
//   mean over counted tokens of the cross-entropy + mean over micro-batches of load-balancing
//   losses.
// In a dry run all numbers are 0.
StepLosses ForwardBackward(Model& model, std::span<const MicroBatch> micro_batches,
                           const PassSettings& settings, GradientSink& sink);

struct StepSettings {
  float learning_rate = 0;
  uint64_t noise_key = 0;
  bool checkpointing = false;
};
struct StepReport {
  StepLosses losses;
  StepResult update;
};
// The loss or a gradient is not finite, of which the text names the first tensor at fault, or what
// is not finite was divided by: all gradients are 0.
class NotFiniteError : public Error {
 public:
  using Error::Error;
};

// The whole step. After a NotFiniteError that names a tensor no weight and no state has changed,
// with a sink that applies updates at once: none since that tensor, and none for a loss that is not
// finite.
StepReport TrainStep(Model& model, std::span<const MicroBatch> micro_batches,
                     const StepSettings& settings, StepSink& sink);

// Sum over counted tokens of the cross-entropy in nats, without gradients, noise or load-balancing
// losses.
double ForwardLoss(Model& model, const MicroBatch& batch);

// Micro-batches of B sequences of T tokens in new activations, to be filled.
std::vector<MicroBatch> AllocateMicroBatches(Arena& arena, int64_t count, int64_t B, int64_t T);

}  // namespace terrace
