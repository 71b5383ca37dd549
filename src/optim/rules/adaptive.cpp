#include "optim/rules/adaptive.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <vector>

#include "core/parallel.h"
#include "optim/kernels/elementwise.h"
#include "optim/kernels/factored.h"
#include "optim/rules/common.h"
#include "optim/rules/row_blocks.h"

namespace terrace {
namespace {

float FloorOf(const AdaptiveStep& step, double mean) {
  return static_cast<float>(std::max(step.floor, step.relative_floor * mean));
}

// max(1, RMS(u) / rms_clip)
double ClipOf(const AdaptiveStep& step, double squares, int64_t size) {
  if (step.rms_clip == 0) return 1;
  return std::max(1.0, std::sqrt(squares / static_cast<double>(size)) / step.rms_clip);
}

// Of second moments that are means of `summands` squares; the sums are of the gradient before its
// scale.
kernels::Decay DecayOf(const AdaptiveStep& step, float gradient_scale, int64_t summands) {
  const double gain =
      (1 - step.beta2) * gradient_scale * gradient_scale / static_cast<double>(summands);
  return {static_cast<float>(step.beta2), static_cast<float>(gain),
          static_cast<float>((1 - step.beta2) * step.added)};
}

// The momentum has the gradient's scale in it already.
double CorrectionOf(const AdaptiveStep& step, const StepContext& context) {
  return step.momentum.values.empty() ? step.correction * context.gradient_scale : step.correction;
}

kernels::Stored NumeratorOf(const AdaptiveStep& step, TensorView gradient) {
  return step.momentum.values.empty() ? kernels::Stored(gradient) : step.momentum;
}

kernels::AverageStep AverageOf(const AdaptiveStep& step, const StepContext& context, double clip) {
  return {.beta = static_cast<float>(step.beta1),
          .gain = static_cast<float>((1 - step.beta1) / clip),
          .rate = context.learning_rate,
          .rounding_key = kernels::MomentumKey(context.rounding_key)};
}

// Sums of squares over a gradient's rows, its columns (padded), and its columns weighted by the
// rows' moments (padded; null: none).
template <typename Float>
struct SumsOf {
  SumsOf(Float* all, const Shape& shape, bool weights)
      : rows(all),
        columns(all + shape[0]),
        weighted(weights ? columns + kernels::PaddedColumns(shape[1]) : nullptr) {}
  Float* rows;
  Float* columns;
  Float* weighted;
};

int64_t FloatsOf(const Shape& shape, bool weights) {
  return shape[0] + (weights ? 2 : 1) * kernels::PaddedColumns(shape[1]);
}

// One pass; moves the momentum, if there is one.
void LeaveSums(TensorView gradient, float scale, const AdaptiveStep& step, uint64_t momentum_key,
               TensorView row_moments, const SumsOf<float>& sums) {
  const int64_t columns = gradient.columns();
  const int64_t padded = kernels::PaddedColumns(columns);
  const RowBlocks blocks(gradient.rows());
  // Of each block over columns, one or two kinds.
  const bool weighted = sums.weighted != nullptr;
  const auto scratch =
      std::make_unique_for_overwrite<float[]>((weighted ? 2 : 1) * blocks.count * padded);
  float* column_sums = scratch.get();
  float* weighted_sums = weighted ? column_sums + blocks.count * padded : nullptr;
  const kernels::Decay row_decay = DecayOf(step, scale, columns);
  ForBlocks(blocks, [&](int64_t block, int64_t begin, int64_t end) {
    kernels::FactoredSums(gradient, scale, step.momentum, step.beta1, momentum_key, begin, end,
                          sums.rows, column_sums + block * padded, row_moments.as<float>(),
                          row_decay, weighted ? weighted_sums + block * padded : nullptr);
  });
  AddBlocks(blocks, columns, padded, column_sums);
  std::copy_n(column_sums, padded, sums.columns);
  if (!weighted) return;
  AddBlocks(blocks, columns, padded, weighted_sums);
  std::copy_n(weighted_sums, padded, sums.weighted);
}

}  // namespace

void AddSecondMoment(const Shape& shape, bool factored, std::vector<StateSpec>& state) {
  if (factored) {
    state.push_back({"row_second_moment", DType::kF32, {shape[0]}});
    state.push_back({"column_second_moment", DType::kF32, {shape[1]}});
  } else {
    state.push_back({"second_moment", DType::kF32, shape});
  }
}

int64_t MeasuredFloatsOfFactored(const Shape& shape, const AdaptiveStep& step) {
  return FloatsOf(shape, step.rms_clip != 0);
}

double MeasureFactored(TensorView gradient, TensorView row_moments, const AdaptiveStep& step,
                       float* measured) {
  const SumsOf<float> sums(measured, gradient.shape, step.rms_clip != 0);
  LeaveSums(gradient, 1, step, 0, row_moments, sums);
  return std::accumulate(sums.rows, sums.rows + gradient.rows(), 0.0);
}

UpdateReport UpdateFactored(TensorView weight, TensorView gradient, TensorView row_moments,
                            TensorView column_moments, const AdaptiveStep& step,
                            const StepContext& context) {
  if (weight.size() == 0) return {};
  const int64_t rows = weight.rows();
  const int64_t columns = weight.columns();
  const int64_t padded = kernels::PaddedColumns(columns);
  const RowBlocks blocks(rows);
  const bool clipped = step.rms_clip != 0;
  const bool measured = context.measured != nullptr;
  const auto scratch = std::make_unique_for_overwrite<float[]>(
      rows + padded + (measured ? 0 : FloatsOf(weight.shape, clipped)));
  float* row_factors = scratch.get();
  float* column_factors = row_factors + rows;
  if (!measured) {
    LeaveSums(gradient, context.gradient_scale, step, kernels::MomentumKey(context.rounding_key),
              row_moments, SumsOf<float>(column_factors + padded, weight.shape, clipped));
  }
  const SumsOf<const float> sums(measured ? context.measured : column_factors + padded,
                                 weight.shape, clipped);
  const bool weighted = clipped && (!measured || context.gradient_scale == 1);

  // row_factors[i] = correction / sqrt(max(vr / mean, row_floor)), and column_factors[j] =
  // 1 / sqrt(max(vc, floor)).
  const float scale = context.gradient_scale;
  const double row_mean = kernels::DecayMoments(row_moments.as<float>(), sums.rows, rows,
                                                DecayOf(step, scale, columns)) /
                          static_cast<double>(rows);
  const double column_mean = kernels::DecayMoments(column_moments.as<float>(), sums.columns,
                                                   columns, DecayOf(step, scale, rows)) /
                             static_cast<double>(columns);
  const double mean = std::max(row_mean, step.smallest_mean);
  const float correction = static_cast<float>(CorrectionOf(step, context));
  const int64_t floored_rows =
      kernels::InverseRoots(row_moments.as<float>(), rows, static_cast<float>(1 / mean),
                            static_cast<float>(step.row_floor), correction, row_factors);
  const int64_t floored_columns = kernels::InverseRoots(
      column_moments.as<float>(), columns, 1, FloorOf(step, column_mean), 1, column_factors);
  std::fill(column_factors + columns, column_factors + padded, 0.0f);

  const kernels::Stored numerator = NumeratorOf(step, gradient);
  double squares = 0;
  if (weighted && floored_rows == 0) {
    for (int64_t j = 0; j < columns; ++j) {
      const double factor = column_factors[j];
      squares += factor * factor * sums.weighted[j];
    }
    squares *= mean * correction * correction;
  } else if (clipped) {
    std::vector<double> partial(blocks.count);
    ForBlocks(blocks, [&](int64_t block, int64_t begin, int64_t end) {
      partial[block] = kernels::FactoredSquares(numerator, begin, end, row_factors, column_factors);
    });
    squares = std::accumulate(partial.begin(), partial.end(), 0.0);
  }
  const double clip = ClipOf(step, squares, rows * columns);

  // The first pass waits for memory, this one for arithmetic: it fetches what a following
  // tensor's first pass is going to wait for.
  const TensorView next = context.next_gradient;
  const int64_t part_bytes = next.data != nullptr ? next.bytes() / blocks.count : 0;
  ForBlocks(blocks, [&](int64_t block, int64_t begin, int64_t end) {
    const kernels::Ahead ahead{next.data + block * part_bytes, part_bytes};
    if (step.average.values.empty()) {
      kernels::FactoredUpdate(weight, numerator, KeepOf(context),
                              static_cast<float>(context.learning_rate / clip), begin, end,
                              row_factors, column_factors, context.rounding_key, ahead);
    } else {
      kernels::FactoredAverageUpdate(weight, gradient, step.average, KeepOf(context),
                                     AverageOf(step, context, clip), begin, end, row_factors,
                                     column_factors, context.rounding_key, ahead);
    }
  });
  return {floored_columns, columns};
}

UpdateReport UpdateExact(TensorView weight, TensorView gradient, TensorView second_moments,
                         const AdaptiveStep& step, const StepContext& context) {
  if (weight.size() == 0) return {};
  const int64_t size = weight.size();
  const int64_t grain = GrainOf(step.average.values.empty() ? step.momentum : step.average);
  const kernels::Stored numerator = NumeratorOf(step, gradient);
  const int64_t blocks = (size + grain - 1) / grain;

  const uint64_t momentum_key = kernels::MomentumKey(context.rounding_key);
  std::vector<double> sums(blocks);
  ParallelFor(size, grain, [&](int64_t begin, int64_t end) {
    sums[begin / grain] = kernels::ExactMoments(
        gradient, context.gradient_scale, step.momentum, step.beta1, momentum_key, second_moments,
        step.beta2, static_cast<float>(step.added), begin, end);
  });
  const double sum = std::accumulate(sums.begin(), sums.end(), 0.0);
  const float floor = FloorOf(step, sum / static_cast<double>(size));

  std::vector<kernels::ExactSquares> partial(blocks);
  ParallelFor(size, grain, [&](int64_t begin, int64_t end) {
    partial[begin / grain] = kernels::SumExactSquares(numerator, second_moments, floor, begin, end);
  });
  UpdateReport report{0, size};
  double squares = 0;
  for (const kernels::ExactSquares& part : partial) {
    squares += part.sum;
    report.floored += part.floored;
  }
  const float correction = static_cast<float>(CorrectionOf(step, context));
  squares *= static_cast<double>(correction) * correction;
  const double clip = ClipOf(step, squares, size);

  ParallelFor(size, grain, [&](int64_t begin, int64_t end) {
    if (step.average.values.empty()) {
      const float length = correction * static_cast<float>(context.learning_rate / clip);
      kernels::ExactUpdate(weight, numerator, second_moments, floor, KeepOf(context), length, begin,
                           end, context.rounding_key);
    } else {
      kernels::AverageStep average = AverageOf(step, context, clip);
      average.gain *= correction;
      kernels::ExactAverageUpdate(weight, gradient, step.average, second_moments, floor,
                                  KeepOf(context), average, begin, end, context.rounding_key);
    }
  });
  return report;
}

}  // namespace terrace
