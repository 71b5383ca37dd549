#include "optim/kernels/blocks.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/kernels/blocks.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>

#include "backend/cpu/simd-inl.h"
#include "backend/cpu/units-inl.h"
#include "optim/kernels/dispatch.h"
#include "optim/kernels/stored-inl.h"

HWY_BEFORE_NAMESPACE();
namespace terrace::kernels {
namespace HWY_NAMESPACE {
namespace {

TensorView ViewOf(const MatrixBlock& block) { return {block.data, block.dtype, {}, "block"}; }

template <typename Momentum, typename Gradient, typename Store>
HWY_INLINE float MomentumPart(Momentum* momentum, VF beta, const Gradient* gradient, VF scale,
                              bool nesterov, int64_t count, Store& store) {
  Accumulator sum;
  ForUnits(
      count,
      [&](int64_t, Momentum* m, const Gradient* g) HWY_ATTR {
        const auto updated = [&](int64_t at) HWY_ATTR {
          const VF scaled = hn::Mul(Load(g + at), scale);
          const VF moved = hn::MulAdd(beta, store.Old(m + at), scaled);
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

double Momentum(const Stored& momentum, float beta, TensorView gradient, float scale, bool nesterov,
                uint64_t momentum_key, int64_t begin, int64_t end) {
  double total = 0;
  WithElements(gradient, [&](const auto* g) {
    WithStorage(momentum, [&](const auto& storage) {
      storage.ForMove(gradient.size(), momentum_key, begin, end,
                      [&](const Part& part, auto* m, auto& store) HWY_ATTR {
                        total += MomentumPart(m, hn::Set(F32(), beta), g + part.first,
                                              hn::Set(F32(), scale), nesterov, part.count, store);
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
HWY_INLINE void CombineRow(Out* out, const X* first, VF x_factor, const Y* second, VF y_factor,
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

void Combination(const MatrixBlock& out, const MatrixBlock& x, float x_factor, const MatrixBlock& y,
                 float y_factor, int64_t rows, int64_t columns) {
  WithElements(ViewOf(out), [&](auto* to) {
    WithElements(ViewOf(x), [&](const auto* first) {
      WithElements(ViewOf(y), [&](const auto* second) {
        for (int64_t i = 0; i < rows; ++i) {
          CombineRow(to + i * out.stride, first + i * x.stride, hn::Set(F32(), x_factor),
                     second != nullptr ? second + i * y.stride : second, hn::Set(F32(), y_factor),
                     columns);
        }
      });
    });
  });
}

void StoredCombination(TensorView out, const Stored& source, float x_factor, TensorView y,
                       float y_factor, int64_t begin, int64_t end) {
  WithElements(out, [&](auto* to) {
    WithElementsOrNull(y, [&](const auto* second) {
      WithStorage(source, [&](const auto& storage) {
        storage.ForRead(out.size(), begin, end,
                        [&](const Part& part, const auto* x, float scale) HWY_ATTR {
                          CombineRow(to + part.first, x, hn::Set(F32(), x_factor * scale),
                                     second != nullptr ? second + part.first : second,
                                     hn::Set(F32(), y_factor), part.count);
                        });
      });
    });
  });
}

void Directions(const MatrixBlock& x, const MatrixBlock& momentum, const MatrixBlock& second,
                int64_t rows, int64_t columns, const AdamDirection& step) {
  const VF scale = hn::Set(F32(), step.gradient_scale);
  const VF beta1 = hn::Set(F32(), static_cast<float>(step.beta1));
  const VF gain1 = hn::Set(F32(), static_cast<float>(1 - step.beta1));
  const VF beta2 = hn::Set(F32(), static_cast<float>(step.beta2));
  const VF gain2 = hn::Set(F32(), static_cast<float>(1 - step.beta2));
  const VF correction = hn::Set(F32(), step.inverse_correction);
  const VF eps = hn::Set(F32(), step.eps);
  for (int64_t i = 0; i < rows; ++i) {
    ForUnits(
        columns,
        [&](int64_t, float* g, float* m, float* s) HWY_ATTR {
          ForVectors([&](int64_t at, int64_t) HWY_ATTR {
            const VF scaled = hn::Mul(Load(g + at), scale);
            const VF first = hn::MulAdd(beta1, Load(m + at), hn::Mul(gain1, scaled));
            const VF moment =
                hn::MulAdd(beta2, Load(s + at), hn::Mul(gain2, hn::Mul(scaled, scaled)));
            Store(first, m + at);
            Store(moment, s + at);
            const VF denominator = hn::MulAdd(hn::Sqrt(moment), correction, eps);
            Store(hn::Div(first, denominator), g + at);
          });
        },
        ViewOf(x.At(i, 0)).as<float>(), ViewOf(momentum.At(i, 0)).as<float>(),
        ViewOf(second.At(i, 0)).as<float>());
  }
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

void Descent(const MatrixBlock& weight, float keep, const MatrixBlock& source, float step,
             int64_t rows, int64_t columns, uint64_t rounding_key, BlockStripes stripes) {
  WithElements(ViewOf(weight), [&](auto* w) {
    WithElements(ViewOf(source), [&](const auto* x) {
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < columns; j += kStripe) {
          const int64_t stripe = stripes.first + i * stripes.per_row + j / kStripe;
          DescendStripe(w + i * weight.stride + j, hn::Set(F32(), keep), x + i * source.stride + j,
                        hn::Set(F32(), step), std::min(kStripe, columns - j),
                        StripeKey(rounding_key, stripe));
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

HWY_EXPORT(Momentum);
HWY_EXPORT(Combination);
HWY_EXPORT(StoredCombination);
HWY_EXPORT(Directions);
HWY_EXPORT(Descent);

double SumMomentum(const Stored& momentum, float beta, TensorView gradient, float scale,
                   bool nesterov, uint64_t momentum_key, int64_t begin, int64_t end) {
  return HWY_DYNAMIC_DISPATCH(Momentum)(momentum, beta, gradient, scale, nesterov, momentum_key,
                                        begin, end);
}

void Combine(const MatrixBlock& out, const MatrixBlock& x, float x_factor, const MatrixBlock& y,
             float y_factor, int64_t rows, int64_t columns) {
  HWY_DYNAMIC_DISPATCH(Combination)(out, x, x_factor, y, y_factor, rows, columns);
}

void CombineStored(TensorView out, const Stored& x, float x_factor, TensorView y, float y_factor,
                   int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(StoredCombination)(out, x, x_factor, y, y_factor, begin, end);
}

void ToAdamDirection(const MatrixBlock& x, const MatrixBlock& momentum, const MatrixBlock& second,
                     int64_t rows, int64_t columns, const AdamDirection& step) {
  HWY_DYNAMIC_DISPATCH(Directions)(x, momentum, second, rows, columns, step);
}

void Descend(const MatrixBlock& weight, float keep, const MatrixBlock& x, float step, int64_t rows,
             int64_t columns, uint64_t rounding_key, BlockStripes stripes) {
  HWY_DYNAMIC_DISPATCH(Descent)(weight, keep, x, step, rows, columns, rounding_key, stripes);
}

}  // namespace terrace::kernels
#endif  // HWY_ONCE
