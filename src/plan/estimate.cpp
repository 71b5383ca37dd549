#include "plan/estimate.h"

namespace terrace {
namespace {

double PassesOf(const RunConfig& config) {
  const bool twice = config.training.sink == SinkKind::kRelease &&
                     config.optimizer.clipping.kind == ClippingKind::kGlobalNorm;
  return twice ? 2 : 1;
}

}  // namespace

double RelativeCompute(const RunConfig& config) {
  // Backward is twice forward, which checkpointing does once more.
  return PassesOf(config) * (config.training.activation_checkpointing ? 4.0 / 3.0 : 1.0);
}

StepCost CostOf(const ModelSize& size, const TensorBytes& bytes, const RunConfig& config) {
  const TrainingConfig& training = config.training;
  StepCost cost;
  cost.tokens = training.StepTokens();
  cost.flops_per_token = size.FlopsPerToken(training.sequence_length);
  cost.step_flops =
      cost.flops_per_token * static_cast<double>(cost.tokens) * RelativeCompute(config);
  cost.repeated_share = RelativeCompute(config) - 1;

  const double passes = PassesOf(config);
  const double micro_batches = static_cast<double>(training.gradient_accumulation_steps);
  const double uses = training.activation_checkpointing ? 3 : 2;
  cost.weight_bytes = static_cast<double>(bytes.weights) * (passes * micro_batches * uses + 2);
  cost.gradient_bytes =
      static_cast<double>(bytes.gradients) * (passes * (2 * micro_batches - 1) + 1);
  cost.state_bytes = static_cast<double>(bytes.state) * 2;
  return cost;
}

}  // namespace terrace
