// What rules share that step by the sign of a momentum.
#pragma once

#include "optim/kernels/sign.h"
#include "optim/rule.h"
#include "optim/rules/common.h"
#include "optim/settings.h"

namespace terrace {

struct SignSettings {
  double beta1;  // of the momentum in the sign
  double beta2;  // of the momentum that is kept
};

inline SignSettings ReadSignSettings(SettingsReader& settings) {
  return {.beta1 = settings.Number("beta1", 0.9, 0, kLargestBeta),
          .beta2 = settings.Number("beta2", 0.99, 0, kLargestBeta)};
}

inline kernels::SignStep StepOf(const SignSettings& settings, const StepContext& context) {
  return {.gradient_scale = context.gradient_scale,
          .beta1 = settings.beta1,
          .beta2 = settings.beta2,
          .keep = KeepOf(context),
          .rate = context.learning_rate};
}

}  // namespace terrace
