// Passes over tensors whose second moment has an entry an element; the shape does not matter.
// Each works on a range of elements whose start is a multiple of kStripe, so that callers choose
// the parallel blocks; each is deterministic. "any" is float32 or bfloat16; second moments are
// float32. Where the type is Stored, codes are possible too (block_quantization.h): ranges are
// multiples of their GrainOf then, and stripes end with their row.
#pragma once

#include <cstdint>

#include "core/stochastic_rounding.h"
#include "core/tensor.h"
#include "optim/kernels/average_step.h"
#include "optim/kernels/block_quantization.h"

namespace terrace::kernels {

// x = factor * x, bfloat16 by stochastic rounding.
void Scale(TensorView x, float factor, int64_t begin, int64_t end, uint64_t rounding_key);

// With g = scale * gradient (any): momentum (any, bfloat16 and codes by stochastic rounding under
// momentum_key; empty: none) = beta1 * momentum + (1 - beta1) * g and
// second = beta2 * second + (1 - beta2) * (g^2 + added). Returns the sum of `second`.
double ExactMoments(TensorView gradient, float scale, const Stored& momentum, double beta1,
                    uint64_t momentum_key, TensorView second, double beta2, float added,
                    int64_t begin, int64_t end);

struct ExactSquares {
  double sum;       // of x^2 / max(second, floor)
  int64_t floored;  // entries of second <= floor
};
ExactSquares SumExactSquares(const Stored& x, TensorView second, float floor, int64_t begin,
                             int64_t end);

// weight = keep * weight - step * x / sqrt(max(second, floor)); weight and x any, bfloat16
// weights by stochastic rounding.
void ExactUpdate(TensorView weight, const Stored& x, TensorView second, float floor, float keep,
                 float step, int64_t begin, int64_t end, uint64_t rounding_key);

// With u = x / sqrt(max(second, floor)): average (any, bfloat16 and codes by stochastic rounding
// under the step's own key) = beta * average + gain * u, and weight = keep * weight - rate *
// average, of the average before it is rounded.
void ExactAverageUpdate(TensorView weight, TensorView x, const Stored& average, TensorView second,
                        float floor, float keep, const AverageStep& step, int64_t begin,
                        int64_t end, uint64_t rounding_key);

}  // namespace terrace::kernels
