// How evenly routers spread tokens over experts, and when one has collapsed.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>

#include "model/model.h"

namespace terrace {

struct Load {
  int64_t busiest = 0;           // expert
  double max_share = 0;          // its share of the assignments; even is 1 / E, at most 1 / K
  double effective_experts = 0;  // exp(entropy of the shares): E when even, K when collapsed
};
Load LoadOf(std::span<const int64_t> counts);

// Watches MoE layers from step to step.
class CollapseWatch {
 public:
  // A router counts as collapsed when its effective experts, of the E that could be, are fewer
  // than K + (E - K) / 4 for kPatience steps in a row: early steps and single bad batches pass.
  static constexpr int64_t kPatience = 10;
  // A router that stays so is reported again after this many steps.
  static constexpr int64_t kRepeat = 100;

  explicit CollapseWatch(int64_t top_k) : top_k_(top_k) {}

  // A warning on one line naming layer, expert and share, when one is due.
  std::optional<std::string> Step(const LayerRouting& routing);

 private:
  int64_t top_k_;
  std::map<int64_t, int64_t> collapsed_steps_;  // by layer, in a row
};

}  // namespace terrace
