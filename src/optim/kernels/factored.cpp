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
#include "optim/kernels/block_quantization-inl.h"
#include "optim/kernels/dispatch.h"

HWY_BEFORE_NAMESPACE();
namespace terrace::kernels {
namespace HWY_NAMESPACE {
namespace {

struct MomentumStep {
  VF beta;
  VF gain;  // (1 - beta) * gradient scale
};

template <bool kMomentum, typename Gradient>
HWY_INLINE void SumUnit(const Gradient* gradient, float* momentum, MomentumStep step,
                        Accumulator& row_sum, float* column_sums) {
  ForVectors([&](int64_t at, int64_t v) HWY_ATTR {
    const VF g = Load(gradient + at);
    row_sum.lanes[v] = hn::MulAdd(g, g, row_sum.lanes[v]);
    Store(hn::MulAdd(g, g, Load(column_sums + at)), column_sums + at);
    if constexpr (kMomentum) {
      Store(hn::MulAdd(step.beta, Load(momentum + at), hn::Mul(step.gain, g)), momentum + at);
    }
  });
}

template <typename Gradient, typename Momentum>
HWY_INLINE void SumRow(const Gradient* gradient, Momentum* momentum, int64_t row, int64_t columns,
                       MomentumStep step, uint64_t momentum_key, float* row_sum,
                       float* column_sums) {
  Accumulator sum;
  if (momentum == nullptr) {
    ForUnits(
        columns,
        [&](int64_t j, const Gradient* g)
            HWY_ATTR { SumUnit<false>(g, nullptr, step, sum, column_sums + j); },
        gradient);
  } else if constexpr (std::is_same_v<Momentum, float>) {
    ForUnits(
        columns,
        [&](int64_t j, const Gradient* g, float* m)
            HWY_ATTR { SumUnit<true>(g, m, step, sum, column_sums + j); },
        gradient, momentum);
  } else {
    const int64_t stripes = (columns + kStripe - 1) / kStripe;
    UnitStore<Momentum> store(0);
    ForUnits(
        columns,
        [&](int64_t j, const Gradient* g, Momentum* m) HWY_ATTR {
          SumUnit<false>(g, nullptr, step, sum, column_sums + j);
          if (j % kStripe == 0) {
            store = UnitStore<Momentum>(StripeKey(momentum_key, row * stripes + j / kStripe));
          }
          const auto updated = [&](int64_t at) HWY_ATTR {
            return hn::MulAdd(step.beta, Load(m + at), hn::Mul(step.gain, Load(g + at)));
          };
          store(updated, m);
        },
        gradient, momentum);
  }
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

// One row of quantized momentum.
struct QuantizedRow {
  QuantizedRow(const Stored& x, int64_t row)
      : codes(x.values.as<uint8_t>() + row * x.values.columns()),
        scales(x.scales.as<float>() + row * x.scales.columns()) {}
  uint8_t* codes;
  float* scales;
};

// Calls part(first column, columns, codes, scale) for each block of a row. A scale is a power of
// two: it does not matter which factor it goes into.
template <typename Part>
HWY_INLINE void ForQuantized(const QuantizedRow& row, int64_t columns, const Part& part) {
  for (int64_t first = 0; first < columns; first += kQuantizationBlock) {
    part(first, std::min(kQuantizationBlock, columns - first),
         reinterpret_cast<const SignedCode*>(row.codes + first),
         row.scales[first / kQuantizationBlock]);
  }
}

template <typename Gradient>
HWY_INLINE void SumQuantizedRow(const Gradient* gradient, const QuantizedRow& momentum, int64_t row,
                                int64_t columns, MomentumStep step, uint64_t momentum_key,
                                float* row_sum, float* column_sums) {
  const int64_t stripes = (columns + kStripe - 1) / kStripe;
  HWY_ALIGN float values[kQuantizationBlock];
  Accumulator sum;
  ForQuantizedBlocks(
      columns,
      [&](int64_t first, int64_t units, const Gradient* g, uint8_t* codes) HWY_ATTR {
        float& scale = momentum.scales[first / kQuantizationBlock];
        // A power of two: it does not matter which factor it goes into.
        const VF keep = hn::Mul(step.beta, hn::Set(F32(), scale));
        LargestBits largest;
        for (int64_t unit = 0; unit < units * kUnit; unit += kUnit) {
          SumUnit<false>(g + unit, nullptr, step, sum, column_sums + first + unit);
          for (int64_t at = unit; at < unit + kUnit; at += kLanes) {
            const VF m = hn::MulAdd(keep, DequantizeVector<Code::kSigned>(codes + at),
                                    hn::Mul(step.gain, Load(g + at)));
            largest.Add(m);
            Store(m, values + at);
          }
        }
        const uint64_t key = StripeKey(momentum_key, row * stripes + first / kStripe);
        scale = QuantizeUnits<Code::kSigned>(values, largest, units, key, first % kStripe / kUnit,
                                             codes);
      },
      gradient, momentum.codes);
  *row_sum = sum.Sum();
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
  // sum(i) leaves the sums of a row, weigh(i, factor) the weighted ones.
  const auto rows = [&](const auto& sum, const auto& weigh) {
    for (int64_t i = begin; i < end; ++i) {
      sum(i);
      if (weighted_sums != nullptr) weigh(i, factor(i));
    }
  };
  const auto by_elements = [&](const auto* g, auto* m) {
    const auto sum = [&](int64_t i) {
      SumRow(g + i * columns, m != nullptr ? m + i * columns : m, i, columns, step, momentum_key,
             row_sums + i, column_sums);
    };
    if (m != nullptr) {
      rows(sum, [&](int64_t i, float weight) {
        AddSquares(m + i * columns, columns, weight, weighted_sums);
      });
    } else if (weighted_sums != nullptr) {
      ForRowsTwice(
          begin, end, columns, sum,
          [&](int64_t i) { AddSquares(g + i * columns, columns, factor(i), weighted_sums); },
          [&](int64_t i) {
            float factors[kGroup];
            for (int64_t row = 0; row < kGroup; ++row) factors[row] = factor(i + row);
            WeighAndSumGroup(g + i * columns, factors, weighted_sums, g + (i + kGroup) * columns,
                             row_sums + i + kGroup, column_sums, columns);
          });
    } else {
      for (int64_t i = begin; i < end; ++i) sum(i);
    }
  };
  const auto by_blocks = [&](const auto* g) {
    rows(
        [&](int64_t i) {
          SumQuantizedRow(g + i * columns, QuantizedRow(momentum, i), i, columns, step,
                          momentum_key, row_sums + i, column_sums);
        },
        [&](int64_t i, float weight) {
          ForQuantized(
              QuantizedRow(momentum, i), columns,
              [&](int64_t first, int64_t count, const SignedCode* m, float scale_of_block) {
                AddSquares(m, count, weight * scale_of_block, weighted_sums + first);
              });
        });
  };
  WithElements(gradient, [&](const auto* g) {
    if (momentum.values.dtype == DType::kU8) return by_blocks(g);
    WithElementsOrNull(momentum.values, [&](auto* m) { by_elements(g, m); });
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

double Squares(const Stored& source, int64_t begin, int64_t end, const float* row_factors,
               const float* column_factors) {
  const int64_t columns = source.values.columns();
  double total = 0;
  if (source.values.dtype == DType::kU8) {
    for (int64_t i = begin; i < end; ++i) {
      const double factor = row_factors[i];
      ForQuantized(QuantizedRow(source, i), columns,
                   [&](int64_t first, int64_t count, const SignedCode* x, float scale) {
                     const double scaled = factor * scale;
                     total += scaled * scaled * SquareRow(x, count, column_factors + first);
                   });
    }
    return total;
  }
  WithElements(source.values, [&](const auto* x) {
    for (int64_t i = begin; i < end; ++i) {
      const double factor = row_factors[i];
      total += factor * factor * SquareRow(x + i * columns, columns, column_factors);
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

void NormalizeRows(TensorView view, int64_t begin, int64_t end, float target, float eps,
                   const float* column_factors, float* row_factors, float* column_sums) {
  const int64_t columns = view.columns();
  WithElements(view, [&](const auto* x) {
    const auto normalize = [&](int64_t i, float squares) {
      const float norm = row_factors[i] * std::sqrt(squares);
      row_factors[i] *= norm > 0 ? target / (norm + eps) : 0;
    };
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
  const int64_t stripes = (columns + kStripe - 1) / kStripe;
  WithElements(weight, [&](auto* w) {
    using Weights = UnitStore<std::remove_pointer_t<decltype(w)>>;
    // Columns [j, j + count) of row i, within a stripe, from their x, which counts `scale` times.
    const auto part = [&](int64_t i, int64_t j, int64_t count, const auto* x,
                          float scale) HWY_ATTR {
      const Weights store(StripeKey(rounding_key, i * stripes + j / kStripe), j % kStripe / kUnit);
      UpdatePart(w + i * columns + j, x, count, hn::Set(F32(), keep),
                 hn::Set(F32(), step * row_factors[i] * scale), column_factors + j, store,
                 prefetcher);
    };
    if (source.values.dtype == DType::kU8) {
      for (int64_t i = begin; i < end; ++i) {
        ForQuantized(QuantizedRow(source, i), columns,
                     [&](int64_t j, int64_t count, const SignedCode* x, float scale) {
                       part(i, j, count, x, scale);
                     });
      }
      return;
    }
    WithElements(source.values, [&](const auto* x) {
      for (int64_t i = begin; i < end; ++i) {
        for (int64_t j = 0; j < columns; j += kStripe) {
          part(i, j, std::min(kStripe, columns - j), x + i * columns + j, 1);
        }
      }
    });
  });
}

template <typename Weight, typename X, typename Average>
HWY_INLINE void AverageStripe(Weight* weight, const X* source, Average* average, int64_t count,
                              VF keep, VF beta, VF gain, VF step, const float* column_factors,
                              uint64_t weight_key, uint64_t average_key, Prefetcher& prefetcher) {
  UnitStore<Weight> store_weight(weight_key);
  UnitStore<Average> store_average(average_key);
  ForUnits(
      count,
      [&](int64_t j, Weight* w, const X* x, Average* a) HWY_ATTR {
        prefetcher.Unit();
        const auto averaged = [&](int64_t at) HWY_ATTR {
          const VF u = hn::Mul(Load(x + at), Load(column_factors + j + at));
          return hn::MulAdd(beta, Load(a + at), hn::Mul(gain, u));
        };
        const auto updated = [&](int64_t at) HWY_ATTR {
          return hn::NegMulAdd(averaged(at), step, hn::Mul(Load(w + at), keep));
        };
        store_weight(updated, w);
        store_average(averaged, a);
      },
      weight, source, average);
}

void AverageUpdate(TensorView weight, TensorView source, TensorView average, float keep,
                   const AverageStep& step, int64_t begin, int64_t end, const float* row_factors,
                   const float* column_factors, uint64_t rounding_key, Ahead ahead) {
  const int64_t columns = weight.columns();
  Prefetcher prefetcher(ahead, (end - begin) * PaddedColumns(columns) / kUnit);
  const int64_t stripes = (columns + kStripe - 1) / kStripe;
  const auto rows = [&](auto* w, const auto* x, auto* a) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t stripe = 0; stripe < stripes; ++stripe) {
        const int64_t j = stripe * kStripe;
        const int64_t at = i * columns + j;
        AverageStripe(w + at, x + at, a + at, std::min(kStripe, columns - j), hn::Set(F32(), keep),
                      hn::Set(F32(), step.beta), hn::Set(F32(), step.gain * row_factors[i]),
                      hn::Set(F32(), step.rate), column_factors + j,
                      StripeKey(rounding_key, i * stripes + stripe),
                      StripeKey(step.rounding_key, i * stripes + stripe), prefetcher);
      }
    }
  };
  WithElements(weight, [&](auto* w) {
    WithElements(source,
                 [&](const auto* x) { WithElements(average, [&](auto* a) { rows(w, x, a); }); });
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

void SinkhornRows(TensorView x, int64_t begin, int64_t end, float target, float eps,
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

void FactoredAverageUpdate(TensorView weight, TensorView x, TensorView average, float keep,
                           const AverageStep& step, int64_t begin, int64_t end,
                           const float* row_factors, const float* column_factors,
                           uint64_t rounding_key, Ahead ahead) {
  HWY_DYNAMIC_DISPATCH(AverageUpdate)
  (weight, x, average, keep, step, begin, end, row_factors, column_factors, rounding_key, ahead);
}

}  // namespace terrace::kernels
#endif  // HWY_ONCE
