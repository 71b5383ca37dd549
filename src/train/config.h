// Everything that a training run is told, from TOML and --set.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "model/config.h"
#include "model/parameter.h"
#include "optim/clipping.h"
#include "optim/policy.h"
#include "optim/schedule.h"
#include "train/fields.h"

namespace terrace {

struct DataConfig {
  std::string folder;     // as `terrace data prepare` leaves it
  std::string tokenizer;  // tokenizer.json, a folder with vocab.json, or "bytes"; empty: the data's
};

// What becomes of gradients: all are kept until the end of a step (optim/accumulate_sink.h), or
// each is applied and forgotten as soon as it is complete (optim/release_sink.h).
enum class SinkKind : uint8_t { kAccumulate, kRelease };

struct TrainingConfig {
  int64_t steps = 1000;
  int64_t micro_batch = 8;  // sequences
  int64_t sequence_length = 128;
  int64_t micro_batches = 1;  // a step accumulates the gradients of this many
  int64_t seed = 1;
  DType gradient_dtype = DType::kF32;
  SinkKind sink = SinkKind::kAccumulate;
  bool activation_checkpointing = false;
  int64_t eval_interval = 100;        // steps; 0: never
  int64_t eval_batches = 8;           // of micro_batch sequences, always the same ones
  int64_t checkpoint_interval = 100;  // steps; 0: only at the end
  int64_t keep = 2;                   // checkpoints
  int64_t threads = 0;                // 0: as many as the machine runs at once

  int64_t StepTokens() const { return micro_batches * micro_batch * sequence_length; }
};

struct OptimizerConfig {
  std::string policy = "skewadam";     // a ready-made one, or kOwnPolicy
  std::string policy_file;             // that an own one was read from, for errors; else empty
  std::optional<float> learning_rate;  // peak; empty: the policy's own
  ScheduleKind schedule = ScheduleKind::kCosine;
  float warmup_fraction = 0.03f;      // of all steps
  float decay_fraction = 0.2f;        // of all steps, at the end; wsd only
  float min_ratio = 0;                // of learning_rate, at the end of linear, cosine and wsd
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
};

// The table of settings, bound to `config`.
std::vector<Field> FieldsOf(RunConfig& config);

// Reads a TOML file, then `assignments` ("key=value") over it. model.preset names the model that
// other keys change; an optimizer.policy that names a file becomes the configuration's own policy.
// Relative paths are made absolute. Throws Error on one line.
RunConfig LoadConfig(const std::filesystem::path& path,
                     const std::vector<std::string>& assignments);

// A run of `model` that has no data, with `assignments` over the defaults: for plans. Throws Error
// on one line.
RunConfig ConfigOfModel(const ModelConfig& model, const std::vector<std::string>& assignments);

// Which tensor an error of a policy concerns: " (population of
// layers.1.ff.experts.0.gate_proj.weight)"; nothing where the model has none, or is at fault
// itself.
std::string TensorsOf(const ModelConfig& model, Population population);

// Impossible combinations, named by key. LoadConfig calls it.
void CheckConfig(const RunConfig& config);

// The policy with what the configuration lays over it. Throws Error naming the setting at fault.
Policy PolicyOf(const RunConfig& config);
Schedule ScheduleOf(const RunConfig& config);

// Throws Error naming the key if a run under `old_config` cannot go on under `new_config`.
void CheckSameRun(RunConfig old_config, RunConfig new_config);

}  // namespace terrace
