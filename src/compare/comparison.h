// The results of a study, put together by policy.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "compare/study.h"

namespace terrace {

struct MeanSpread {
  double mean = 0;
  std::optional<double> stddev;  // sample standard deviation; empty for fewer than two values
};
MeanSpread MeanSpreadOf(const std::vector<double>& values);

// Means over the seeds of one policy at one learning rate; `seconds` too.
struct MeanValidationPoint {
  int64_t step = 0;
  int64_t tokens = 0;
  double seconds = 0;
  MeanSpread loss;
  MeanSpread perplexity;
};

// A row of the table: a policy at its learning rate, over seeds.
struct PolicyRow {
  std::string policy;
  std::string base;                     // of an ablation
  std::optional<double> learning_rate;  // empty: none yet, or all diverged
  int64_t rates = 0;                    // in the sweep; 0 for an ablation
  ChosenRate chosen;                    // for an ablation: that of its base
  int64_t seeds = 0;                    // finished without diverging
  int64_t diverged = 0;                 // runs at this learning rate; without one, of the sweep
  // Of all these runs together; empty where one of them does not say.
  std::optional<int64_t> spikes;
  // From here on only with seeds > 0.
  std::string toml;       // the policy, resolved
  MeanSpread loss;        // final validation, in nats
  MeanSpread perplexity;  // mean of the seeds' own
  MeanSpread tokens_per_second;
  MeanSpread aux_loss;   // over the last tenth of the steps, with its coefficient
  MeanSpread imbalance;  // likewise; busiest expert over even
  RunMemory memory;
  double bytes_per_parameter = 0;  // all memory at the peak, over the model's parameters
  // No other policy takes as little memory and ends with as low a mean loss, and is better in one.
  // Policies of which a run at the chosen rate has diverged are no choice: they are not on the
  // front, and keep nobody off it.
  bool on_front = false;
  std::vector<MeanValidationPoint> validation;
  std::vector<CurvePoint> curve;   // means over seeds
  std::vector<ExpertLoads> loads;  // sums over seeds
};

struct SweepRow {
  std::string policy;
  double learning_rate = 0;
  bool chosen = false;
  bool at_edge = false;        // chosen, and no rate beyond it was run
  std::optional<double> loss;  // final validation on the first seed; empty: diverged or not run
  double first_loss = 0;       // of that run's first step
  std::optional<int64_t> spikes;
  std::optional<Divergence> diverged;
  bool finished = false;

  bool worse_than_untrained() const { return loss && *loss > first_loss; }
};

struct Comparison {
  std::string title;
  // What was compared, as name and text: model, data, tokens, seeds, command line.
  std::vector<std::pair<std::string, std::string>> facts;
  std::string data;  // its fingerprint
  int64_t parameters = 0;
  int64_t runs_done = 0;
  int64_t runs_total = 0;
  double unigram_entropy = 0;  // of the validation targets; 0 before the first result
  std::vector<PolicyRow> policies;
  std::vector<SweepRow> sweep;  // of policies with several rates
  std::vector<RunResult> runs;  // finished ones, in order
};

// What a study does not know of its surroundings.
struct StudyContext {
  std::string command;    // the command line that repeats it
  std::string machine;    // the processor's name, for the speeds; may be empty
  std::string data = {};  // a fingerprint
  int64_t train_tokens = 0;
  int64_t val_tokens = 0;
};

// The numbers of threads that runs had, as far as they say.
std::set<int64_t> ThreadsOf(const RunResults& results);

Comparison Compare(const Study& study, const RunResults& results, const StudyContext& context);

}  // namespace terrace
