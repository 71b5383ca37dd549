// What a comparison keeps of a finished run: result.json in the run's folder.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <istream>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/arena.h"
#include "model/parameter.h"
#include "optim/optimizer.h"

namespace terrace {

// Seconds are those of training steps alone, added up over all parts of an interrupted run.
struct ValidationPoint {
  int64_t step = 0;
  int64_t tokens = 0;
  double seconds = 0;
  double loss = 0;  // mean cross-entropy, in nats
};

// Means over a few steps in a row; step, tokens and seconds are those of the last of them.
struct CurvePoint {
  int64_t step = 0;
  int64_t tokens = 0;
  double seconds = 0;
  double loss = 0;       // of training, in nats
  double aux_loss = 0;   // sum over layers, with its coefficient
  double imbalance = 0;  // busiest expert's load over an even one, in the least balanced layer
  // Share of second moments on the eps floor; empty where a population has none.
  std::array<std::optional<double>, kPopulations> floored{};
};

// Assignments of tokens by expert, over the last tenth of the steps.
struct ExpertLoads {
  int64_t layer = 0;
  std::vector<int64_t> counts;
};

struct Divergence {
  int64_t step = 0;
  std::string reason;
};

// Memory by plan, which the run's own ledger equals.
struct RunMemory {
  int64_t peak_bytes = 0;
  CategoryBytes at_peak_bytes{};
  StateBytes state;  // as the policy declares it
};

// What the caller knows of a run; the rest comes from its metrics.
struct RunFacts {
  std::string policy;
  std::string policy_toml;  // resolved: what the policy's name meant
  double learning_rate = 0;
  int64_t seed = 0;
  std::string data;     // a fingerprint
  int64_t threads = 0;  // that it ended with; 0: not recorded
  RunMemory memory;
  std::optional<Divergence> diverged;
};

struct RunResult {
  RunFacts facts;
  int64_t steps = 0;
  int64_t tokens = 0;
  double seconds = 0;
  double tokens_per_second = 0;  // median over steps
  double first_loss = 0;         // of the first step, before any update
  // Of the training loss (compare/spikes.h), until it diverged where it did. Empty in results of
  // earlier versions.
  std::optional<int64_t> spikes;
  double unigram_entropy = 0;               // of the validation targets, in nats
  std::vector<ValidationPoint> validation;  // the last one is the final one
  std::vector<CurvePoint> curve;            // at most kCurvePoints
  std::vector<ExpertLoads> loads;           // MoE layers

  static constexpr int64_t kCurvePoints = 200;

  bool diverged() const { return facts.diverged.has_value(); }
  // Of the final validation; only of a run that did not diverge.
  double final_loss() const { return validation.back().loss; }
};

// From the run's metrics.jsonl, which may be empty for a run that diverged; it is read twice, a
// line at a time. A final validation loss that is not finite makes the run a diverged one. Throws
// Error when the metrics are damaged or lack a step ("metrics.jsonl:7: ..."), or hold no
// validation; `path` is for errors.
RunResult MakeRunResult(RunFacts facts, std::istream& metrics_jsonl, std::string_view path);

std::string ToJson(const RunResult& result);
// `path` is for errors. Throws Error for anything that ToJson did not write.
RunResult ParseRunResult(std::string_view json, std::string_view path);

}  // namespace terrace
