// Clipping of gradients by their norm.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/error.h"

namespace terrace {

enum class ClippingKind : uint8_t { kNone, kGlobalNorm, kPerTensor };
// "none", "global_norm", "per_tensor"
std::string_view NameOf(ClippingKind kind);

struct Clipping {
  ClippingKind kind = ClippingKind::kGlobalNorm;
  float max_norm = 1;  // L2

  // Throws Error naming the value at fault.
  void Check() const;
};

// min(1, max_norm / (norm + 1e-6))
float ClippingScale(double norm, float max_norm);

}  // namespace terrace
