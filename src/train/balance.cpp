#include "train/balance.h"

#include <fmt/format.h>

#include <cmath>
#include <numeric>

namespace terrace {

Load LoadOf(std::span<const int64_t> counts) {
  const double total =
      static_cast<double>(std::accumulate(counts.begin(), counts.end(), int64_t{0}));
  Load load;
  if (total == 0) return load;
  double entropy = 0;
  for (size_t expert = 0; expert < counts.size(); ++expert) {
    const double share = static_cast<double>(counts[expert]) / total;
    if (share > 0) entropy -= share * std::log(share);
    if (share > load.max_share) {
      load.max_share = share;
      load.busiest = static_cast<int64_t>(expert);
    }
  }
  load.effective_experts = std::exp(entropy);
  return load;
}

std::optional<std::string> CollapseWatch::Step(const LayerRouting& routing) {
  const Load load = LoadOf(routing.counts);
  const double experts = static_cast<double>(routing.counts.size());
  const double top_k = static_cast<double>(top_k_);
  int64_t& steps = collapsed_steps_[routing.layer];
  const bool collapsed = experts > top_k && load.max_share > 0 &&
                         load.effective_experts < top_k + (experts - top_k) / 4;
  steps = collapsed ? steps + 1 : 0;
  if (!collapsed || steps % kRepeat != kPatience % kRepeat) return {};
  return fmt::format(
      "the router of layers.{} is collapsing: expert {} gets {:.0f} % of the assignments (even: "
      "{:.1f} %), the load is that of {:.1f} experts of {}",
      routing.layer, load.busiest, 100 * load.max_share, 100 / experts, load.effective_experts,
      routing.counts.size());
}

}  // namespace terrace
