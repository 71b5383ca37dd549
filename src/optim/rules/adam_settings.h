// Settings that rules with Adam's two moments share.
#pragma once

#include "optim/settings.h"

namespace terrace {

struct AdamSettings {
  double beta1;
  double beta2;
  double eps;
};

inline AdamSettings ReadAdamSettings(SettingsReader& settings) {
  // Below 1 in float32 too: an average that forgets nothing never leaves zero.
  constexpr double kLargestBeta = 0.9999999;
  // Below it the square root of eps in float32 would no longer guard a division.
  constexpr double kSmallestEps = 1e-30;
  return {.beta1 = settings.Number("beta1", 0.9, 0, kLargestBeta),
          .beta2 = settings.Number("beta2", 0.999, 0, kLargestBeta),
          .eps = settings.Number("eps", 1e-8, kSmallestEps, 1)};
}

}  // namespace terrace
