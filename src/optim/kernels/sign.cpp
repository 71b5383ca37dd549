#include "optim/kernels/sign.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/kernels/sign.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>

#include "backend/cpu/units-inl.h"
#include "optim/kernels/dispatch.h"
#include "optim/kernels/factored.h"

HWY_BEFORE_NAMESPACE();
namespace terrace::kernels {
namespace HWY_NAMESPACE {
namespace {

struct Constants {
  explicit HWY_INLINE Constants(const SignStep& s)
      : keep(hn::Set(F32(), s.keep)),
        rate(hn::Set(F32(), s.rate)),
        beta1(hn::Set(F32(), static_cast<float>(s.beta1))),
        gain1(hn::Set(F32(), static_cast<float>((1 - s.beta1) * s.gradient_scale))),
        beta2(hn::Set(F32(), static_cast<float>(s.beta2))),
        gain2(hn::Set(F32(), static_cast<float>((1 - s.beta2) * s.gradient_scale))) {}
  VF keep, rate, beta1, gain1, beta2, gain2;
};

// keep * w - step * sign(direction)
HWY_INLINE VF Stepped(VF weight, VF direction, VF keep, VF step) {
  const VF change = hn::CopySign(step, direction);
  const VF zero = hn::Zero(F32());
  return hn::MulSub(weight, keep, hn::IfThenZeroElse(hn::Eq(direction, zero), change));
}

// `factors` null: 1.
template <typename Weight, typename Gradient, typename Momentum>
HWY_INLINE void Stripe(Weight* weight, const Gradient* gradient, Momentum* momentum,
                       const float* factors, const Constants& c, int64_t count, uint64_t weight_key,
                       uint64_t momentum_key) {
  UnitStore<Weight> store(weight_key);
  const auto step_at = [&](int64_t at) HWY_ATTR {
    return factors != nullptr ? hn::Mul(c.rate, Load(factors + at)) : c.rate;
  };
  if (momentum == nullptr) {
    ForUnits(
        count,
        [&](int64_t j, Weight* w, const Gradient* g) HWY_ATTR {
          const auto updated = [&](int64_t at) HWY_ATTR {
            return Stepped(Load(w + at), hn::Mul(c.gain1, Load(g + at)), c.keep, step_at(j + at));
          };
          store(updated, w);
        },
        weight, gradient);
    return;
  }
  UnitStore<Momentum> store_momentum(momentum_key);
  ForUnits(
      count,
      [&](int64_t j, Weight* w, const Gradient* g, Momentum* m) HWY_ATTR {
        const auto updated = [&](int64_t at) HWY_ATTR {
          const VF direction = hn::MulAdd(c.beta1, Load(m + at), hn::Mul(c.gain1, Load(g + at)));
          return Stepped(Load(w + at), direction, c.keep, step_at(j + at));
        };
        store(updated, w);
        const auto kept = [&](int64_t at) HWY_ATTR {
          return hn::MulAdd(c.beta2, Load(m + at), hn::Mul(c.gain2, Load(g + at)));
        };
        store_momentum(kept, m);
      },
      weight, gradient, momentum);
}

// Calls f(weights, gradients, momentum) with typed pointers, the last null for none.
template <typename F>
HWY_INLINE void WithAll(TensorView weight, TensorView gradient, TensorView momentum, const F& f) {
  WithElements(weight, [&](auto* w) {
    WithElements(gradient, [&](const auto* g) {
      WithElementsOrNull(momentum, [&](auto* m) { f(w, g, m); });
    });
  });
}

void Update(TensorView weight, TensorView gradient, TensorView momentum, const SignStep& step,
            int64_t begin, int64_t end, uint64_t rounding_key) {
  const uint64_t momentum_key = MomentumKey(rounding_key);
  WithAll(weight, gradient, momentum, [&](auto* w, const auto* g, auto* m) {
    for (int64_t at = begin; at < end; at += kStripe) {
      Stripe(w + at, g + at, m != nullptr ? m + at : m, nullptr, Constants(step),
             std::min(kStripe, end - at), StripeKey(rounding_key, at / kStripe),
             StripeKey(momentum_key, at / kStripe));
    }
  });
}

void UpdateRows(TensorView weight, TensorView gradient, TensorView momentum, const SignStep& step,
                const float* column_factors, int64_t begin, int64_t end, uint64_t rounding_key) {
  const uint64_t momentum_key = MomentumKey(rounding_key);
  const int64_t columns = weight.columns();
  const int64_t stripes = (columns + kStripe - 1) / kStripe;
  WithAll(weight, gradient, momentum, [&](auto* w, const auto* g, auto* m) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t stripe = 0; stripe < stripes; ++stripe) {
        const int64_t j = stripe * kStripe;
        const int64_t at = i * columns + j;
        Stripe(w + at, g + at, m != nullptr ? m + at : m, column_factors + j, Constants(step),
               std::min(kStripe, columns - j), StripeKey(rounding_key, i * stripes + stripe),
               StripeKey(momentum_key, i * stripes + stripe));
      }
    }
  });
}

void Sums(TensorView gradient, int64_t begin, int64_t end, float* column_sums) {
  const int64_t columns = gradient.columns();
  std::fill_n(column_sums, PaddedColumns(columns), 0.0f);
  WithElements(gradient, [&](const auto* all) {
    for (int64_t i = begin; i < end; ++i) {
      ForUnits(
          columns,
          [&](int64_t j, const auto* g) HWY_ATTR {
            ForVectors([&](int64_t at, int64_t) HWY_ATTR {
              float* sum = column_sums + j + at;
              Store(hn::Add(Load(sum), hn::Abs(Load(g + at))), sum);
            });
          },
          all + i * columns);
    }
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace terrace::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace terrace::kernels {

HWY_EXPORT(Update);
HWY_EXPORT(UpdateRows);
HWY_EXPORT(Sums);

void SignUpdate(TensorView weight, TensorView gradient, TensorView momentum, const SignStep& step,
                int64_t begin, int64_t end, uint64_t rounding_key) {
  HWY_DYNAMIC_DISPATCH(Update)(weight, gradient, momentum, step, begin, end, rounding_key);
}

void SignUpdateRows(TensorView weight, TensorView gradient, TensorView momentum,
                    const SignStep& step, const float* column_factors, int64_t begin, int64_t end,
                    uint64_t rounding_key) {
  HWY_DYNAMIC_DISPATCH(UpdateRows)
  (weight, gradient, momentum, step, column_factors, begin, end, rounding_key);
}

void AbsoluteSums(TensorView gradient, int64_t begin, int64_t end, float* column_sums) {
  HWY_DYNAMIC_DISPATCH(Sums)(gradient, begin, end, column_sums);
}

}  // namespace terrace::kernels
#endif  // HWY_ONCE
