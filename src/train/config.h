// Everything that a training run is told, from TOML and --set.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/settings.h"
#include "model/config.h"
#include "model/parameter.h"
#include "optim/clipping.h"
#include "optim/policy.h"
#include "optim/schedule.h"

namespace terrace {

struct DataConfig {
  std::string folder;     // as `terrace data prepare` leaves it
  std::string tokenizer;  // tokenizer.json, a folder with vocab.json, or "bytes"; empty: the data's
};

// What becomes of gradients: all are kept until the end of a step (optim/accumulate_sink.h), or
// each is applied and forgotten as soon as it is complete (optim/release_sink.h).
enum class SinkKind : uint8_t { kAccumulate, kRelease };
// "accumulate", "release"
std::string_view NameOf(SinkKind kind);

struct TrainingConfig {
  int64_t steps = 1000;
  int64_t micro_batch_size = 8;  // sequences
  int64_t sequence_length = 128;
  int64_t gradient_accumulation_steps = 1;  // micro-batches whose gradients make one step
  int64_t seed = 1;
  DType gradient_dtype = DType::kF32;
  SinkKind sink = SinkKind::kAccumulate;
  bool activation_checkpointing = false;
  int64_t eval_interval = 100;        // steps; 0: never
  int64_t eval_batches = 8;           // of micro_batch_size sequences, always the same ones
  int64_t checkpoint_interval = 100;  // steps; 0: only at the end
  int64_t keep = 2;                   // checkpoints
  int64_t threads = 0;                // 0: as many as the machine runs at once

  int64_t StepTokens() const {
    return gradient_accumulation_steps * micro_batch_size * sequence_length;
  }
};

struct OptimizerConfig {
  std::string policy = "skewadam";     // a ready-made one, or kOwnPolicy
  std::string policy_file;             // that an own one was read from, for errors; else empty
  std::optional<float> learning_rate;  // peak; empty: the policy's own
  ScheduleKind schedule = ScheduleKind::kCosine;
  float warmup_fraction = 0.03f;      // of all steps
  float decay_fraction = 0.2f;        // of all steps, at the end; wsd only
  float min_ratio = 0;                // of learning_rate, that linear, cosine and wsd lead to
  std::optional<float> weight_decay;  // over the policy's own, for all populations
  // Over both, for one population: keys of PolicyEntry and of its rule.
  std::array<Settings, kPopulations> populations;
  Clipping clipping;
};

// The value of optimizer.policy for the policy that RunConfig itself holds.
inline constexpr std::string_view kOwnPolicy = "own";

struct RunConfig {
  std::string preset;  // where the model started from; consumed by LoadConfig
  ModelConfig model;
  DataConfig data;
  TrainingConfig training;
  OptimizerConfig optimizer;
  // Written here, or taken from the file that optimizer.policy named: a run does not depend on that
  // file once it has started.
  PolicyTables policy;
  // Of a run that has been started: settings in it that have no effect are no mistakes.
  bool saved = false;
  // By a release up to 0.1.
  bool saved_earlier = false;
  // `model` stands in for one that cannot be run, and lacks populations that that one may have.
  bool stand_in = false;
  // Of reading it: settings under old names. One line each, for whoever is at the terminal.
  std::vector<std::string> notices;
};

// The table of settings, bound to `config`.
Fields FieldsOf(RunConfig& config);

// Reads a TOML file, then `assignments` ("key=value") over it. model.preset names the model that
// other keys change; an optimizer.policy that names a file becomes the configuration's own policy.
// Relative paths are made absolute. Throws Error on one line, also for settings that are written
// but have no effect: of the file as it is, and of `assignments` on the whole.
RunConfig LoadConfig(const std::filesystem::path& path,
                     const std::vector<std::string>& assignments);

// The same of the config.toml that a run or a checkpoint keeps. Whatever a run has been started
// with is taken. Throws Error when the file was cut off.
RunConfig LoadSavedConfig(const std::filesystem::path& path,
                          const std::vector<std::string>& assignments = {});
// What such a file holds.
std::string SavedConfigText(RunConfig config);

// A run of `model` that has no data, with `assignments` over the defaults: for plans. Throws Error
// on one line. `stand_in` as in RunConfig.
RunConfig ConfigOfModel(const ModelConfig& model, const std::vector<std::string>& assignments,
                        bool stand_in = false);

// Which tensor an error of a policy concerns: " (population of
// layers.1.ff.experts.0.gate_proj.weight)"; nothing where the model has none, or is at fault
// itself.
std::string TensorsOf(const ModelConfig& model, Population population);

// A configuration with what follows from it, worked out once a run.
struct ResolvedRun {
  // Throws Error naming the setting at fault, for impossible values and combinations. Implicit:
  // where a run is wanted, a configuration is one.
  ResolvedRun(RunConfig config_of_run);  // NOLINT(google-explicit-constructor)

  RunConfig config;
  Policy policy;  // with what the configuration lays over it
  Schedule schedule;
};

// Throws Error naming the key if the run `old_run` cannot go on as `new_run`.
void CheckSameRun(ResolvedRun old_run, ResolvedRun new_run);

}  // namespace terrace
