// Gradient norms and clipping.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/tensor.h"

namespace terrace {

enum class ClippingKind : uint8_t { kNone, kGlobalNorm, kPerTensor };
// "none", "global_norm", "per_tensor"
std::string_view NameOf(ClippingKind kind);
// Throws Error naming the known kinds.
ClippingKind ClippingKindNamed(std::string_view name);

struct Clipping {
  ClippingKind kind = ClippingKind::kGlobalNorm;
  float max_norm = 1;  // L2

  // Throws Error naming the value at fault.
  void Check() const;
};

// min(1, max_norm / (norm + 1e-6))
float ClippingScale(double norm, float max_norm);

// Sum of squares of x (float32 or bfloat16), on all threads; the order of summation depends on
// the size only. Squares are float32: beyond 1.8e19 an element counts as infinite.
double SquaredNorm(TensorView x);

}  // namespace terrace
