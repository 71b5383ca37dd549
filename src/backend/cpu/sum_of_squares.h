#pragma once

#include "core/tensor.h"

namespace terrace {

// Sum of squares of x (float32 or bfloat16), on all threads. Squares are taken and summed in
// float64: exact for one element, and free of overflow. The order of summation depends on the size
// only, not on threads or instruction set.
double SumOfSquares(TensorView x);

}  // namespace terrace
