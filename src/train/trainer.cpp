#include "train/trainer.h"

#include <chrono>
#include <memory>
#include <utility>

#include "backend/cpu/cpu_backend.h"
#include "core/atomic_file.h"
#include "core/error.h"
#include "core/parallel.h"
#include "core/rng.h"
#include "data/batches.h"
#include "data/tokenizer_files.h"
#include "optim/accumulate_sink.h"
#include "optim/release_sink.h"
#include "train/checkpoint.h"
#include "train/measure.h"
#include "train/processor_watch.h"
#include "train/run_data.h"
#include "train/run_folder.h"
#include "train/step.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;

// Sets this use of the seed apart from others.
constexpr uint64_t kRouterNoisePurpose = 0x6e6f697365;

EvaluationShape EvaluationShapeOf(const RunConfig& config) {
  return {config.training.micro_batch_size, config.training.sequence_length,
          config.training.eval_batches};
}

std::unique_ptr<StepSink> MakeSink(const RunConfig& config, const Model& model,
                                   Optimizer& optimizer, Arena& arena) {
  const DType dtype = config.training.gradient_dtype;
  const Clipping& clipping = config.optimizer.clipping;
  if (config.training.sink == SinkKind::kRelease) {
    return std::make_unique<ReleaseSink>(model.parameters(), optimizer, arena, dtype, clipping);
  }
  return std::make_unique<AccumulateSink>(model.parameters(), optimizer, arena, dtype, clipping);
}

// What a run holds in its arena.
struct Machine {
  Machine(const ResolvedRun& run, Arena owned)
      : arena(std::move(owned)),
        backend(arena),
        model(run.config.model, backend),
        optimizer(run.policy, model.parameters(), arena,
                  static_cast<uint64_t>(run.config.training.seed)),
        sink(MakeSink(run.config, model, optimizer, arena)) {}

  // One step, from reading its batches (unless dry) to the updated weights.
  StepReport Step(const ResolvedRun& run, int64_t step, const TrainBatches* batches) {
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

  Arena arena;
  CpuBackend backend;
  Model model;
  Optimizer optimizer;
  std::unique_ptr<StepSink> sink;
};

StepMetrics MetricsOf(const ResolvedRun& run, const RunSummary& summary, const Machine& machine,
                      const RunState& state, const StepReport& report, double seconds) {
  const TrainingConfig& training = run.config.training;
  StepMetrics metrics;
  metrics.step = state.step;
  metrics.loss = report.losses.loss;
  metrics.aux_loss = report.losses.aux_loss;
  metrics.z_loss = report.losses.z_loss;
  metrics.gradient_norm = report.update.gradient_norm;
  metrics.learning_rate = run.schedule.LearningRate(state.step);
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
    metrics.layers.push_back({layer.layer, layer.counts, LoadOf(layer.counts),
                              layer.statistics.aux_loss, layer.statistics.z_loss,
                              layer.statistics.entropy});
  }
  return metrics;
}

// Nothing but what a start leaves that failed or was killed before its first step.
bool HoldsNothing(const RunFolder& run) {
  if (!fs::is_directory(run.path)) return !fs::exists(run.path);
  for (const auto& entry : fs::directory_iterator(run.path)) {
    const fs::path path = entry.path();
    const bool leftover = path == run.tokenizer() || path == run.tokenizer().string() + ".tmp" ||
                          path == run.config() || path == run.config().string() + ".tmp" ||
                          (path == run.metrics() && fs::is_empty(path)) ||
                          (path == run.checkpoints() && fs::is_empty(path));
    if (!leftover) return false;
  }
  return true;
}

// Refuses what would overwrite or continue the wrong run.
void CheckFolder(const RunFolder& run, const ResolvedRun& wanted, bool resume) {
  if (!resume) {
    if (HoldsNothing(run)) return;
    if (run.HoldsRun()) {
      Fail("{}: holds a run already (--resume continues it)", run.path.string());
    }
    Fail("{}: exists and is not an empty folder", run.path.string());
  }
  if (!run.HoldsRun()) Fail("{}: holds no run to resume", run.path.string());
  // A checkpoint's own configuration is the one that it was trained under.
  const std::optional<fs::path> latest = LatestCheckpoint(run.checkpoints());
  CheckSameRun(LoadSavedConfig(latest ? *latest / "config.toml" : run.config()), wanted);
}

void CreateFolder(const RunFolder& run, const std::string& config_toml,
                  const std::optional<Tokenizer>& tokenizer, std::optional<FolderLock>& lock) {
  std::error_code error;
  fs::create_directories(run.checkpoints(), error);
  if (error) Fail("{}: cannot create: {}", run.path.string(), error.message());
  const bool is_new = !lock;
  if (is_new) {
    lock.emplace(run.path);
    // Another process may have begun, and even ended, a run since the check.
    if (!HoldsNothing(run)) Fail("{}: holds a run already", run.path.string());
  }
  // The one of a run that has begun is never replaced: what its ids mean is settled.
  if (tokenizer && (is_new || !fs::exists(run.tokenizer()))) {
    WriteFileAtomically(run.tokenizer(), ToTokenizerJson(*tokenizer));
  }
  // Last: with it the folder holds a run.
  WriteFileAtomically(run.config(), config_toml);
}

// Of those that are due after `first_step`.
int64_t SavesAfter(int64_t first_step, const TrainingConfig& training) {
  if (first_step >= training.steps) return 0;
  const int64_t interval = training.checkpoint_interval;
  if (interval == 0) return 1;
  const bool last_is_extra = training.steps % interval != 0;
  return training.steps / interval - first_step / interval + (last_is_extra ? 1 : 0);
}

int64_t CheckpointBytesOf(const RunConfig& config) {
  const Machine dry(config, Arena::Dry());
  return CheckpointBytes(dry.model, dry.optimizer);
}

// What `read` gives; its errors say what to do without the checkpoint.
template <typename Read>
auto FromCheckpoint(const fs::path& checkpoint, const Read& read) {
  try {
    return read();
  } catch (const Error& error) {
    Fail("{}; without the folder {} the run goes on from what was saved before it", error.what(),
         checkpoint.string());
  }
}

}  // namespace

Ledger PlanTraining(const ResolvedRun& run, ArenaWatcher* watcher) {
  const RunConfig& config = run.config;
  Arena arena = Arena::Dry();
  arena.Watch(watcher);
  Machine machine(run, std::move(arena));
  machine.Step(run, 1, nullptr);
  if (config.training.eval_interval > 0) {
    PlanEvaluation(machine.model, EvaluationShapeOf(config));
  }
  return machine.arena.ledger();
}

TrainResult Train(const ResolvedRun& resolved, const fs::path& run_folder,
                  const TrainOptions& options, const TrainCallbacks& callbacks) {
  const RunConfig& config = resolved.config;
  const bool resume = options.resume;
  // All that can be refused is refused before anything is written.
  const TrainingConfig& training = config.training;
  const RunFolder run{run_folder};
  CheckFolder(run, resolved, resume);
  std::optional<FolderLock> lock;
  if (resume) lock.emplace(run.path);
  const auto warn = [&](std::string_view text) {
    if (callbacks.warning) callbacks.warning(text);
  };
  const std::optional<fs::path> latest =
      resume ? LatestCheckpoint(run.checkpoints()) : std::nullopt;
  const RunData corpus = OpenRunData(config, resume ? OwnTokenizerOf(run) : std::nullopt);
  if (latest) {
    const DataIdentity then = FromCheckpoint(*latest, [&] { return LoadDataIdentity(*latest); });
    CheckSameData(then, corpus.identity, config.data.folder);
    if (!then.train) {
      warn(
          fmt::format("{} is of an earlier version and does not say what it was trained on; {} is "
                      "taken to be the same data",
                      latest->string(), config.data.folder));
    }
  }
  const TrainBatches batches(corpus.train, training.micro_batch_size, training.sequence_length,
                             static_cast<uint64_t>(training.seed));
  const std::string config_toml = SavedConfigText(config);

  RunSummary summary;
  summary.size = SizeOf(config.model);
  summary.plan = PlanTraining(resolved);
  summary.free_bytes = AvailableMemoryBytes();
  if (corpus.val) CheckEvaluationData(*corpus.val, EvaluationShapeOf(config));
  summary.peak_flops = MeasureProductFlops(config.model.weight_dtype);
  summary.train_tokens = corpus.train.size();
  summary.val_tokens = corpus.val ? corpus.val->size() : 0;
  summary.policy = config.optimizer.policy;
  summary.learning_rate = resolved.schedule.peak;
  summary.first_step = latest ? StepOf(*latest).value() : 0;
  summary.last_step = training.steps;
  const int64_t needed_bytes = summary.plan.total_peak_bytes;
  const bool refused = !options.overcommit && needed_bytes > summary.free_bytes;
  if (!options.overcommit && !refused) {
    RequireRoomForCheckpoints(run.checkpoints(), CheckpointBytesOf(config), training.keep,
                              SavesAfter(summary.first_step, training));
  }
  if (!resume && !refused) CreateFolder(run, config_toml, corpus.tokenizer, lock);
  if (callbacks.begin) callbacks.begin(summary);
  if (refused) {
    RequireMemory(needed_bytes, summary.free_bytes,
                  "`terrace plan` tells what would fit; --overcommit starts all the same");
  }

  Machine machine(resolved, Arena(needed_bytes));
  RunState state;
  if (latest) {
    state = FromCheckpoint(*latest, [&] {
      LoadModel(*latest, machine.model, warn);
      return LoadState(*latest, machine.model, machine.optimizer, warn);
    });
  } else {
    machine.model.Initialize(static_cast<uint64_t>(training.seed));
  }
  state.data = Joined(state.data, corpus.identity);
  if (resume) CreateFolder(run, config_toml, corpus.tokenizer, lock);
  MetricsFile metrics_file(run.metrics(), state.step);
  if (metrics_file.dropped_lines() > 0) {
    warn(fmt::format("metrics.jsonl: steps after {} are dropped, to be taken again (lines: {})",
                     state.step, metrics_file.dropped_lines()));
  }
  if (metrics_file.kept_step() < state.step) {
    warn(fmt::format("metrics.jsonl: has no lines of steps {} to {}", metrics_file.kept_step() + 1,
                     state.step));
  }

  CollapseWatch collapse(config.model.router.top_k);
  ProcessorWatch processors(MaxThreads());
  const auto started = std::chrono::steady_clock::now();
  TrainResult result;
  int64_t saved_step = latest ? state.step : -1;
  const auto save = [&] {
    if (saved_step == state.step) return;
    metrics_file.Sync();  // no checkpoint is ahead of its metrics
    const fs::path path = SaveCheckpoint(run.checkpoints(), training.keep, config_toml, state,
                                         machine.model, machine.optimizer);
    saved_step = state.step;
    if (callbacks.saved) callbacks.saved(path);
  };
  const auto due = [&](int64_t interval) { return interval > 0 && state.step % interval == 0; };

  while (state.step < training.steps && !result.interrupted) {
    const auto start = std::chrono::steady_clock::now();
    const int64_t step = state.step + 1;
    StepReport report;
    try {
      report = machine.Step(resolved, step, &batches);
    } catch (const Error& error) {
      const auto last = LatestCheckpoint(run.checkpoints());
      const std::string text =
          fmt::format("step {}: {}{}", step, error.what(),
                      last ? "; the last good checkpoint is " + last->string() : "");
      if (dynamic_cast<const NotFiniteError*>(&error) != nullptr) {
        throw DivergedError(step, error.what(), text);
      }
      throw Error(text);
    }
    state.step = step;
    state.tokens += report.losses.tokens;
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;

    const bool last = step == training.steps;
    std::optional<Evaluation> evaluation;
    if (corpus.val && (due(training.eval_interval) || last)) {
      evaluation = Evaluate(machine.model, *corpus.val, EvaluationShapeOf(config));
      result.evaluation = evaluation;
    }
    // After the evaluation, whose memory counts.
    StepMetrics metrics = MetricsOf(resolved, summary, machine, state, report, time.count());
    metrics.evaluation = evaluation;
    metrics_file.Append(metrics);
    if (callbacks.step) callbacks.step(metrics);
    for (const LayerRouting& layer : report.losses.routing) {
      if (const auto warning = collapse.Step(layer)) warn(*warning);
    }
    const std::chrono::duration<double> so_far = std::chrono::steady_clock::now() - started;
    if (const auto warning = processors.Step(so_far.count())) warn(*warning);
    result.interrupted = !last && callbacks.stop && callbacks.stop();
    if (due(training.checkpoint_interval) || last || result.interrupted) save();
  }
  result.step = state.step;
  return result;
}

}  // namespace terrace
