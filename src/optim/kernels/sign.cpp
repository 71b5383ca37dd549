#include "optim/kernels/sign.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/kernels/sign.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>

#include "backend/cpu/units-inl.h"
#include "optim/kernels/dispatch.h"
#include "optim/kernels/factored.h"
#include "optim/kernels/stored-inl.h"

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

// keep * w - factor * rate * sign(direction) for the elements of a part; `factors` null: 1.
struct Steps {
  HWY_INLINE VF At(int64_t at) const {
    return factors != nullptr ? hn::Mul(c.rate, Load(factors + at)) : c.rate;
  }
  const Constants& c;
  const float* factors;
};

template <typename Weight, typename Gradient>
HWY_INLINE void UpdatePart(Weight* weight, const Gradient* gradient, const Steps& steps,
                           int64_t count, UnitStore<Weight> store) {
  const Constants& c = steps.c;
  ForUnits(
      count,
      [&](int64_t j, Weight* w, const Gradient* g) HWY_ATTR {
        const auto updated = [&](int64_t at) HWY_ATTR {
          return Stepped(Load(w + at), hn::Mul(c.gain1, Load(g + at)), c.keep, steps.At(j + at));
        };
        store(updated, w);
      },
      weight, gradient);
}

template <typename Weight, typename Gradient, typename Momentum, typename Store>
HWY_INLINE void MovePart(Weight* weight, const Gradient* gradient, Momentum* momentum,
                         const Steps& steps, int64_t count, UnitStore<Weight> store_weight,
                         Store& store_momentum) {
  const Constants& c = steps.c;
  ForUnits(
      count,
      [&](int64_t j, Weight* w, const Gradient* g, Momentum* m) HWY_ATTR {
        const auto updated = [&](int64_t at) HWY_ATTR {
          const VF direction =
              hn::MulAdd(c.beta1, store_momentum.Old(m + at), hn::Mul(c.gain1, Load(g + at)));
          return Stepped(Load(w + at), direction, c.keep, steps.At(j + at));
        };
        store_weight(updated, w);
        const auto kept = [&](int64_t at) HWY_ATTR {
          return hn::MulAdd(c.beta2, store_momentum.Old(m + at), hn::Mul(c.gain2, Load(g + at)));
        };
        store_momentum(kept, m);
      },
      weight, gradient, momentum);
}

// Elements [begin, end) in stripes that end with rows of `row_length`, with factors by column.
void Update(TensorView weight, TensorView gradient, const Stored& momentum, const SignStep& step,
            const float* column_factors, int64_t row_length, int64_t begin, int64_t end,
            uint64_t rounding_key) {
  const Constants constants(step);
  const auto steps_of = [&](const Part& part) {
    return Steps{constants, column_factors != nullptr ? column_factors + part.column : nullptr};
  };
  WithElements(weight, [&](auto* w) {
    using Weights = UnitStore<std::remove_pointer_t<decltype(w)>>;
    const auto weights_of = [&](const Part& part) {
      return Weights(StripeKey(rounding_key, part.stripe()), part.first_unit());
    };
    WithElements(gradient, [&](const auto* g) {
      if (momentum.values.empty()) {
        ForParts(row_length, kStripe, begin, end, [&](const Part& part) HWY_ATTR {
          UpdatePart(w + part.first, g + part.first, steps_of(part), part.count, weights_of(part));
        });
        return;
      }
      WithStorage(momentum, [&](const auto& storage) {
        storage.ForMove(row_length, MomentumKey(rounding_key), begin, end,
                        [&](const Part& part, auto* m, auto& store) HWY_ATTR {
                          MovePart(w + part.first, g + part.first, m, steps_of(part), part.count,
                                   weights_of(part), store);
                        });
      });
    });
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
HWY_EXPORT(Sums);

void SignUpdate(TensorView weight, TensorView gradient, const Stored& momentum,
                const SignStep& step, int64_t begin, int64_t end, uint64_t rounding_key) {
  HWY_DYNAMIC_DISPATCH(Update)
  (weight, gradient, momentum, step, nullptr, weight.size(), begin, end, rounding_key);
}

void SignUpdateRows(TensorView weight, TensorView gradient, const Stored& momentum,
                    const SignStep& step, const float* column_factors, int64_t begin, int64_t end,
                    uint64_t rounding_key) {
  const int64_t columns = weight.columns();
  HWY_DYNAMIC_DISPATCH(Update)
  (weight, gradient, momentum, step, column_factors, columns, begin * columns, end * columns,
   rounding_key);
}

void AbsoluteSums(TensorView gradient, int64_t begin, int64_t end, float* column_sums) {
  HWY_DYNAMIC_DISPATCH(Sums)(gradient, begin, end, column_sums);
}

}  // namespace terrace::kernels
#endif  // HWY_ONCE
