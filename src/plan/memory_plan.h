// The memory of a training run, to the byte: what a dry run of it takes, by category and by
// population, and when.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "core/arena.h"
#include "model/parameter.h"
#include "train/config.h"

namespace terrace {

// One part of a step, at the moment within it when the most was held.
struct PlanMoment {
  Phase phase;
  CategoryBytes bytes{};

  int64_t total_bytes() const;
};

struct MemoryPlan {
  // The arena's own: total_peak_bytes is the capacity that the run maps.
  Ledger ledger;
  // At the peak; columns add up to ledger.at_peak_bytes, with each tensor's share of the alignment.
  // The last row is what belongs to no parameter: activations and scratch.
  static constexpr int kRows = kPopulations + 1;
  std::array<CategoryBytes, kRows> at_peak{};
  // Of these: what rounding up to Arena::kAlignment costs.
  int64_t alignment_bytes = 0;
  // What is done at the peak, and the tensor whose allocation makes it.
  Phase peak_phase;
  std::string peak_tensor;
  // From setting up to the evaluation, where there is one; at most kMoments of equal weight.
  static constexpr size_t kMoments = 400;
  std::vector<PlanMoment> moments;
};
// "embedding" ...; "(no parameter)" for the last.
std::string_view RowName(int row);

// By a dry run of a step and an evaluation. The number of threads counts, as it does in a run.
MemoryPlan PlanMemory(const ResolvedRun& run);

}  // namespace terrace
