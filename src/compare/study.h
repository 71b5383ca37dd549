// What a comparison runs: every policy at every learning rate on the first seed, then each at its
// best rate on the other seeds, and the ablations at the best rate of the policy they vary.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "compare/result.h"
#include "optim/policy.h"
#include "train/config.h"

namespace terrace {

// As asked for on the command line.
struct StudyRequest {
  std::vector<std::string> policies = {};   // ready-made ones or .toml files
  std::vector<std::string> ablations = {};  // likewise; the base of each is among `policies`
  // "3e-3", or "0.3x" for a multiple of the policy's own; empty: each policy's own.
  std::vector<std::string> learning_rates = {};
  int64_t seeds = 1;
};

struct StudyPolicy {
  std::string name;                // a file's without .toml
  bool file = false;               // else a ready-made one, known by its name
  PolicyTables tables = {};        // of a file
  std::vector<double> rates = {};  // ascending; none for an ablation
  std::string base = {};           // of an ablation: whose best rate it takes; else empty

  bool ablation() const { return !base.empty(); }
};

struct Study {
  RunConfig base;                     // its policy, learning rate and seed are replaced
  std::vector<StudyPolicy> policies;  // ablations last
  int64_t seeds = 1;                  // base.training.seed and those that follow it

  int64_t first_seed() const { return base.training.seed; }
  const StudyPolicy& Named(std::string_view name) const;
};

// Throws Error on one line for policies that are unknown or named twice, ablations without their
// base, and learning rates that are none.
Study MakeStudy(const RunConfig& base, const StudyRequest& request);

struct RunSpec {
  std::string policy;
  double learning_rate = 0;
  int64_t seed = 0;

  bool operator==(const RunSpec&) const = default;
};
// "skewadam-lr0.003-seed1"
std::string NameOf(const RunSpec& run);

// One run. Throws Error naming the policy where the base's settings do not fit it.
ResolvedRun ResolvedOf(const Study& study, const RunSpec& run);

// Finished runs by name.
using RunResults = std::map<std::string, RunResult, std::less<>>;

// The learning rate of a policy that is not an ablation.
struct ChosenRate {
  // Of the lowest final validation loss on the first seed, ties to the lower rate; empty while
  // none is finished, and when all have diverged.
  std::optional<double> rate = {};
  bool complete = false;  // all rates have been run: the choice is final
  bool at_edge = false;   // the lowest or the highest of several: a better one may lie beyond
};
ChosenRate ChooseRate(const Study& study, const StudyPolicy& policy, const RunResults& results);

// Runs that the results decide, in the order in which they are to be done, finished ones too.
std::vector<RunSpec> KnownRuns(const Study& study, const RunResults& results);
// How many more there will be once learning rates are chosen, unless all rates of a policy diverge.
int64_t UndecidedRuns(const Study& study, const RunResults& results);

}  // namespace terrace
