// What settings of several rules share, and what every update does to the weight first.
#pragma once

#include "optim/rule.h"

namespace terrace {

// Below 1 in float32 too: an average that forgets nothing never leaves zero.
inline constexpr double kLargestBeta = 0.9999999;
// Below it the square root of eps in float32 would no longer guard a division.
inline constexpr double kSmallestEps = 1e-30;

// What decoupled weight decay leaves of the weight: 1 - lr * decay.
inline float KeepOf(const StepContext& context) {
  return static_cast<float>(1 - static_cast<double>(context.learning_rate) * context.weight_decay);
}

}  // namespace terrace
