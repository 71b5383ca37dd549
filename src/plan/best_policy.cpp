#include "plan/best_policy.h"

#include <string>

#include "core/error.h"

namespace terrace {
namespace {

// The ready-made policies on the Pareto front of docs/results/optimizers, by their validation loss
// at the best learning rate, three seeds (3.692, 4.155 and 4.181 nats): of each further one a run
// takes less memory than of those before it. AdamW is not among them, since muon takes less and
// learns better; nor is skewadam as published, since adafactor does.
constexpr std::string_view kByLoss[] = {"muon", "skewadam-relative-eps", "adafactor"};

}  // namespace

std::span<const std::string_view> PoliciesByLoss() { return kByLoss; }

std::optional<BestPolicy> FindBestPolicy(const ResolvedRun& run, int64_t budget_bytes,
                                         const Planner& planner) {
  for (const std::string_view name : PoliciesByLoss()) {
    RunConfig config = run.config;
    config.optimizer.policy = name;
    for (const SinkKind sink : {run.config.training.sink, SinkKind::kRelease}) {
      config.training.sink = sink;
      try {
        const int64_t peak_bytes = planner(ResolvedRun(config));
        if (peak_bytes <= budget_bytes) return BestPolicy{name, sink, peak_bytes};
      } catch (const Error&) {
        // It cannot serve this model, or not under this sink.
      }
      if (sink == SinkKind::kRelease) break;
    }
  }
  return {};
}

}  // namespace terrace
