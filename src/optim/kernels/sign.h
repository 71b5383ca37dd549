// Passes of rules that step by the sign of a momentum.
#pragma once

#include <cstdint>

#include "core/stochastic_rounding.h"
#include "core/tensor.h"
#include "optim/kernels/block_quantization.h"

namespace terrace::kernels {

struct SignStep {
  float gradient_scale;
  double beta1;  // of the momentum in the sign
  double beta2;  // of the momentum that is kept
  float keep;    // of the weight: 1 - lr * decay
  float rate;
};

// With g = gradient_scale * gradient, m the momentum before (empty: 0, none is kept):
//   weight = keep * weight - rate * factor * sign(beta1 * m + (1 - beta1) * g),  sign(0) = 0
//   momentum = beta2 * m + (1 - beta2) * g
// on elements [begin, end), begin a multiple of GrainOf(momentum). Weights and gradients are
// float32 or bfloat16; what is not float32 is rounded stochastically, the momentum under
// MomentumKey(rounding_key). factor is 1.
void SignUpdate(TensorView weight, TensorView gradient, const Stored& momentum,
                const SignStep& step, int64_t begin, int64_t end, uint64_t rounding_key);

// The same on rows [begin, end) of a matrix, with factor = column_factors[j], padded to
// PaddedColumns (factored.h).
void SignUpdateRows(TensorView weight, TensorView gradient, const Stored& momentum,
                    const SignStep& step, const float* column_factors, int64_t begin, int64_t end,
                    uint64_t rounding_key);

// Replaces column_sums[j] (padded to PaddedColumns) by the sum over rows [begin, end) of
// |gradient[i, j]|.
void AbsoluteSums(TensorView gradient, int64_t begin, int64_t end, float* column_sums);

}  // namespace terrace::kernels
