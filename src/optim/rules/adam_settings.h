// What rules with Adam's two moments share.
#pragma once

#include <cmath>
#include <utility>

#include "core/settings.h"
#include "optim/rule.h"
#include "optim/rules/common.h"

namespace terrace {

struct AdamSettings {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
};

// With `more` behind them. `momentum`: what beta1 has no effect without.
inline Fields AdamFields(AdamSettings& s, Fields more = {}, Needs momentum = {}) {
  Fields fields = {
      {"beta1", &s.beta1, "decay of the first moment", {0, kLargestBeta}, std::move(momentum)},
      {"beta2", &s.beta2, "decay of the second moment", {0, kLargestBeta}},
      {"eps", &s.eps, "floor of the denominator", {kSmallestEps, 1}}};
  fields.insert(fields.end(), more.begin(), more.end());
  return fields;
}

// The constants of an update.
struct AdamWStep {
  float gradient_scale;
  double beta1;
  double beta2;
  float keep;                // of the weight: 1 - lr * decay
  float rate;                // lr / (1 - beta1^s)
  float inverse_correction;  // 1 / sqrt(1 - beta2^s)
  float eps;
};

inline AdamWStep AdamWStepOf(const AdamSettings& settings, const StepContext& context) {
  const double step = static_cast<double>(context.tensor_step);
  const double lr = context.learning_rate;
  return {
      .gradient_scale = context.gradient_scale,
      .beta1 = settings.beta1,
      .beta2 = settings.beta2,
      .keep = KeepOf(context),
      .rate = static_cast<float>(lr / (1 - std::pow(settings.beta1, step))),
      .inverse_correction = static_cast<float>(1 / std::sqrt(1 - std::pow(settings.beta2, step))),
      .eps = static_cast<float>(settings.eps)};
}

}  // namespace terrace
