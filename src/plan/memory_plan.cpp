#include "plan/memory_plan.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "train/trainer.h"

namespace terrace {
namespace {

// Follows the arena of a dry run.
class Trace final : public ArenaWatcher {
 public:
  explicit Trace(const std::vector<Parameter>& parameters) {
    for (const Parameter& parameter : parameters) {
      populations_.emplace(parameter.name, parameter.population);
    }
  }

  void Allocated(const Arena& arena, Memory category, int64_t used_bytes, int64_t held_bytes,
                 const char* name) override {
    std::vector<Held>& stack = category == Memory::kScratch ? far_ : near_;
    const int64_t end_bytes = (stack.empty() ? 0 : stack.back().end_bytes) + held_bytes;
    const Held held{end_bytes, held_bytes, held_bytes - used_bytes, category,
                    RowOf(category, name)};
    stack.push_back(held);
    Count(held, 1);

    const Ledger& ledger = arena.ledger();
    if (moments_.empty() || !(moments_.back().phase == arena.phase())) {
      if (moments_.size() == 2 * MemoryPlan::kMoments) Thin();
      moments_.push_back({arena.phase(), ledger.current_bytes});
    } else if (ledger.total_bytes > moments_.back().total_bytes()) {
      moments_.back().bytes = ledger.current_bytes;
    }
    if (ledger.total_bytes > peak_bytes_) {
      peak_bytes_ = ledger.total_bytes;
      plan_.at_peak = rows_;
      plan_.alignment_bytes = alignment_bytes_;
      plan_.peak_phase = arena.phase();
      plan_.peak_tensor = name;
    }
  }

  void Released(int64_t near_bytes, int64_t far_bytes) override {
    Pop(near_, near_bytes);
    Pop(far_, far_bytes);
  }

  MemoryPlan Take(const Ledger& ledger) {
    while (moments_.size() > MemoryPlan::kMoments) Thin();
    plan_.moments = std::move(moments_);
    plan_.ledger = ledger;
    return std::move(plan_);
  }

 private:
  struct Held {
    int64_t end_bytes;  // of the stack, with this
    int64_t held_bytes;
    int64_t alignment_bytes;
    Memory category;
    int row;
  };

  // Weights and gradients have their parameter's name, states that and their own behind it.
  int RowOf(Memory category, std::string_view name) const {
    if (category == Memory::kActivations || category == Memory::kScratch) return kPopulations;
    auto found = populations_.find(name);
    if (found == populations_.end()) found = populations_.find(name.substr(0, name.rfind('.')));
    return found == populations_.end() ? kPopulations : static_cast<int>(found->second);
  }

  void Count(const Held& held, int64_t sign) {
    rows_[static_cast<size_t>(held.row)][static_cast<size_t>(held.category)] +=
        sign * held.held_bytes;
    alignment_bytes_ += sign * held.alignment_bytes;
  }

  void Pop(std::vector<Held>& stack, int64_t end_bytes) {
    while (!stack.empty() && stack.back().end_bytes > end_bytes) {
      Count(stack.back(), -1);
      stack.pop_back();
    }
  }

  // Of two neighbours the one that holds more stands for both.
  void Thin() {
    std::vector<PlanMoment> kept;
    for (size_t i = 0; i < moments_.size(); i += 2) {
      const bool second =
          i + 1 < moments_.size() && moments_[i + 1].total_bytes() > moments_[i].total_bytes();
      kept.push_back(moments_[i + (second ? 1 : 0)]);
    }
    moments_ = std::move(kept);
  }

  std::map<std::string, Population, std::less<>> populations_;
  std::vector<Held> near_, far_;
  std::array<CategoryBytes, MemoryPlan::kRows> rows_{};
  int64_t alignment_bytes_ = 0;
  int64_t peak_bytes_ = 0;
  std::vector<PlanMoment> moments_;
  MemoryPlan plan_;
};

}  // namespace

int64_t PlanMoment::total_bytes() const {
  return std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
}

std::string_view RowName(int row) {
  return row < kPopulations ? NameOf(Population(row)) : "(no parameter)";
}

MemoryPlan PlanMemory(const ResolvedRun& run) {
  Trace trace(ParametersOf(run.config.model));
  const Ledger ledger = PlanTraining(run, &trace);
  return trace.Take(ledger);
}

}  // namespace terrace
