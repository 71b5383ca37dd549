// From a view's dtype to a typed pointer.
#pragma once

#include "core/tensor.h"

namespace terrace::kernels {

// Calls f(T*) with T float or BF16, as view.dtype says.
template <typename F>
void WithElements(const TensorView& view, F&& f) {
  switch (view.dtype) {
    case DType::kF32:
      return f(view.as<float>());
    case DType::kBF16:
      return f(view.as<BF16>());
    default:
      TERRACE_CHECK(false, "{}: {} is no floating-point type", view.name, NameOf(view.dtype));
  }
}

// The same, or f of a null float* for an empty view.
template <typename F>
void WithElementsOrNull(const TensorView& view, F&& f) {
  if (view.empty()) return f(static_cast<float*>(nullptr));
  WithElements(view, f);
}

}  // namespace terrace::kernels
