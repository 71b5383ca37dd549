// What galore does to a block of a matrix between its products. Blocks are row-major with strides
// in elements; each kernel is deterministic.
#pragma once

#include <cstdint>

#include "core/tensor.h"
#include "optim/kernels/stochastic_rounding.h"
#include "optim/tiles.h"

namespace terrace::kernels {

// to = from, as float32; `from` float32 or bfloat16.
void Widen(const MatrixBlock& from, int64_t rows, int64_t columns, float* to, int64_t to_stride);

struct AdamDirection {
  float gradient_scale;
  double beta1;
  double beta2;
  float inverse_correction;  // 1 / sqrt(1 - beta2^s)
  float eps;
};
// With g = gradient_scale * x: momentum = beta1 * momentum + (1 - beta1) * g,
// second = beta2 * second + (1 - beta2) * g^2,
// x = momentum / (sqrt(second) * inverse_correction + eps).
void ToAdamDirection(float* x, int64_t x_stride, float* momentum, float* second,
                     int64_t moments_stride, int64_t rows, int64_t columns,
                     const AdamDirection& step);

// Row i of the block is rounded by stripes first + i * per_row, first + i * per_row + 1, ...
struct BlockStripes {
  int64_t first;
  int64_t per_row;
};
// weight = keep * weight - step * x; weight float32, or bfloat16 by stochastic rounding.
void DescendBlock(const MatrixBlock& weight, float keep, const float* x, int64_t x_stride,
                  float step, int64_t rows, int64_t columns, uint64_t rounding_key,
                  BlockStripes stripes);

}  // namespace terrace::kernels
