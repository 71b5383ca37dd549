#include "optim/kernels/elementwise.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/kernels/elementwise.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <type_traits>

#include "backend/cpu/units-inl.h"
#include "optim/kernels/block_quantization-inl.h"
#include "optim/kernels/dispatch.h"
#include "optim/kernels/moments-inl.h"

HWY_BEFORE_NAMESPACE();
namespace terrace::kernels {
namespace HWY_NAMESPACE {
namespace {

// Where a block of codes lies.
struct QuantizedPart {
  int64_t first;  // element
  int64_t count;
  int64_t stripe;
  int64_t first_unit;  // of the stripe
};

// Calls part(QuantizedPart, units, codes, scale) for the blocks of codes in elements [begin, end).
// The codes are padded as ForQuantizedBlocks does it, and written back.
template <typename Part>
HWY_INLINE void ForQuantizedParts(const Stored& x, int64_t begin, int64_t end, const Part& part) {
  const int64_t length = CodeRow(x.values.shape);
  const int64_t stripes = (length + kStripe - 1) / kStripe;
  for (int64_t first = begin; first < end;) {
    const int64_t row = first / length;
    const int64_t column = first % length;
    const int64_t count = std::min({kQuantizationBlock, length - column, end - first});
    const QuantizedPart place{first, count, row * stripes + column / kStripe,
                              column % kStripe / kUnit};
    float& scale = x.scales.as<float>()[row * CodeBlocks(length) + column / kQuantizationBlock];
    ForQuantizedBlocks(
        count, [&](int64_t, int64_t units, uint8_t* codes) { part(place, units, codes, scale); },
        x.values.as<uint8_t>() + first);
    first += count;
  }
}

// The same with part(QuantizedPart, values), the values in float32.
template <typename Part>
HWY_INLINE void ForDequantized(const Stored& x, int64_t begin, int64_t end, const Part& part) {
  HWY_ALIGN float values[kQuantizationBlock];
  ForQuantizedParts(
      x, begin, end,
      [&](const QuantizedPart& place, int64_t units, const uint8_t* codes, float scale) {
        DequantizeUnits<Code::kSigned>(codes, scale, units, values);
        part(place, static_cast<const float*>(values));
      });
}

void ScaleAll(TensorView view, float factor, int64_t begin, int64_t end, uint64_t rounding_key) {
  const VF factors = hn::Set(F32(), factor);
  WithElements(view, [&](auto* all) {
    using T = std::remove_pointer_t<decltype(all)>;
    ForStripes(begin, end, [&](int64_t first, int64_t count, int64_t stripe) HWY_ATTR {
      UnitStore<T> store(StripeKey(rounding_key, stripe));
      ForUnits(
          count,
          [&](int64_t, T* x) HWY_ATTR {
            store([&](int64_t at) HWY_ATTR { return hn::Mul(factors, Load(x + at)); }, x);
          },
          all + first);
    });
  });
}

template <typename Gradient, typename Momentum>
HWY_INLINE float MomentStripe(const Gradient* gradient, VF scale, Momentum* momentum, Decay first,
                              float* second, Decay decay, VF added, int64_t count,
                              uint64_t momentum_key) {
  Accumulator sum;
  const auto second_moment = [&](VF g, float* v_at, int64_t v) HWY_ATTR {
    const VF updated = decay(Load(v_at), hn::MulAdd(g, g, added));
    Store(updated, v_at);
    sum.lanes[v] = hn::Add(sum.lanes[v], updated);
  };
  if (momentum == nullptr) {
    ForUnits(
        count,
        [&](int64_t, const Gradient* g, float* s) HWY_ATTR {
          ForVectors([&](int64_t at, int64_t v)
                         HWY_ATTR { second_moment(hn::Mul(Load(g + at), scale), s + at, v); });
        },
        gradient, second);
  } else {
    UnitStore<Momentum> store(momentum_key);
    ForUnits(
        count,
        [&](int64_t, const Gradient* g, Momentum* m, float* s) HWY_ATTR {
          store([&](int64_t at)
                    HWY_ATTR { return first(Load(m + at), hn::Mul(Load(g + at), scale)); },
                m);
          ForVectors([&](int64_t at, int64_t v)
                         HWY_ATTR { second_moment(hn::Mul(Load(g + at), scale), s + at, v); });
        },
        gradient, momentum, second);
  }
  // Padding has the addend only.
  const float padding = hn::GetLane(decay(hn::Zero(F32()), added));
  return sum.Sum() - static_cast<float>(PaddingOf(count)) * padding;
}

// As MomentStripe does it, to quantized momentum.
template <typename Gradient>
HWY_INLINE double QuantizedMoments(const Gradient* gradient, VF scale, const Stored& momentum,
                                   Decay first, uint64_t momentum_key, float* second, Decay decay,
                                   VF added, int64_t begin, int64_t end) {
  HWY_ALIGN float values[kQuantizationBlock];
  double total = 0;
  ForQuantizedParts(
      momentum, begin, end,
      [&](const QuantizedPart& place, int64_t units, uint8_t* codes, float& block_scale) {
        DequantizeUnits<Code::kSigned>(codes, block_scale, units, values);
        total += MomentStripe(gradient + place.first, scale, values, first, second + place.first,
                              decay, added, place.count, 0);
        LargestBits largest;
        for (int64_t at = 0; at < units * kUnit; at += kLanes) {
          largest.Add(Load(values + at));
        }
        block_scale = QuantizeUnits<Code::kSigned>(
            values, largest, units, StripeKey(momentum_key, place.stripe), place.first_unit, codes);
      });
  return total;
}

double Moments(TensorView gradient, float scale, const Stored& momentum, double beta1,
               uint64_t momentum_key, TensorView second, double beta2, float added, int64_t begin,
               int64_t end) {
  float* s = second.as<float>();
  const VF scales = hn::Set(F32(), scale);
  const VF addends = hn::Set(F32(), added);
  double total = 0;
  WithElements(gradient, [&](const auto* g) {
    if (momentum.values.dtype == DType::kU8) {
      total = QuantizedMoments(g, scales, momentum, Decay(beta1), momentum_key, s, Decay(beta2),
                               addends, begin, end);
      return;
    }
    WithElementsOrNull(momentum.values, [&](auto* m) {
      ForStripes(begin, end, [&](int64_t first, int64_t count, int64_t stripe) HWY_ATTR {
        total +=
            MomentStripe(g + first, scales, m != nullptr ? m + first : m, Decay(beta1), s + first,
                         Decay(beta2), addends, count, StripeKey(momentum_key, stripe));
      });
    });
  });
  return total;
}

template <typename X>
HWY_INLINE void AddSquares(const X* source, const float* second, VF floor, int64_t count,
                           ExactSquares& squares) {
  Accumulator sum;
  ForUnits(
      count,
      [&](int64_t, const X* x, const float* s) HWY_ATTR {
        ForVectors([&](int64_t at, int64_t v) HWY_ATTR {
          const VF value = Load(x + at);
          const VF moment = Load(s + at);
          squares.floored += hn::CountTrue(F32(), hn::Le(moment, floor));
          sum.lanes[v] =
              hn::Add(sum.lanes[v], hn::Div(hn::Mul(value, value), hn::Max(moment, floor)));
        });
      },
      source, second);
  squares.floored -= PaddingOf(count);
  squares.sum += sum.Sum();
}

ExactSquares Squares(const Stored& source, TensorView second, float floor, int64_t begin,
                     int64_t end) {
  ExactSquares result{0, 0};
  const float* s = second.as<float>();
  const VF floors = hn::Set(F32(), floor);
  if (source.values.dtype == DType::kU8) {
    ForDequantized(source, begin, end, [&](const QuantizedPart& place, const float* x) {
      AddSquares(x, s + place.first, floors, place.count, result);
    });
    return result;
  }
  WithElements(source.values, [&](const auto* x) {
    ForStripes(begin, end, [&](int64_t first, int64_t count, int64_t) HWY_ATTR {
      AddSquares(x + first, s + first, floors, count, result);
    });
  });
  return result;
}

template <typename Weight, typename X>
HWY_INLINE void UpdateStripe(Weight* weight, const X* source, const float* second, VF floor,
                             VF keep, VF step, int64_t count, UnitStore<Weight> store) {
  ForUnits(
      count,
      [&](int64_t, Weight* w, const X* x, const float* s) HWY_ATTR {
        const auto updated = [&](int64_t at) HWY_ATTR {
          const VF u = hn::Div(Load(x + at), hn::Sqrt(hn::Max(Load(s + at), floor)));
          return hn::NegMulAdd(u, step, hn::Mul(Load(w + at), keep));
        };
        store(updated, w);
      },
      weight, source, second);
}

void Update(TensorView weight, const Stored& source, TensorView second, float floor, float keep,
            float step, int64_t begin, int64_t end, uint64_t rounding_key) {
  const float* s = second.as<float>();
  WithElements(weight, [&](auto* w) {
    using Weights = UnitStore<std::remove_pointer_t<decltype(w)>>;
    const auto update = [&](int64_t first, int64_t count, const auto* x, const Weights& store) {
      UpdateStripe(w + first, x, s + first, hn::Set(F32(), floor), hn::Set(F32(), keep),
                   hn::Set(F32(), step), count, store);
    };
    if (source.values.dtype == DType::kU8) {
      ForDequantized(source, begin, end, [&](const QuantizedPart& place, const float* x) {
        update(place.first, place.count, x,
               Weights(StripeKey(rounding_key, place.stripe), place.first_unit));
      });
      return;
    }
    WithElements(source.values, [&](const auto* x) {
      ForStripes(begin, end, [&](int64_t first, int64_t count, int64_t stripe) HWY_ATTR {
        update(first, count, x + first, Weights(StripeKey(rounding_key, stripe)));
      });
    });
  });
}

template <typename Weight, typename X, typename Average>
HWY_INLINE void AverageStripe(Weight* weight, const X* source, Average* average,
                              const float* second, VF floor, VF keep, const AverageStep& step,
                              int64_t count, uint64_t weight_key, uint64_t average_key) {
  const VF beta = hn::Set(F32(), step.beta);
  const VF gain = hn::Set(F32(), step.gain);
  const VF length = hn::Set(F32(), step.rate);
  UnitStore<Weight> store_weight(weight_key);
  UnitStore<Average> store_average(average_key);
  ForUnits(
      count,
      [&](int64_t, Weight* w, const X* x, Average* a, const float* s) HWY_ATTR {
        const auto averaged = [&](int64_t at) HWY_ATTR {
          const VF u = hn::Div(Load(x + at), hn::Sqrt(hn::Max(Load(s + at), floor)));
          return hn::MulAdd(beta, Load(a + at), hn::Mul(gain, u));
        };
        const auto updated = [&](int64_t at) HWY_ATTR {
          return hn::NegMulAdd(averaged(at), length, hn::Mul(Load(w + at), keep));
        };
        store_weight(updated, w);
        store_average(averaged, a);
      },
      weight, source, average, second);
}

void AverageUpdate(TensorView weight, TensorView source, TensorView average, TensorView second,
                   float floor, float keep, const AverageStep& step, int64_t begin, int64_t end,
                   uint64_t rounding_key) {
  const float* s = second.as<float>();
  const auto stripes = [&](auto* w, const auto* x, auto* a) {
    ForStripes(begin, end, [&](int64_t first, int64_t count, int64_t stripe) HWY_ATTR {
      AverageStripe(w + first, x + first, a + first, s + first, hn::Set(F32(), floor),
                    hn::Set(F32(), keep), step, count, StripeKey(rounding_key, stripe),
                    StripeKey(step.rounding_key, stripe));
    });
  };
  WithElements(weight, [&](auto* w) {
    WithElements(source,
                 [&](const auto* x) { WithElements(average, [&](auto* a) { stripes(w, x, a); }); });
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace terrace::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace terrace::kernels {

HWY_EXPORT(ScaleAll);
HWY_EXPORT(Moments);
HWY_EXPORT(Squares);
HWY_EXPORT(Update);
HWY_EXPORT(AverageUpdate);

void Scale(TensorView x, float factor, int64_t begin, int64_t end, uint64_t rounding_key) {
  HWY_DYNAMIC_DISPATCH(ScaleAll)(x, factor, begin, end, rounding_key);
}

double ExactMoments(TensorView gradient, float scale, const Stored& momentum, double beta1,
                    uint64_t momentum_key, TensorView second, double beta2, float added,
                    int64_t begin, int64_t end) {
  return HWY_DYNAMIC_DISPATCH(Moments)(gradient, scale, momentum, beta1, momentum_key, second,
                                       beta2, added, begin, end);
}

ExactSquares SumExactSquares(const Stored& x, TensorView second, float floor, int64_t begin,
                             int64_t end) {
  return HWY_DYNAMIC_DISPATCH(Squares)(x, second, floor, begin, end);
}

void ExactUpdate(TensorView weight, const Stored& x, TensorView second, float floor, float keep,
                 float step, int64_t begin, int64_t end, uint64_t rounding_key) {
  HWY_DYNAMIC_DISPATCH(Update)
  (weight, x, second, floor, keep, step, begin, end, rounding_key);
}

void ExactAverageUpdate(TensorView weight, TensorView x, TensorView average, TensorView second,
                        float floor, float keep, const AverageStep& step, int64_t begin,
                        int64_t end, uint64_t rounding_key) {
  HWY_DYNAMIC_DISPATCH(AverageUpdate)
  (weight, x, average, second, floor, keep, step, begin, end, rounding_key);
}

}  // namespace terrace::kernels
#endif  // HWY_ONCE
