#include "optim/clipping.h"

#include <algorithm>
#include <cmath>

namespace terrace {
namespace {

constexpr std::string_view kNames[] = {"none", "global_norm", "per_tensor"};

}  // namespace

std::string_view NameOf(ClippingKind kind) { return kNames[static_cast<int>(kind)]; }

void Clipping::Check() const {
  if (kind != ClippingKind::kNone && !(max_norm > 0 && std::isfinite(max_norm))) {
    Fail("clipping.max_norm = {} is not a number above 0", max_norm);
  }
}

float ClippingScale(double norm, float max_norm) {
  return static_cast<float>(std::min(1.0, max_norm / (norm + 1e-6)));
}

}  // namespace terrace
