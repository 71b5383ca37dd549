// Passes that add scaled tensors: momentum that sums, and steps along a direction. Each works on a
// range of elements whose start is a multiple of kStripe, so that callers choose the parallel
// blocks; each is deterministic. "any" is float32 or bfloat16.
#pragma once

#include <cstdint>

#include "core/tensor.h"
#include "optim/kernels/stochastic_rounding.h"

namespace terrace::kernels {

// momentum = beta * momentum + g with g = scale * gradient; both any, bfloat16 momentum by
// stochastic rounding under momentum_key. Returns the sum of squares of the direction: of
// g + beta * momentum if `nesterov`, else of the momentum, before rounding in either case.
double SumMomentum(TensorView momentum, float beta, TensorView gradient, float scale, bool nesterov,
                   uint64_t momentum_key, int64_t begin, int64_t end);

// out = x_factor * x + y_factor * y, rounded to nearest; all any. `y` may be empty; `out` may be
// one of the others.
void Combine(TensorView out, TensorView x, float x_factor, TensorView y, float y_factor,
             int64_t begin, int64_t end);

// weight = keep * weight - step * x; any, bfloat16 weights by stochastic rounding.
void Descend(TensorView weight, float keep, TensorView x, float step, uint64_t rounding_key,
             int64_t begin, int64_t end);

}  // namespace terrace::kernels
