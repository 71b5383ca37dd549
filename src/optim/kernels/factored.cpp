#include "optim/kernels/factored.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/kernels/factored.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>

#include "optim/kernels/dispatch.h"
#include "optim/kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace terrace::kernels {
namespace HWY_NAMESPACE {
namespace {

struct MomentumStep {
  VF beta;
  VF gain;  // 1 - beta
};

// One unit of kRows rows that lie `stride` elements apart; without momentum `momentum` is null.
template <int kRows, bool kMomentum, typename Gradient>
HWY_INLINE void SumUnit(const Gradient* gradient, float* momentum, int64_t stride, VF scale,
                        MomentumStep step, Accumulator* row_sums, float* column_sums) {
  for (int64_t half = 0; half < kUnit; half += kHalfUnit) {
    for (int64_t v = 0; v < kVectors; ++v) {
      const int64_t at = half + v * kLanes;
      VF column = Load(column_sums + at);
      for (int row = 0; row < kRows; ++row) {
        const VF g = hn::Mul(Load(gradient + row * stride + at), scale);
        row_sums[row].lanes[v] = hn::MulAdd(g, g, row_sums[row].lanes[v]);
        column = hn::MulAdd(g, g, column);
        if constexpr (kMomentum) {
          float* m = momentum + row * stride + at;
          Store(hn::MulAdd(step.beta, Load(m), hn::Mul(step.gain, g)), m);
        }
      }
      Store(column, column_sums + at);
    }
  }
}

template <int kRows, bool kMomentum, typename Gradient>
HWY_INLINE void SumRows(const Gradient* gradient, float* momentum, int64_t columns, VF scale,
                        MomentumStep step, float* row_sums, float* column_sums) {
  Accumulator sums[kRows];
  const int64_t whole = columns / kUnit * kUnit;
  for (int64_t j = 0; j < whole; j += kUnit) {
    SumUnit<kRows, kMomentum>(gradient + j, kMomentum ? momentum + j : nullptr, columns, scale,
                              step, sums, column_sums + j);
  }
  for (int row = 0; row < kRows; ++row) {
    if (const int64_t rest = columns - whole; rest > 0) {
      const int64_t at = row * columns + whole;
      const Padded<Gradient> g(gradient + at, rest);
      if constexpr (kMomentum) {
        Padded<float> m(momentum + at, rest);
        SumUnit<1, true>(g.elements, m.elements, 0, scale, step, sums + row, column_sums + whole);
        m.CopyTo(momentum + at, rest);
      } else {
        SumUnit<1, false>(g.elements, nullptr, 0, scale, step, sums + row, column_sums + whole);
      }
    }
    row_sums[row] = sums[row].Sum();
  }
}

template <bool kMomentum, typename Gradient>
HWY_INLINE void SumRange(const Gradient* gradient, float* momentum, int64_t columns, float scale,
                         double beta, int64_t begin, int64_t end, float* row_sums,
                         float* column_sums) {
  const VF scales = hn::Set(F32(), scale);
  const MomentumStep step{hn::Set(F32(), static_cast<float>(beta)),
                          hn::Set(F32(), static_cast<float>(1 - beta))};
  // Several rows together spare loads and stores of the column sums.
  constexpr int kRows = 4;
  int64_t i = begin;
  for (; i + kRows <= end; i += kRows) {
    SumRows<kRows, kMomentum>(gradient + i * columns, kMomentum ? momentum + i * columns : nullptr,
                              columns, scales, step, row_sums + i, column_sums);
  }
  for (; i < end; ++i) {
    SumRows<1, kMomentum>(gradient + i * columns, kMomentum ? momentum + i * columns : nullptr,
                          columns, scales, step, row_sums + i, column_sums);
  }
}

void Sums(TensorView gradient, float scale, TensorView momentum, double beta, int64_t begin,
          int64_t end, float* row_sums, float* column_sums) {
  const int64_t columns = gradient.columns();
  std::fill_n(column_sums, PaddedColumns(columns), 0.0f);
  WithElements(gradient, [&](const auto* g) {
    if (momentum.empty()) {
      SumRange<false>(g, nullptr, columns, scale, beta, begin, end, row_sums, column_sums);
    } else {
      SumRange<true>(g, momentum.as<float>(), columns, scale, beta, begin, end, row_sums,
                     column_sums);
    }
  });
}

template <typename X>
HWY_INLINE float SquareRow(const X* row, int64_t columns, const float* column_factors) {
  Accumulator sum;
  ForUnits(
      columns,
      [&](int64_t j, const X* x) HWY_ATTR {
        for (int64_t half = 0; half < kUnit; half += kHalfUnit) {
          for (int64_t v = 0; v < kVectors; ++v) {
            const int64_t at = half + v * kLanes;
            const VF u = hn::Mul(Load(x + at), Load(column_factors + j + at));
            sum.lanes[v] = hn::MulAdd(u, u, sum.lanes[v]);
          }
        }
      },
      row);
  return sum.Sum();
}

double Squares(TensorView view, int64_t begin, int64_t end, const float* row_factors,
               const float* column_factors) {
  const int64_t columns = view.columns();
  double total = 0;
  WithElements(view, [&](const auto* x) {
    for (int64_t i = begin; i < end; ++i) {
      const double factor = row_factors[i];
      total += factor * factor * SquareRow(x + i * columns, columns, column_factors);
    }
  });
  return total;
}

template <typename Weight, typename X>
HWY_INLINE void UpdateStripe(Weight* weight, const X* source, int64_t count, VF keep, VF step,
                             const float* column_factors, uint64_t stripe_key) {
  Rounding<Weight> rounding(stripe_key);
  ForUnits(
      count,
      [&](int64_t j, Weight* w, const X* x) HWY_ATTR {
        for (int64_t v = 0; v < kVectors; ++v) {
          const int64_t low = v * kLanes;
          const int64_t high = low + kHalfUnit;
          rounding.Draw(j + low);
          const VF u0 = hn::Mul(Load(x + low), Load(column_factors + j + low));
          const VF u1 = hn::Mul(Load(x + high), Load(column_factors + j + high));
          rounding.StoreLow(hn::NegMulAdd(u0, step, hn::Mul(Load(w + low), keep)), w + low);
          rounding.StoreHigh(hn::NegMulAdd(u1, step, hn::Mul(Load(w + high), keep)), w + high);
        }
      },
      weight, source);
}

void Update(TensorView weight, TensorView source, float keep, float step, int64_t begin,
            int64_t end, const float* row_factors, const float* column_factors,
            uint64_t rounding_key) {
  const int64_t columns = weight.columns();
  const int64_t stripes = (columns + kStripe - 1) / kStripe;
  WithElements(weight, [&](auto* w) {
    WithElements(source, [&](auto* x) {
      for (int64_t i = begin; i < end; ++i) {
        for (int64_t stripe = 0; stripe < stripes; ++stripe) {
          const int64_t j = stripe * kStripe;
          const int64_t at = i * columns + j;
          UpdateStripe(w + at, x + at, std::min(kStripe, columns - j), hn::Set(F32(), keep),
                       hn::Set(F32(), step * row_factors[i]), column_factors + j,
                       StripeKey(rounding_key, i * stripes + stripe));
        }
      }
    });
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace terrace::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace terrace::kernels {

HWY_EXPORT(Sums);
HWY_EXPORT(Squares);
HWY_EXPORT(Update);

void FactoredSums(TensorView gradient, float scale, TensorView momentum, double beta, int64_t begin,
                  int64_t end, float* row_sums, float* column_sums) {
  HWY_DYNAMIC_DISPATCH(Sums)
  (gradient, scale, momentum, beta, begin, end, row_sums, column_sums);
}

double FactoredSquares(TensorView x, int64_t begin, int64_t end, const float* row_factors,
                       const float* column_factors) {
  return HWY_DYNAMIC_DISPATCH(Squares)(x, begin, end, row_factors, column_factors);
}

void FactoredUpdate(TensorView weight, TensorView x, float keep, float step, int64_t begin,
                    int64_t end, const float* row_factors, const float* column_factors,
                    uint64_t rounding_key) {
  HWY_DYNAMIC_DISPATCH(Update)
  (weight, x, keep, step, begin, end, row_factors, column_factors, rounding_key);
}

}  // namespace terrace::kernels
#endif  // HWY_ONCE
