#include "train/trainer.h"

#include <chrono>
#include <utility>

#include "core/error.h"
#include "core/parallel.h"
#include "data/batches.h"
#include "train/balance.h"
#include "train/checkpoint.h"
#include "train/evaluate.h"
#include "train/machine.h"
#include "train/measure.h"
#include "train/processor_watch.h"
#include "train/run_data.h"
#include "train/run_folder.h"
#include "train/step.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

EvaluationShape EvaluationShapeOf(const RunConfig& config) {
  return {config.training.micro_batch_size, config.training.sequence_length,
          config.training.eval_batches};
}

StepMetrics MetricsOf(const RunSummary& summary, const Machine& machine, const RunState& state,
                      const StepReport& report, double seconds) {
  const TrainingConfig& training = machine.run.config.training;
  StepMetrics metrics;
  metrics.step = state.step;
  metrics.loss = report.losses.loss;
  metrics.aux_loss = report.losses.aux_loss;
  metrics.z_loss = report.losses.z_loss;
  metrics.gradient_norm = report.update.gradient_norm;
  metrics.learning_rate = machine.run.schedule.LearningRate(state.step);
  metrics.tokens = state.tokens;
  metrics.seconds = seconds;
  metrics.tokens_per_second = static_cast<double>(training.StepTokens()) / seconds;
  metrics.flops_per_second =
      metrics.tokens_per_second * summary.size.FlopsPerToken(training.sequence_length);
  metrics.mfu = metrics.flops_per_second / summary.peak_flops;
  metrics.planned_peak_bytes = summary.plan.total_peak_bytes;
  metrics.ledger_peak_bytes = machine.arena.ledger().total_peak_bytes;
  metrics.ledger_at_peak_bytes = machine.arena.ledger().at_peak_bytes;
  const ResidentMemory resident = ReadResidentMemory();
  metrics.resident_bytes = resident.bytes;
  metrics.resident_peak_bytes = resident.peak_bytes;
  for (size_t i = 0; i < kPopulations; ++i) {
    const UpdateReport& population = report.update.reports[i];
    if (population.entries == 0) continue;
    metrics.floored[i] =
        static_cast<double>(population.floored) / static_cast<double>(population.entries);
  }
  for (const LayerRouting& layer : report.losses.routing) {
    metrics.layers.push_back({layer.layer,
                              layer.counts,
                              LoadOf(layer.counts),
                              layer.statistics.aux_loss,
                              layer.statistics.z_loss,
                              layer.statistics.entropy,
                              {}});
    if (const TensorView bias = machine.model.SelectionBias(layer.layer); !bias.empty()) {
      const std::span<const float> values = bias.span<float>();
      metrics.layers.back().selection_bias.assign(values.begin(), values.end());
    }
  }
  return metrics;
}

// Of those that are due after `first_step`.
int64_t SavesAfter(int64_t first_step, const TrainingConfig& training) {
  if (first_step >= training.steps) return 0;
  const int64_t interval = training.checkpoint_interval;
  if (interval == 0) return 1;
  const bool last_is_extra = training.steps % interval != 0;
  return training.steps / interval - first_step / interval + (last_is_extra ? 1 : 0);
}

// What a run will take, by a dry run of a step and an evaluation.
struct TrainingPlan {
  Ledger ledger;
  int64_t checkpoint_bytes = 0;
};

TrainingPlan PlanOf(const ResolvedRun& run, ArenaWatcher* watcher) {
  Arena arena = Arena::Dry();
  arena.Watch(watcher);
  Machine machine(run, std::move(arena));
  machine.Step(1, nullptr);
  if (run.config.training.eval_interval > 0) {
    PlanEvaluation(machine.model, EvaluationShapeOf(run.config));
  }
  return {machine.arena.ledger(), CheckpointBytes(machine.model, machine.optimizer)};
}

// A run from its first check to its last step. Making one checks all that can be refused before
// anything is written.
class TrainingRun {
 public:
  TrainingRun(const ResolvedRun& run, const fs::path& folder, const TrainOptions& options,
              const TrainCallbacks& callbacks)
      : run_(run),
        options_(options),
        callbacks_(callbacks),
        folder_{folder},
        lock_(CheckAndLock()),
        latest_(options.resume ? LatestCheckpoint(folder_.checkpoints()) : std::nullopt),
        data_(OpenData()),
        batches_(data_.train, run.config.training.micro_batch_size,
                 run.config.training.sequence_length,
                 static_cast<uint64_t>(run.config.training.seed)),
        config_toml_(SavedConfigText(run.config)),
        plan_(PlanOf(run, nullptr)),
        summary_(Summarize()) {}
  TrainingRun(const TrainingRun&) = delete;

  TrainResult Go() {
    Begin();
    // A wish to end that came meanwhile: there is nothing yet that is not on the disk.
    if (Stops(summary_.first_step)) return {summary_.first_step, true, {}};
    Machine machine(run_, Arena(summary_.plan.total_peak_bytes));
    RunState state = Restore(machine);
    if (Stops(state.step)) return {state.step, true, {}};
    if (options_.resume) WriteRunFolder(folder_, config_toml_, data_.tokenizer, lock_);
    MetricsFile metrics = OpenMetrics(state.step);
    return TakeSteps(machine, state, metrics);
  }

 private:
  const TrainingConfig& training() const { return run_.config.training; }

  // Whether the run is asked to end after `step`, before its last.
  bool Stops(int64_t step) const {
    return step < training().steps && callbacks_.stop && callbacks_.stop();
  }

  void Warn(std::string_view text) const {
    if (callbacks_.warning) callbacks_.warning(text);
  }

  std::optional<FolderLock> CheckAndLock() const {
    if (const auto note = CheckRunFolder(folder_, run_, options_.resume)) Warn(*note);
    if (!options_.resume) return std::nullopt;
    return std::optional<FolderLock>(std::in_place, folder_.path);
  }

  // The same data as before, where a run is resumed.
  RunData OpenData() const {
    const RunConfig& config = run_.config;
    RunData data = OpenRunData(config, options_.resume ? OwnTokenizerOf(folder_) : std::nullopt);
    if (!latest_) return data;
    const DataIdentity then = FromCheckpoint(*latest_, [&] { return LoadDataIdentity(*latest_); });
    CheckSameData(then, data.identity, config.data.folder);
    if (!then.train) {
      Warn(
          fmt::format("{} is of an earlier version and does not say what it was trained on; {} is "
                      "taken to be the same data",
                      latest_->string(), config.data.folder));
    }
    return data;
  }

  RunSummary Summarize() const {
    const RunConfig& config = run_.config;
    RunSummary summary;
    summary.size = SizeOf(config.model);
    summary.plan = plan_.ledger;
    summary.free_bytes = AvailableMemoryBytes();
    if (data_.val) CheckEvaluationData(*data_.val, EvaluationShapeOf(config));
    summary.peak_flops = MeasureProductFlops(config.model.weight_dtype);
    summary.train_tokens = data_.train.size();
    summary.val_tokens = data_.val ? data_.val->size() : 0;
    summary.policy = config.optimizer.policy;
    summary.learning_rate = run_.schedule.peak;
    summary.first_step = latest_ ? StepOf(*latest_).value() : 0;
    summary.last_step = training().steps;
    return summary;
  }

  // Says what the run is and takes its folder, or refuses it for want of memory or disk.
  void Begin() {
    const int64_t needed_bytes = summary_.plan.total_peak_bytes;
    const bool refused = !options_.overcommit && needed_bytes > summary_.free_bytes;
    if (!options_.overcommit && !refused) {
      RequireRoomForCheckpoints(folder_.checkpoints(), plan_.checkpoint_bytes, training().keep,
                                SavesAfter(summary_.first_step, training()));
    }
    if (!options_.resume && !refused) {
      WriteRunFolder(folder_, config_toml_, data_.tokenizer, lock_);
    }
    if (callbacks_.begin) callbacks_.begin(summary_);
    if (refused) {
      RequireMemory(needed_bytes, summary_.free_bytes,
                    "`terrace plan` tells what would fit; --overcommit starts all the same");
    }
  }

  // Weights and state of the newest checkpoint, or those that a run begins with.
  RunState Restore(Machine& machine) const {
    RunState state;
    if (latest_) {
      const auto warn = [this](std::string_view text) { Warn(text); };
      state = FromCheckpoint(*latest_, [&] {
        LoadModel(*latest_, machine.model, warn);
        return LoadState(*latest_, machine.model, machine.optimizer, warn);
      });
    } else {
      machine.model.Initialize(static_cast<uint64_t>(training().seed));
    }
    state.data = Joined(state.data, data_.identity);
    return state;
  }

  MetricsFile OpenMetrics(int64_t step) const {
    MetricsFile metrics(folder_.metrics(), step);
    if (metrics.dropped_lines() > 0) {
      Warn(fmt::format("metrics.jsonl: steps after {} are dropped, to be taken again (lines: {})",
                       step, metrics.dropped_lines()));
    }
    if (metrics.kept_step() < step) {
      const int64_t first = metrics.kept_step() + 1;
      Warn(first == step
               ? fmt::format("metrics.jsonl: has no line of step {}", step)
               : fmt::format("metrics.jsonl: has no lines of steps {} to {}", first, step));
    }
    return metrics;
  }

  TrainResult TakeSteps(Machine& machine, RunState& state, MetricsFile& metrics) const {
    CollapseWatch collapse(run_.config.model.router.top_k);
    ProcessorWatch processors(MaxThreads());
    const Clock::time_point started = Clock::now();
    TrainResult result;
    result.step = state.step;
    const auto due = [&](int64_t interval) { return interval > 0 && state.step % interval == 0; };
    while (state.step < training().steps && !result.interrupted) {
      const Clock::time_point start = Clock::now();
      const StepReport report = TakeStep(machine, state.step + 1);
      ++state.step;
      state.tokens += report.losses.tokens;
      const double seconds = SecondsSince(start);

      const bool last = state.step == training().steps;
      std::optional<Evaluation> evaluation;
      if (data_.val && (due(training().eval_interval) || last)) {
        evaluation = Evaluate(machine.model, *data_.val, EvaluationShapeOf(run_.config));
        result.evaluation = evaluation;
      }
      // After the evaluation, whose memory counts.
      StepMetrics line = MetricsOf(summary_, machine, state, report, seconds);
      line.evaluation = evaluation;
      metrics.Append(line);
      if (callbacks_.step) callbacks_.step(line);
      for (const LayerRouting& layer : report.losses.routing) {
        if (const auto warning = collapse.Step(layer)) Warn(*warning);
      }
      if (const auto warning = processors.Step(SecondsSince(started))) Warn(*warning);
      result.interrupted = Stops(state.step);
      if (due(training().checkpoint_interval) || last || result.interrupted) {
        Save(machine, state, metrics);
      }
      result.step = state.step;
    }
    return result;
  }

  // Errors name the step and the checkpoint to go back to.
  StepReport TakeStep(Machine& machine, int64_t step) const {
    try {
      return machine.Step(step, &batches_);
    } catch (const Error& error) {
      const std::optional<fs::path> last = LatestCheckpoint(folder_.checkpoints());
      const std::string text =
          fmt::format("step {}: {}{}", step, error.what(),
                      last ? "; the last good checkpoint is " + last->string() : "");
      if (dynamic_cast<const NotFiniteError*>(&error) != nullptr) {
        throw DivergedError(step, error.what(), text);
      }
      throw Error(text);
    }
  }

  void Save(const Machine& machine, const RunState& state, MetricsFile& metrics) const {
    metrics.Sync();  // no checkpoint is ahead of its metrics
    const fs::path path = SaveCheckpoint(folder_.checkpoints(), training().keep, config_toml_,
                                         state, machine.model, machine.optimizer);
    if (callbacks_.saved) callbacks_.saved(path);
  }

  const ResolvedRun& run_;
  const TrainOptions& options_;
  const TrainCallbacks& callbacks_;
  const RunFolder folder_;
  std::optional<FolderLock> lock_;
  const std::optional<fs::path> latest_;  // the checkpoint to go on from
  const RunData data_;
  const TrainBatches batches_;
  const std::string config_toml_;
  const TrainingPlan plan_;
  const RunSummary summary_;
};

}  // namespace

Ledger PlanTraining(const ResolvedRun& run, ArenaWatcher* watcher) {
  return PlanOf(run, watcher).ledger;
}

TrainResult Train(const ResolvedRun& run, const fs::path& run_folder, const TrainOptions& options,
                  const TrainCallbacks& callbacks) {
  return TrainingRun(run, run_folder, options, callbacks).Go();
}

}  // namespace terrace
