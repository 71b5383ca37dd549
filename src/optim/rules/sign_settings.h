// What rules share that step by the sign of a momentum.
#pragma once

#include "optim/kernels/sign.h"
#include "optim/rule.h"
#include "optim/rules/common.h"
#include "optim/rules/momentum.h"

namespace terrace {

struct SignSettings {
  double beta1 = 0.9;
  double beta2 = 0.99;
  Momentum momentum = Momentum::kF32;
};

inline Fields SignFields(SignSettings& s) {
  return {{"beta1", &s.beta1, "decay of the momentum in the sign", {0, kLargestBeta}},
          {"beta2", &s.beta2, "decay of the momentum that is kept", {0, kLargestBeta}},
          {"momentum", Choice(s.momentum, StoredMomentumNames()), "as it is stored"}};
}

inline kernels::SignStep StepOf(const SignSettings& settings, const StepContext& context) {
  return {.gradient_scale = context.gradient_scale,
          .beta1 = settings.beta1,
          .beta2 = settings.beta2,
          .keep = KeepOf(context),
          .rate = context.learning_rate};
}

}  // namespace terrace
