#include "optim/kernels/elementwise.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/kernels/elementwise.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <type_traits>

#include "backend/cpu/units-inl.h"
#include "optim/kernels/dispatch.h"
#include "optim/kernels/moments-inl.h"
#include "optim/kernels/stored-inl.h"

HWY_BEFORE_NAMESPACE();
namespace terrace::kernels {
namespace HWY_NAMESPACE {
namespace {

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

// Moves second moments of a part, and adds them up.
struct SecondMoments {
  HWY_INLINE void Move(VF g, float* s_at, int64_t at) {
    const VF updated = decay(Load(s_at), hn::MulAdd(g, g, added));
    Store(updated, s_at);
    VF& lane = sum.lanes[at % kHalfUnit / kLanes];
    lane = hn::Add(lane, updated);
  }
  HWY_INLINE float Sum(int64_t count) {
    // Padding has the addend only.
    const float padding = hn::GetLane(decay(hn::Zero(F32()), added));
    return sum.Sum() - static_cast<float>(PaddingOf(count)) * padding;
  }

  Decay decay;
  VF added;
  Accumulator sum = {};
};

template <typename Gradient>
HWY_INLINE float MomentStripe(const Gradient* gradient, VF scale, float* second,
                              SecondMoments moments, int64_t count) {
  ForUnits(
      count,
      [&](int64_t, const Gradient* g, float* s) HWY_ATTR {
        ForVectors([&](int64_t at, int64_t)
                       HWY_ATTR { moments.Move(hn::Mul(Load(g + at), scale), s + at, at); });
      },
      gradient, second);
  return moments.Sum(count);
}

// The same, and moves the momentum.
template <typename Gradient, typename Momentum, typename Store>
HWY_INLINE float MomentsPart(const Gradient* gradient, VF scale, Momentum* momentum, Store& store,
                             Decay first, float* second, SecondMoments moments, int64_t count) {
  ForUnits(
      count,
      [&](int64_t, const Gradient* g, Momentum* m, float* s) HWY_ATTR {
        const auto updated = [&](int64_t at) HWY_ATTR {
          const VF scaled = hn::Mul(Load(g + at), scale);
          moments.Move(scaled, s + at, at);
          return first(store.Old(m + at), scaled);
        };
        store(updated, m);
      },
      gradient, momentum, second);
  return moments.Sum(count);
}

double Moments(TensorView gradient, float scale, const Stored& momentum, double beta1,
               uint64_t momentum_key, TensorView second, double beta2, float added, int64_t begin,
               int64_t end) {
  float* s = second.as<float>();
  const VF scales = hn::Set(F32(), scale);
  const Decay first(beta1);
  const SecondMoments moments{Decay(beta2), hn::Set(F32(), added)};
  double total = 0;
  WithElements(gradient, [&](const auto* g) {
    if (momentum.values.empty()) {
      ForStripes(begin, end, [&](int64_t at, int64_t count, int64_t) HWY_ATTR {
        total += MomentStripe(g + at, scales, s + at, moments, count);
      });
      return;
    }
    WithStorage(momentum, [&](const auto& storage) {
      storage.ForMove(second.size(), momentum_key, begin, end,
                      [&](const Part& part, auto* m, auto& store) HWY_ATTR {
                        total += MomentsPart(g + part.first, scales, m, store, first,
                                             s + part.first, moments, part.count);
                      });
    });
  });
  return total;
}

// Of x, which counts `scale` times.
template <typename X>
HWY_INLINE void AddSquares(const X* source, double scale, const float* second, VF floor,
                           int64_t count, ExactSquares& squares) {
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
  squares.sum += scale * scale * sum.Sum();
}

ExactSquares Squares(const Stored& source, TensorView second, float floor, int64_t begin,
                     int64_t end) {
  ExactSquares result{0, 0};
  const float* s = second.as<float>();
  const VF floors = hn::Set(F32(), floor);
  WithStorage(source, [&](const auto& storage) {
    storage.ForRead(second.size(), begin, end,
                    [&](const Part& part, const auto* x, float scale) HWY_ATTR {
                      AddSquares(x, scale, s + part.first, floors, part.count, result);
                    });
  });
  return result;
}

template <typename Weight, typename X>
HWY_INLINE void UpdatePart(Weight* weight, const X* source, const float* second, VF floor, VF keep,
                           VF step, int64_t count, UnitStore<Weight> store) {
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
    const auto update = [&](const Part& part, const auto* x, float scale) HWY_ATTR {
      UpdatePart(w + part.first, x, s + part.first, hn::Set(F32(), floor), hn::Set(F32(), keep),
                 hn::Set(F32(), step * scale), part.count,
                 Weights(StripeKey(rounding_key, part.stripe()), part.first_unit()));
    };
    WithStorage(source,
                [&](const auto& storage) { storage.ForRead(second.size(), begin, end, update); });
  });
}

template <typename Weight, typename X, typename Average, typename Store>
HWY_INLINE void AveragePart(Weight* weight, const X* source, Average* average, const float* second,
                            VF floor, VF keep, const AverageStep& step, int64_t count,
                            UnitStore<Weight> store_weight, Store& store_average) {
  const VF beta = hn::Set(F32(), step.beta);
  const VF gain = hn::Set(F32(), step.gain);
  const VF length = hn::Set(F32(), step.rate);
  ForUnits(
      count,
      [&](int64_t, Weight* w, const X* x, Average* a, const float* s) HWY_ATTR {
        const auto averaged = [&](int64_t at) HWY_ATTR {
          const VF u = hn::Div(Load(x + at), hn::Sqrt(hn::Max(Load(s + at), floor)));
          return hn::MulAdd(beta, store_average.Old(a + at), hn::Mul(gain, u));
        };
        const auto updated = [&](int64_t at) HWY_ATTR {
          return hn::NegMulAdd(averaged(at), length, hn::Mul(Load(w + at), keep));
        };
        store_weight(updated, w);
        store_average(averaged, a);
      },
      weight, source, average, second);
}

void AverageUpdate(TensorView weight, TensorView source, const Stored& average, TensorView second,
                   float floor, float keep, const AverageStep& step, int64_t begin, int64_t end,
                   uint64_t rounding_key) {
  const float* s = second.as<float>();
  const auto parts = [&](auto* w, const auto* x, const auto& storage) {
    using Weights = UnitStore<std::remove_pointer_t<decltype(w)>>;
    const auto move = [&](const Part& part, auto* a, auto& store) HWY_ATTR {
      AveragePart(w + part.first, x + part.first, a, s + part.first, hn::Set(F32(), floor),
                  hn::Set(F32(), keep), step, part.count,
                  Weights(StripeKey(rounding_key, part.stripe()), part.first_unit()), store);
    };
    storage.ForMove(second.size(), step.rounding_key, begin, end, move);
  };
  WithElements(weight, [&](auto* w) {
    WithElements(source, [&](const auto* x) {
      WithStorage(average, [&](const auto& storage) { parts(w, x, storage); });
    });
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

void ExactAverageUpdate(TensorView weight, TensorView x, const Stored& average, TensorView second,
                        float floor, float keep, const AverageStep& step, int64_t begin,
                        int64_t end, uint64_t rounding_key) {
  HWY_DYNAMIC_DISPATCH(AverageUpdate)
  (weight, x, average, second, floor, keep, step, begin, end, rounding_key);
}

}  // namespace terrace::kernels
#endif  // HWY_ONCE
