// Passes over a matrix whose second moment is factored into rows and columns. Each works on a
// range of rows, so that callers choose the parallel blocks; each is deterministic.
//
// Matrices are [rows, columns] row-major, "any" is float32 or bfloat16, and codes
// (block_quantization.h) where the type is Stored. Arrays over columns are zero-padded to
// PaddedColumns.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/stochastic_rounding.h"
#include "core/tensor.h"
#include "optim/kernels/average_step.h"
#include "optim/kernels/block_quantization.h"

namespace terrace::kernels {

constexpr int64_t PaddedColumns(int64_t columns) { return (columns + kUnit - 1) / kUnit * kUnit; }

// How second moments move: moment = keep * moment + gain * sum + offset.
struct Decay {
  float keep = 0;
  float gain = 0;
  float offset = 0;
};

// Replaces row_sums[i], for rows [begin, end), and column_sums[j], all columns, by sums over those
// rows of gradient^2, unscaled. gradient any. A momentum (any, the same shape; empty for none)
// becomes momentum * beta + scale * gradient * (1 - beta), bfloat16 and codes by stochastic
// rounding under momentum_key.
//
// Replaces weighted_sums[j] (null for none) by sums over the rows of x[i, j]^2 / moment[i], where
// x is the momentum, or else the gradient, and moment[i] is row_moments[i] (not changed) after its
// decay: the sum of squares of an update, but for factors of columns that are not known yet. It
// costs little here, where the row is in the first-level cache.
void FactoredSums(TensorView gradient, float scale, const Stored& momentum, double beta,
                  uint64_t momentum_key, int64_t begin, int64_t end, float* row_sums,
                  float* column_sums, const float* row_moments, Decay row_decay,
                  float* weighted_sums);

// Decays moments[i] with sums[i]; returns the sum of the moments.
double DecayMoments(float* moments, const float* sums, int64_t count, Decay decay);

// factors[i] = numerator / sqrt(max(moments[i] * scale, floor)); returns how many
// moments[i] * scale are at or below the floor.
int64_t InverseRoots(const float* moments, int64_t count, float scale, float floor, float numerator,
                     float* factors);

// One half of Sinkhorn's alternation on X = row_factors[i] * x[i, j] * column_factors[j]:
// for rows [begin, end), brings each row of X to the L2 norm target, by
//   row_factors[i] *= target / (norm_i + eps)   (0 for a row of zeros),
// and adds to column_sums[j] the sums over those rows of (row_factors[i] * x[i, j])^2.
void SinkhornRows(const Stored& x, int64_t begin, int64_t end, float target, float eps,
                  const float* column_factors, float* row_factors, float* column_sums);

// Memory to prefetch in the course of a pass, for whatever comes after it.
struct Ahead {
  const std::byte* from = nullptr;
  int64_t bytes = 0;
};

// Sum over rows [begin, end) and all columns of (row_factors[i] * x[i, j] * column_factors[j])^2.
// x any.
double FactoredSquares(const Stored& x, int64_t begin, int64_t end, const float* row_factors,
                       const float* column_factors);

// weight[i, j] = keep * weight[i, j] - step * row_factors[i] * x[i, j] * column_factors[j] for
// rows [begin, end), bfloat16 by stochastic rounding. weight and x any.
void FactoredUpdate(TensorView weight, const Stored& x, float keep, float step, int64_t begin,
                    int64_t end, const float* row_factors, const float* column_factors,
                    uint64_t rounding_key, Ahead ahead);

// With u = row_factors[i] * x[i, j] * column_factors[j]: average (any, bfloat16 and codes by
// stochastic rounding under the step's own key) = beta * average + gain * u, and weight = keep *
// weight - rate * average, of the average before it is rounded.
void FactoredAverageUpdate(TensorView weight, TensorView x, const Stored& average, float keep,
                           const AverageStep& step, int64_t begin, int64_t end,
                           const float* row_factors, const float* column_factors,
                           uint64_t rounding_key, Ahead ahead);

}  // namespace terrace::kernels
