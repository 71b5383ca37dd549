// Comparison of tensors with a tolerance that follows from the rounding they went through.
#pragma once

#include <gtest/gtest.h>

#include "core/tensor.h"

namespace terrace {

// An element passes when |actual - expected| <= relative * |expected| + absolute. NaN passes for
// NaN only, an infinity for itself only.
struct Tolerance {
  double relative = 0;
  double absolute = 0;
};

// Of a float32 computation whose intermediate values reach `magnitude` and which adds up `terms`
// of them, stored as `dtype`. The rounding errors of a sum are independent enough to grow as the
// square root of its terms; the factor covers the few operations around it. Storing may go to
// either of two neighbours when the exact value is near their middle: one unit in the last place.
Tolerance RoundingOf(DType dtype, double magnitude, int64_t terms = 1);

// The largest finite magnitude; 0 of an empty tensor.
double MaxAbs(const TensorView& view);

// Shapes and dtypes must agree, and all elements be within the tolerance. The message names the
// worst element. Float tensors only.
testing::AssertionResult Near(const TensorView& actual, const TensorView& expected,
                              const Tolerance& tolerance);

// Shapes, dtypes and bytes must agree; any dtype.
testing::AssertionResult SameBytes(const TensorView& actual, const TensorView& expected);

}  // namespace terrace
