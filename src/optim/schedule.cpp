#include "optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/counted.h"
#include "core/error.h"

namespace terrace {
namespace {

constexpr std::string_view kNames[] = {"constant", "linear", "cosine", "wsd"};

}  // namespace

std::string_view NameOf(ScheduleKind kind) { return kNames[static_cast<int>(kind)]; }

void Schedule::Check() const {
  if (!(peak > 0 && std::isfinite(peak))) {
    Fail("learning_rate = {} (optimizer.learning_rate, or else the policy's) is not above 0", peak);
  }
  if (steps < 1) Fail("schedule.steps = {} is not at least 1", steps);
  if (warmup_steps < 0) Fail("schedule.warmup_steps = {} is negative", warmup_steps);
  if (warmup_steps > steps) {
    Fail("schedule.warmup_steps = {} exceeds the {}", warmup_steps, Counted(steps, "step"));
  }
  if (!(min_ratio >= 0 && min_ratio <= 1)) {
    Fail("schedule.min_ratio = {} is not in [0, 1]", min_ratio);
  }
  if (decay_steps < 0) Fail("schedule.decay_steps = {} is negative", decay_steps);
  if (kind == ScheduleKind::kWsd && decay_steps > steps - warmup_steps) {
    Fail("schedule.decay_steps = {} exceeds the {} after warm-up", decay_steps,
         Counted(steps - warmup_steps, "step"));
  }
}

double Schedule::LearningRate(int64_t step) const {
  TERRACE_CHECK(step >= 1, "step {}", step);
  const auto ratio = [](int64_t part, int64_t whole) {
    return std::min(1.0, static_cast<double>(part) / static_cast<double>(whole));
  };
  const auto linear = [&](double progress) { return peak * (1 - (1 - min_ratio) * progress); };

  if (step <= warmup_steps) return peak * ratio(step, warmup_steps);
  switch (kind) {
    case ScheduleKind::kConstant:
      return peak;
    case ScheduleKind::kLinear:
      return linear(ratio(step - 1 - warmup_steps, steps - warmup_steps));
    case ScheduleKind::kCosine: {
      const double progress = ratio(step - 1 - warmup_steps, steps - warmup_steps);
      const double wave = (1 + std::cos(std::numbers::pi * progress)) / 2;
      return peak * (min_ratio + (1 - min_ratio) * wave);
    }
    case ScheduleKind::kWsd: {
      const int64_t decayed = step - 1 - (steps - decay_steps);
      return decayed <= 0 ? peak : linear(ratio(decayed, decay_steps));
    }
  }
  return peak;
}

int64_t StepsOfFraction(double fraction, int64_t steps) {
  return std::llround(fraction * static_cast<double>(steps));
}

}  // namespace terrace
