#include "train/machine.h"

#include <utility>
#include <vector>

#include "core/rng.h"
#include "optim/accumulate_sink.h"
#include "optim/release_sink.h"

namespace terrace {
namespace {

// Sets this use of the seed apart from others.
constexpr uint64_t kRouterNoisePurpose = 0x6e6f697365;

std::unique_ptr<StepSink> MakeSink(const RunConfig& config, const Model& model,
                                   Optimizer& optimizer, Arena& arena) {
  const DType dtype = config.training.gradient_dtype;
  const Clipping& clipping = config.optimizer.clipping;
  if (config.training.sink == SinkKind::kRelease) {
    return std::make_unique<ReleaseSink>(model.parameters(), optimizer, arena, dtype, clipping);
  }
  return std::make_unique<AccumulateSink>(model.parameters(), optimizer, arena, dtype, clipping);
}

}  // namespace

Machine::Machine(const ResolvedRun& resolved, Arena owned)
    : run(resolved),
      arena(std::move(owned)),
      backend(arena),
      model(run.config.model, backend),
      optimizer(run.policy, model.parameters(), arena,
                static_cast<uint64_t>(run.config.training.seed)),
      sink(MakeSink(run.config, model, optimizer, arena)) {}

StepReport Machine::Step(int64_t step, const TrainBatches* batches) {
  const TrainingConfig& training = run.config.training;
  const Arena::PhaseScope phase(arena, Phase{"batch"});
  const Arena::Frame frame(arena);
  const std::vector<MicroBatch> micro_batches =
      AllocateMicroBatches(arena, training.gradient_accumulation_steps, training.micro_batch_size,
                           training.sequence_length);
  for (size_t m = 0; batches != nullptr && m < micro_batches.size(); ++m) {
    batches->Read((step - 1) * training.gradient_accumulation_steps + static_cast<int64_t>(m),
                  micro_batches[m].inputs.span<int32_t>(),
                  micro_batches[m].targets.span<int32_t>());
  }
  const StepSettings settings{
      .learning_rate = static_cast<float>(run.schedule.LearningRate(step)),
      .noise_key = MixKeys(static_cast<uint64_t>(training.seed), kRouterNoisePurpose, step),
      .checkpointing = training.activation_checkpointing};
  return TrainStep(model, micro_batches, settings, *sink);
}

}  // namespace terrace
