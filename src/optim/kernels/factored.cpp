#include "optim/kernels/factored.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/kernels/factored.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "backend/cpu/units-inl.h"
#include "optim/kernels/dispatch.h"
#include "optim/kernels/stored-inl.h"

HWY_BEFORE_NAMESPACE();
namespace terrace::kernels {
namespace HWY_NAMESPACE {
namespace {

struct MomentumStep {
  VF beta;
  VF gain;  // (1 - beta) * gradient scale
};

HWY_INLINE VF SumVector(VF g, int64_t at, Accumulator& row_sum, float* column_sums) {
  VF& lane = row_sum.lanes[at % kHalfUnit / kLanes];
  lane = hn::MulAdd(g, g, lane);
  Store(hn::MulAdd(g, g, Load(column_sums + at)), column_sums + at);
  return g;
}

template <typename Gradient>
HWY_INLINE void SumRow(const Gradient* gradient, int64_t columns, float* row_sum,
                       float* column_sums) {
  Accumulator sum;
  ForUnits(
      columns,
      [&](int64_t j, const Gradient* g) HWY_ATTR {
        ForVectors([&](int64_t at, int64_t)
                       HWY_ATTR { SumVector(Load(g + at), at, sum, column_sums + j); });
      },
      gradient);
  *row_sum = sum.Sum();
}

// The same, and moves the row's momentum.
template <typename Gradient, typename Storage>
HWY_INLINE void SumRowAndMove(const Gradient* gradient, const Storage& momentum, int64_t row,
                              int64_t columns, MomentumStep step, uint64_t momentum_key,
                              float* row_sum, float* column_sums) {
  Accumulator sum;
  const auto move = [&](const Part& part, auto* m_part, auto& store) HWY_ATTR {
    ForUnits(
        part.count,
        [&](int64_t j, const Gradient* g, auto* m) HWY_ATTR {
          float* sums = column_sums + part.column + j;
          const auto updated = [&](int64_t at) HWY_ATTR {
            const VF x = SumVector(Load(g + at), at, sum, sums);
            return hn::MulAdd(step.beta, store.Old(m + at), hn::Mul(step.gain, x));
          };
          store(updated, m);
        },
        gradient + part.column, m_part);
  };
  momentum.ForMove(columns, momentum_key, row * columns, (row + 1) * columns, move);
  *row_sum = sum.Sum();
}

// sums[j] += (factor * row[j])^2.
template <typename X>
HWY_INLINE void AddSquares(const X* row, int64_t columns, float factor, float* sums) {
  const VF factors = hn::Set(F32(), factor);
  ForUnits(
      columns,
      [&](int64_t j, const X* x) HWY_ATTR {
        ForVectors([&](int64_t at, int64_t) HWY_ATTR {
          const VF u = hn::Mul(Load(x + at), factors);
          Store(hn::MulAdd(u, u, Load(sums + j + at)), sums + j + at);
        });
      },
      row);
}

// Rows of which a sum must be known before their squares can be weighted are read twice, in groups:
// while the squares of one, which is in the cache by now, are added up, the next one comes from
// memory, which never waits. What is added to what, and in which order, is the same row by row.
inline constexpr int64_t kGroup = 4;  // rows

// Calls sum(i) and then weigh(i) for rows [begin, end), or in place of both weigh_and_sum(i) for
// weigh of rows [i, i + kGroup) and sum of the kGroup rows behind them. Rows that end within a unit
// come one by one.
template <typename Sum, typename Weigh, typename WeighAndSum>
HWY_INLINE void ForRowsTwice(int64_t begin, int64_t end, int64_t columns, const Sum& sum,
                             const Weigh& weigh, const WeighAndSum& weigh_and_sum) {
  int64_t i = begin;
  if (columns % kUnit == 0 && end - begin >= 2 * kGroup) {
    for (int64_t row = i; row < i + kGroup; ++row) sum(row);
    for (; i + 2 * kGroup <= end; i += kGroup) weigh_and_sum(i);
    for (const int64_t stop = i + kGroup; i < stop; ++i) weigh(i);
  }
  for (; i < end; ++i) {
    sum(i);
    weigh(i);
  }
}

// SumRow without momentum of the rows of `next`, and AddSquares of `rows`.
template <typename X>
HWY_INLINE void WeighAndSumGroup(const X* rows, const float* factors, float* weighted_sums,
                                 const X* next, float* row_sums, float* column_sums,
                                 int64_t columns) {
  VF weights[kGroup];
  for (int64_t i = 0; i < kGroup; ++i) weights[i] = hn::Set(F32(), factors[i]);
  Accumulator sums[kGroup];
  for (int64_t j = 0; j < columns; j += kUnit) {
    ForVectors([&](int64_t in_unit, int64_t v) HWY_ATTR {
      const int64_t at = j + in_unit;
      VF weighted = Load(weighted_sums + at);
      VF column = Load(column_sums + at);
      for (int64_t i = 0; i < kGroup; ++i) {
        const VF u = hn::Mul(Load(rows + i * columns + at), weights[i]);
        weighted = hn::MulAdd(u, u, weighted);
        const VF x = Load(next + i * columns + at);
        column = hn::MulAdd(x, x, column);
        sums[i].lanes[v] = hn::MulAdd(x, x, sums[i].lanes[v]);
      }
      Store(weighted, weighted_sums + at);
      Store(column, column_sums + at);
    });
  }
  for (int64_t i = 0; i < kGroup; ++i) row_sums[i] = sums[i].Sum();
}

void Sums(TensorView gradient, float scale, const Stored& momentum, double beta,
          uint64_t momentum_key, int64_t begin, int64_t end, float* row_sums, float* column_sums,
          const float* row_moments, Decay row_decay, float* weighted_sums) {
  const int64_t columns = gradient.columns();
  const MomentumStep step{hn::Set(F32(), static_cast<float>(beta)),
                          hn::Set(F32(), static_cast<float>((1 - beta) * scale))};
  std::fill_n(column_sums, PaddedColumns(columns), 0.0f);
  if (weighted_sums != nullptr) std::fill_n(weighted_sums, PaddedColumns(columns), 0.0f);
  // By which a row is weighted, once it has its sum.
  const auto factor = [&](int64_t i) {
    const float moment = row_decay.keep * row_moments[i] + row_decay.gain * row_sums[i];
    const float added = moment + row_decay.offset;
    return 1 / std::sqrt(std::max(added, std::numeric_limits<float>::min()));
  };
  const auto of_gradient = [&](const auto* g) {
    const auto sum = [&](int64_t i) {
      SumRow(g + i * columns, columns, row_sums + i, column_sums);
    };
    if (weighted_sums == nullptr) {
      for (int64_t i = begin; i < end; ++i) sum(i);
      return;
    }
    ForRowsTwice(
        begin, end, columns, sum,
        [&](int64_t i) { AddSquares(g + i * columns, columns, factor(i), weighted_sums); },
        [&](int64_t i) {
          float factors[kGroup];
          for (int64_t row = 0; row < kGroup; ++row) factors[row] = factor(i + row);
          WeighAndSumGroup(g + i * columns, factors, weighted_sums, g + (i + kGroup) * columns,
                           row_sums + i + kGroup, column_sums, columns);
        });
  };
  const auto of_momentum = [&](const auto* g, const auto& m) {
    for (int64_t i = begin; i < end; ++i) {
      SumRowAndMove(g + i * columns, m, i, columns, step, momentum_key, row_sums + i, column_sums);
      if (weighted_sums == nullptr) continue;
      const float weight = factor(i);
      m.ForRead(columns, i * columns, (i + 1) * columns,
                [&](const Part& part, const auto* x, float scale_of_x) {
                  AddSquares(x, part.count, weight * scale_of_x, weighted_sums + part.column);
                });
    }
  };
  WithElements(gradient, [&](const auto* g) {
    if (momentum.values.empty()) return of_gradient(g);
    WithStorage(momentum, [&](const auto& m) { of_momentum(g, m); });
  });
}

double DecayAll(float* moments, const float* sums, int64_t count, Decay decay) {
  const VF keeps = hn::Set(F32(), decay.keep);
  const VF gains = hn::Set(F32(), decay.gain);
  const VF offsets = hn::Set(F32(), decay.offset);
  double total = 0;
  for (int64_t first = 0; first < count; first += kStripe) {
    const int64_t length = std::min(kStripe, count - first);
    Accumulator sum;
    ForUnits(
        length,
        [&](int64_t j, float* m, const float* s) HWY_ATTR {
          ForVectors([&](int64_t at, int64_t v) HWY_ATTR {
            const VF moment =
                hn::MulAdd(keeps, Load(m + at), hn::MulAdd(gains, Load(s + at), offsets));
            // Padding has the offset only, and does not count.
            const auto counted = hn::FirstN(F32(), std::clamp<int64_t>(length - j - at, 0, kLanes));
            sum.lanes[v] = hn::Add(sum.lanes[v], hn::IfThenElseZero(counted, moment));
            Store(moment, m + at);
          });
        },
        moments + first, sums + first);
    total += sum.Sum();
  }
  return total;
}

int64_t Roots(const float* moments, int64_t count, float scale, float floor, float numerator,
              float* factors) {
  const VF scales = hn::Set(F32(), scale);
  const VF floors = hn::Set(F32(), floor);
  const VF numerators = hn::Set(F32(), numerator);
  int64_t floored = 0;
  ForUnits(
      count,
      [&](int64_t, const float* m, float* f) HWY_ATTR {
        ForVectors([&](int64_t at, int64_t) HWY_ATTR {
          const VF scaled = hn::Mul(Load(m + at), scales);
          floored += hn::CountTrue(F32(), hn::Le(scaled, floors));
          Store(hn::Div(numerators, hn::Sqrt(hn::Max(scaled, floors))), f + at);
        });
      },
      moments, factors);
  return floored - PaddingOf(count);
}

// Fetches an Ahead from memory, some cache lines a unit, up to the second-level cache: closer ones
// would make loads wait.
class Prefetcher {
 public:
  HWY_INLINE Prefetcher(Ahead ahead, int64_t units)
      : at_(ahead.from),
        end_(ahead.from + ahead.bytes),
        step_(units > 0 ? (ahead.bytes + units - 1) / units : 0) {}
  HWY_INLINE void Unit() {
    const std::byte* stop = std::min(end_, at_ + step_);
    for (; at_ < stop; at_ += kLine) __builtin_prefetch(at_, /*rw=*/0, /*locality=*/2);
  }

 private:
  static constexpr int64_t kLine = 64;
  const std::byte* at_;
  const std::byte* end_;
  int64_t step_;
};

template <typename X>
HWY_INLINE float SquareRow(const X* row, int64_t columns, const float* column_factors) {
  Accumulator sum;
  ForUnits(
      columns,
      [&](int64_t j, const X* x) HWY_ATTR {
        ForVectors([&](int64_t at, int64_t v) HWY_ATTR {
          const VF u = hn::Mul(Load(x + at), Load(column_factors + j + at));
          sum.lanes[v] = hn::MulAdd(u, u, sum.lanes[v]);
        });
      },
      row);
  return sum.Sum();
}

// SquareRow of row i of a matrix, however it is stored.
template <typename Storage>
HWY_INLINE double SquareStoredRow(const Storage& x, int64_t i, int64_t columns,
                                  const float* column_factors) {
  double total = 0;
  x.ForRead(columns, i * columns, (i + 1) * columns,
            [&](const Part& part, const auto* values, double scale) {
              total += scale * scale * SquareRow(values, part.count, column_factors + part.column);
            });
  return total;
}

double Squares(const Stored& source, int64_t begin, int64_t end, const float* row_factors,
               const float* column_factors) {
  const int64_t columns = source.values.columns();
  double total = 0;
  WithStorage(source, [&](const auto& x) {
    for (int64_t i = begin; i < end; ++i) {
      const double factor = row_factors[i];
      total += factor * factor * SquareStoredRow(x, i, columns, column_factors);
    }
  });
  return total;
}

// SquareRow of the rows of `next`, and AddSquares of `rows`.
template <typename X>
HWY_INLINE void WeighAndSquareGroup(const X* rows, const float* factors, float* sums, const X* next,
                                    const float* column_factors, float* squares, int64_t columns) {
  VF weights[kGroup];
  for (int64_t i = 0; i < kGroup; ++i) weights[i] = hn::Set(F32(), factors[i]);
  Accumulator row_sums[kGroup];
  for (int64_t j = 0; j < columns; j += kUnit) {
    ForVectors([&](int64_t in_unit, int64_t v) HWY_ATTR {
      const int64_t at = j + in_unit;
      const VF column_factor = Load(column_factors + at);
      VF sum = Load(sums + at);
      for (int64_t i = 0; i < kGroup; ++i) {
        const VF u = hn::Mul(Load(rows + i * columns + at), weights[i]);
        sum = hn::MulAdd(u, u, sum);
        const VF x = hn::Mul(Load(next + i * columns + at), column_factor);
        row_sums[i].lanes[v] = hn::MulAdd(x, x, row_sums[i].lanes[v]);
      }
      Store(sum, sums + at);
    });
  }
  for (int64_t i = 0; i < kGroup; ++i) squares[i] = row_sums[i].Sum();
}

void NormalizeRows(const Stored& source, int64_t begin, int64_t end, float target, float eps,
                   const float* column_factors, float* row_factors, float* column_sums) {
  const int64_t columns = source.values.columns();
  const auto normalize = [&](int64_t i, float squares) {
    const float norm = row_factors[i] * std::sqrt(squares);
    row_factors[i] *= norm > 0 ? target / (norm + eps) : 0;
  };
  const auto by_groups = [&](const auto* x) {
    ForRowsTwice(
        begin, end, columns,
        [&](int64_t i) { normalize(i, SquareRow(x + i * columns, columns, column_factors)); },
        [&](int64_t i) { AddSquares(x + i * columns, columns, row_factors[i], column_sums); },
        [&](int64_t i) {
          const int64_t next = i + kGroup;
          float squares[kGroup];
          WeighAndSquareGroup(x + i * columns, row_factors + i, column_sums, x + next * columns,
                              column_factors, squares, columns);
          for (int64_t row = 0; row < kGroup; ++row) normalize(next + row, squares[row]);
        });
  };
  WithStorage(source, [&](const auto& x) {
    if constexpr (!std::remove_reference_t<decltype(x)>::kCodes) {
      by_groups(static_cast<const std::remove_pointer_t<decltype(x.values)>*>(x.values));
    } else {
      // Row by row: decoding takes longer than memory does.
      for (int64_t i = begin; i < end; ++i) {
        normalize(i, static_cast<float>(SquareStoredRow(x, i, columns, column_factors)));
        x.ForRead(columns, i * columns, (i + 1) * columns,
                  [&](const Part& part, const auto* values, float scale) {
                    AddSquares(values, part.count, row_factors[i] * scale,
                               column_sums + part.column);
                  });
      }
    }
  });
}

template <typename Weight, typename X>
HWY_INLINE void UpdatePart(Weight* weight, const X* source, int64_t count, VF keep, VF step,
                           const float* column_factors, UnitStore<Weight> store,
                           Prefetcher& prefetcher) {
  ForUnits(
      count,
      [&](int64_t j, Weight* w, const X* x) HWY_ATTR {
        prefetcher.Unit();
        const auto updated = [&](int64_t at) HWY_ATTR {
          const VF u = hn::Mul(Load(x + at), Load(column_factors + j + at));
          return hn::NegMulAdd(u, step, hn::Mul(Load(w + at), keep));
        };
        store(updated, w);
      },
      weight, source);
}

void Update(TensorView weight, const Stored& source, float keep, float step, int64_t begin,
            int64_t end, const float* row_factors, const float* column_factors,
            uint64_t rounding_key, Ahead ahead) {
  const int64_t columns = weight.columns();
  Prefetcher prefetcher(ahead, (end - begin) * PaddedColumns(columns) / kUnit);
  WithElements(weight, [&](auto* w) {
    using Weights = UnitStore<std::remove_pointer_t<decltype(w)>>;
    const auto update = [&](const Part& part, const auto* x, float scale) HWY_ATTR {
      UpdatePart(w + part.first, x, part.count, hn::Set(F32(), keep),
                 hn::Set(F32(), step * row_factors[part.row] * scale), column_factors + part.column,
                 Weights(StripeKey(rounding_key, part.stripe()), part.first_unit()), prefetcher);
    };
    WithStorage(source, [&](const auto& storage) {
      storage.ForRead(columns, begin * columns, end * columns, update);
    });
  });
}

template <typename Weight, typename X, typename Average, typename Store>
HWY_INLINE void AveragePart(Weight* weight, const X* source, Average* average, int64_t count,
                            VF keep, VF beta, VF gain, VF step, const float* column_factors,
                            UnitStore<Weight> store_weight, Store& store_average,
                            Prefetcher& prefetcher) {
  ForUnits(
      count,
      [&](int64_t j, Weight* w, const X* x, Average* a) HWY_ATTR {
        prefetcher.Unit();
        const auto averaged = [&](int64_t at) HWY_ATTR {
          const VF u = hn::Mul(Load(x + at), Load(column_factors + j + at));
          return hn::MulAdd(beta, store_average.Old(a + at), hn::Mul(gain, u));
        };
        const auto updated = [&](int64_t at) HWY_ATTR {
          return hn::NegMulAdd(averaged(at), step, hn::Mul(Load(w + at), keep));
        };
        store_weight(updated, w);
        store_average(averaged, a);
      },
      weight, source, average);
}

void AverageUpdate(TensorView weight, TensorView source, const Stored& average, float keep,
                   const AverageStep& step, int64_t begin, int64_t end, const float* row_factors,
                   const float* column_factors, uint64_t rounding_key, Ahead ahead) {
  const int64_t columns = weight.columns();
  Prefetcher prefetcher(ahead, (end - begin) * PaddedColumns(columns) / kUnit);
  const auto rows = [&](auto* w, const auto* x, const auto& a) {
    using Weights = UnitStore<std::remove_pointer_t<decltype(w)>>;
    const auto move = [&](const Part& part, auto* a_part, auto& store) HWY_ATTR {
      AveragePart(w + part.first, x + part.first, a_part, part.count, hn::Set(F32(), keep),
                  hn::Set(F32(), step.beta), hn::Set(F32(), step.gain * row_factors[part.row]),
                  hn::Set(F32(), step.rate), column_factors + part.column,
                  Weights(StripeKey(rounding_key, part.stripe()), part.first_unit()), store,
                  prefetcher);
    };
    a.ForMove(columns, step.rounding_key, begin * columns, end * columns, move);
  };
  WithElements(weight, [&](auto* w) {
    WithElements(source, [&](const auto* x) {
      WithStorage(average, [&](const auto& a) { rows(w, x, a); });
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
HWY_EXPORT(DecayAll);
HWY_EXPORT(Roots);
HWY_EXPORT(Squares);
HWY_EXPORT(NormalizeRows);
HWY_EXPORT(Update);
HWY_EXPORT(AverageUpdate);

void FactoredSums(TensorView gradient, float scale, const Stored& momentum, double beta,
                  uint64_t momentum_key, int64_t begin, int64_t end, float* row_sums,
                  float* column_sums, const float* row_moments, Decay row_decay,
                  float* weighted_sums) {
  HWY_DYNAMIC_DISPATCH(Sums)
  (gradient, scale, momentum, beta, momentum_key, begin, end, row_sums, column_sums, row_moments,
   row_decay, weighted_sums);
}

double DecayMoments(float* moments, const float* sums, int64_t count, Decay decay) {
  return HWY_DYNAMIC_DISPATCH(DecayAll)(moments, sums, count, decay);
}

int64_t InverseRoots(const float* moments, int64_t count, float scale, float floor, float numerator,
                     float* factors) {
  return HWY_DYNAMIC_DISPATCH(Roots)(moments, count, scale, floor, numerator, factors);
}

double FactoredSquares(const Stored& x, int64_t begin, int64_t end, const float* row_factors,
                       const float* column_factors) {
  return HWY_DYNAMIC_DISPATCH(Squares)(x, begin, end, row_factors, column_factors);
}

void SinkhornRows(const Stored& x, int64_t begin, int64_t end, float target, float eps,
                  const float* column_factors, float* row_factors, float* column_sums) {
  HWY_DYNAMIC_DISPATCH(NormalizeRows)
  (x, begin, end, target, eps, column_factors, row_factors, column_sums);
}

void FactoredUpdate(TensorView weight, const Stored& x, float keep, float step, int64_t begin,
                    int64_t end, const float* row_factors, const float* column_factors,
                    uint64_t rounding_key, Ahead ahead) {
  HWY_DYNAMIC_DISPATCH(Update)
  (weight, x, keep, step, begin, end, row_factors, column_factors, rounding_key, ahead);
}

void FactoredAverageUpdate(TensorView weight, TensorView x, const Stored& average, float keep,
                           const AverageStep& step, int64_t begin, int64_t end,
                           const float* row_factors, const float* column_factors,
                           uint64_t rounding_key, Ahead ahead) {
  HWY_DYNAMIC_DISPATCH(AverageUpdate)
  (weight, x, average, keep, step, begin, end, row_factors, column_factors, rounding_key, ahead);
}

}  // namespace terrace::kernels
#endif  // HWY_ONCE
