#include "optim/kernels/linear_steps.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/kernels/linear_steps.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>

#include "backend/cpu/simd-inl.h"
#include "optim/kernels/dispatch.h"
#include "optim/kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace terrace::kernels {
namespace HWY_NAMESPACE {
namespace {

// Calls stripe(first, count, number) for the stripes of [begin, end).
template <typename Stripe>
HWY_INLINE void ForStripes(int64_t begin, int64_t end, const Stripe& stripe) {
  for (int64_t first = begin; first < end; first += kStripe) {
    stripe(first, std::min(kStripe, end - first), first / kStripe);
  }
}

template <typename Momentum, typename Gradient>
HWY_INLINE float MomentumStripe(Momentum* momentum, VF beta, const Gradient* gradient, VF scale,
                                bool nesterov, int64_t count, uint64_t stripe_key) {
  UnitStore<Momentum> store(stripe_key);
  Accumulator sum;
  ForUnits(
      count,
      [&](int64_t, Momentum* m, const Gradient* g) HWY_ATTR {
        const auto updated = [&](int64_t at) HWY_ATTR {
          const VF scaled = hn::Mul(Load(g + at), scale);
          const VF moved = hn::MulAdd(beta, Load(m + at), scaled);
          const VF direction = nesterov ? hn::MulAdd(beta, moved, scaled) : moved;
          // Lanes of a half unit, as ForVectors numbers them.
          VF& lane = sum.lanes[at % kHalfUnit / kLanes];
          lane = hn::MulAdd(direction, direction, lane);
          return moved;
        };
        store(updated, m);
      },
      momentum, gradient);
  return sum.Sum();
}

double Momentum(TensorView momentum, float beta, TensorView gradient, float scale, bool nesterov,
                uint64_t momentum_key, int64_t begin, int64_t end) {
  double total = 0;
  WithElements(momentum, [&](auto* m) {
    WithElements(gradient, [&](const auto* g) {
      ForStripes(begin, end, [&](int64_t first, int64_t count, int64_t stripe) HWY_ATTR {
        total += MomentumStripe(m + first, hn::Set(F32(), beta), g + first, hn::Set(F32(), scale),
                                nesterov, count, StripeKey(momentum_key, stripe));
      });
    });
  });
  return total;
}

HWY_INLINE void StoreNearest(VF value, float* to) { Store(value, to); }
HWY_INLINE void StoreNearest(VF value, BF16* to) {
  terrace::HWY_NAMESPACE::StoreLanes(value, F32(), to);
}

template <typename Out, typename X, typename Y>
HWY_INLINE void CombineStripe(Out* out, const X* first, VF x_factor, const Y* second, VF y_factor,
                              int64_t count) {
  if (second == nullptr) {
    ForUnits(
        count,
        [&](int64_t, Out* to, const X* x) HWY_ATTR {
          ForVectors([&](int64_t at, int64_t)
                         HWY_ATTR { StoreNearest(hn::Mul(x_factor, Load(x + at)), to + at); });
        },
        out, first);
    return;
  }
  ForUnits(
      count,
      [&](int64_t, Out* to, const X* x, const Y* y) HWY_ATTR {
        ForVectors([&](int64_t at, int64_t) HWY_ATTR {
          const VF sum = hn::MulAdd(x_factor, Load(x + at), hn::Mul(y_factor, Load(y + at)));
          StoreNearest(sum, to + at);
        });
      },
      out, first, second);
}

void Combination(TensorView out, TensorView x, float x_factor, TensorView y, float y_factor,
                 int64_t begin, int64_t end) {
  WithElements(out, [&](auto* to) {
    WithElements(x, [&](const auto* first) {
      WithElementsOrNull(y, [&](const auto* second) {
        CombineStripe(to + begin, first + begin, hn::Set(F32(), x_factor),
                      second != nullptr ? second + begin : second, hn::Set(F32(), y_factor),
                      end - begin);
      });
    });
  });
}

template <typename Weight, typename X>
HWY_INLINE void DescendStripe(Weight* weight, VF keep, const X* source, VF step, int64_t count,
                              uint64_t stripe_key) {
  UnitStore<Weight> store(stripe_key);
  ForUnits(
      count,
      [&](int64_t, Weight* w, const X* x) HWY_ATTR {
        const auto updated = [&](int64_t at) HWY_ATTR {
          return hn::NegMulAdd(Load(x + at), step, hn::Mul(Load(w + at), keep));
        };
        store(updated, w);
      },
      weight, source);
}

void Descent(TensorView weight, float keep, TensorView source, float step, uint64_t rounding_key,
             int64_t begin, int64_t end) {
  WithElements(weight, [&](auto* w) {
    WithElements(source, [&](const auto* x) {
      ForStripes(begin, end, [&](int64_t first, int64_t count, int64_t stripe) HWY_ATTR {
        DescendStripe(w + first, hn::Set(F32(), keep), x + first, hn::Set(F32(), step), count,
                      StripeKey(rounding_key, stripe));
      });
    });
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace terrace::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace terrace::kernels {

HWY_EXPORT(Momentum);
HWY_EXPORT(Combination);
HWY_EXPORT(Descent);

double SumMomentum(TensorView momentum, float beta, TensorView gradient, float scale, bool nesterov,
                   uint64_t momentum_key, int64_t begin, int64_t end) {
  return HWY_DYNAMIC_DISPATCH(Momentum)(momentum, beta, gradient, scale, nesterov, momentum_key,
                                        begin, end);
}

void Combine(TensorView out, TensorView x, float x_factor, TensorView y, float y_factor,
             int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(Combination)(out, x, x_factor, y, y_factor, begin, end);
}

void Descend(TensorView weight, float keep, TensorView x, float step, uint64_t rounding_key,
             int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(Descent)(weight, keep, x, step, rounding_key, begin, end);
}

}  // namespace terrace::kernels
#endif  // HWY_ONCE
