// Which settings would make a run fit, found by planning them.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "train/config.h"

namespace terrace {

struct Suggestion {
  std::vector<std::string> settings;  // "training.sink=release", as --set takes them
  int64_t peak_bytes = 0;
  // Compute of a step over that of the run as it is.
  double relative_compute = 1;
  // Whether results differ by more than the order of sums in float32: other roundings, other noise,
  // or routers that are balanced over other tokens.
  bool changes_numbers = false;
};

struct Advice {
  // What fits, least costly first; none contains all the changes of an earlier one.
  std::vector<Suggestion> fitting;
  // The combination that needs least, of those that were planned.
  std::optional<Suggestion> smallest;
  int64_t planned = 0;  // combinations
};

// The peak of a run, by a dry run of it.
using Planner = std::function<int64_t(const ResolvedRun&)>;

// Combinations of: activation checkpointing, the release sink (with clipping as it is or by
// tensor), micro-batches of a half, a quarter ... with as many more of them (in an evaluation,
// too), gradients and momentum of bfloat16, bfloat16 weights, and another policy. The order of
// cost: settings that repeat computation count with what they add to it in per cent; those that
// change numbers with what we deem them worth beside it (gradients or momentum of bfloat16 15,
// clipping by tensor 25, weights of bfloat16 60, another policy 100). Combinations that a policy or
// sink refuses are left out.
//
// A policy under a sink is left out altogether when none of its most saving combinations fits: all
// types of bfloat16, with and without activation checkpointing, the micro-batch as it is and the
// smallest.
//
// With `runnable` false, config.model is a stand-in and the planner does not see activations: what
// would change nothing but them is not tried.
Advice Advise(const ResolvedRun& run, int64_t budget_bytes, const Planner& planner,
              bool runnable = true);

}  // namespace terrace
