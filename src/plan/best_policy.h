// Which ready-made policy to train with in a given memory.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "plan/advice.h"
#include "train/config.h"

namespace terrace {

// Ready-made policies that are worth their memory, the one that learns best first.
std::span<const std::string_view> PoliciesByLoss();

struct BestPolicy {
  std::string_view name;
  SinkKind sink = SinkKind::kAccumulate;
  int64_t peak_bytes = 0;
};

// The first of PoliciesByLoss that fits when the run is otherwise as it is, or with the release
// sink, which trains the same model. Empty where none does. Those that cannot serve the run (what
// it lays over its policy may fit no other) are passed over.
std::optional<BestPolicy> FindBestPolicy(const ResolvedRun& run, int64_t budget_bytes,
                                         const Planner& planner);

}  // namespace terrace
