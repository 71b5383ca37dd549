// What rules with Adam's two moments share.
#pragma once

#include <cmath>

#include "optim/kernels/adamw_step.h"
#include "optim/rule.h"
#include "optim/rules/common.h"
#include "optim/settings.h"

namespace terrace {

struct AdamSettings {
  double beta1;
  double beta2;
  double eps;
};

inline AdamSettings ReadAdamSettings(SettingsReader& settings) {
  return {.beta1 = settings.Number("beta1", 0.9, 0, kLargestBeta),
          .beta2 = settings.Number("beta2", 0.999, 0, kLargestBeta),
          .eps = settings.Number("eps", 1e-8, kSmallestEps, 1)};
}

inline kernels::AdamWStep AdamWStepOf(const AdamSettings& settings, const StepContext& context) {
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
