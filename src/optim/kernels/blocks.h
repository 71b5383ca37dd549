// What rules that multiply matrices do between products, on blocks of matrices; a range of elements
// is a block of one row. Deterministic; callers choose the parallel blocks. "any" is float32 or
// bfloat16.
#pragma once

#include <cstdint>

#include "core/stochastic_rounding.h"
#include "core/tensor.h"
#include "optim/kernels/block_quantization.h"
#include "optim/tiles.h"

namespace terrace::kernels {

// For elements [begin, end), `begin` a multiple of GrainOf(momentum): momentum = beta * momentum +
// g with g = scale * gradient, which is any; bfloat16 and codes by stochastic rounding under
// momentum_key. Returns the sum of squares of the direction: of g + beta * momentum if `nesterov`,
// else of the momentum, before rounding in either case.
double SumMomentum(const Stored& momentum, float beta, TensorView gradient, float scale,
                   bool nesterov, uint64_t momentum_key, int64_t begin, int64_t end);

// For such elements, out = x_factor * x + y_factor * y, rounded to nearest; out and y any, y may be
// empty.
void CombineStored(TensorView out, const Stored& x, float x_factor, TensorView y, float y_factor,
                   int64_t begin, int64_t end);

// out = x_factor * x + y_factor * y, rounded to nearest; all any. `y` may be without memory: then
// it counts as zero. `out` may be one of the others.
void Combine(const MatrixBlock& out, const MatrixBlock& x, float x_factor, const MatrixBlock& y,
             float y_factor, int64_t rows, int64_t columns);

struct AdamDirection {
  float gradient_scale;
  double beta1;
  double beta2;
  float inverse_correction;  // 1 / sqrt(1 - beta2^s)
  float eps;
};
// With g = gradient_scale * x: momentum = beta1 * momentum + (1 - beta1) * g,
// second = beta2 * second + (1 - beta2) * g^2,
// x = momentum / (sqrt(second) * inverse_correction + eps). All float32.
void ToAdamDirection(const MatrixBlock& x, const MatrixBlock& momentum, const MatrixBlock& second,
                     int64_t rows, int64_t columns, const AdamDirection& step);

// Row i of a block is rounded by stripes first + i * per_row, first + i * per_row + 1, ...
struct BlockStripes {
  int64_t first;
  int64_t per_row;
};
// weight = keep * weight - step * x; any, bfloat16 weights by stochastic rounding.
void Descend(const MatrixBlock& weight, float keep, const MatrixBlock& x, float step, int64_t rows,
             int64_t columns, uint64_t rounding_key, BlockStripes stripes);

}  // namespace terrace::kernels
