// Checks of settings that several rules share.
#pragma once

#include <string_view>

#include "optim/policy.h"

namespace terrace {

// Throws Error "RULE: ..." unless betas are in [0, 1), eps > 0, and decay, multiplier and clip are
// finite and not negative.
inline void CheckAdamSettings(std::string_view rule, const RuleSettings& settings) {
  const auto beta = [&](std::string_view key, double value) {
    if (!(value >= 0 && value < 1)) Fail("{}: {} = {} is not in [0, 1)", rule, key, value);
  };
  const auto finite = [&](std::string_view key, float value) {
    if (!(value >= 0 && value < 1e30f)) {
      Fail("{}: {} = {} is not a number from 0 up", rule, key, value);
    }
  };
  beta("beta1", settings.beta1);
  beta("beta2", settings.beta2);
  // Below 1e-30 the square root of eps in float32 would no longer guard a division.
  if (!(settings.eps >= 1e-30 && settings.eps < 1)) {
    Fail("{}: eps = {} is not in [1e-30, 1)", rule, settings.eps);
  }
  finite("lr_multiplier", settings.lr_multiplier);
  finite("weight_decay", settings.weight_decay);
  finite("rms_clip", settings.rms_clip);
}

}  // namespace terrace
