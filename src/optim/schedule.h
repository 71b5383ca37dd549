// Learning-rate schedules.
#pragma once

#include <cstdint>
#include <string_view>

namespace terrace {

enum class ScheduleKind : uint8_t { kConstant, kLinear, kCosine, kWsd };
// "constant", "linear", "cosine", "wsd"
std::string_view NameOf(ScheduleKind kind);

// Steps count from 1 to S = `steps`. With W = warmup_steps, r = min_ratio and s the step:
//   s <= W:   peak * s / W
//   else, p = (s - 1 - W) / (S - W), in [0, 1) until step S and 1 beyond it:
//   constant: peak
//   linear:   peak * (1 - (1 - r) * p)
//   cosine:   peak * (r + (1 - r) * (1 + cos(pi * p)) / 2)
//   wsd:      peak until step S - D + 1, D = decay_steps, then linear in p = (s - 1 - (S - D)) / D
// The decay starts at the peak and would reach peak * r with the step after the last: no step of a
// run has a rate of 0, which would change nothing. Any step beyond S has peak * r.
struct Schedule {
  ScheduleKind kind = ScheduleKind::kCosine;
  double peak = 0;
  int64_t steps = 0;
  int64_t warmup_steps = 0;
  int64_t decay_steps = 0;  // wsd only
  double min_ratio = 0;

  // Throws Error naming the value at fault ("schedule.warmup_steps = 30 exceeds the 20 steps").
  void Check() const;
  // step >= 1
  double LearningRate(int64_t step) const;
};

// A share of `steps`, to the nearest step: for warm-up and decay that are given as fractions.
int64_t StepsOfFraction(double fraction, int64_t steps);

}  // namespace terrace
