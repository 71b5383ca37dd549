#include "optim/kernels/projected.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/kernels/projected.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>

#include "optim/kernels/dispatch.h"
#include "optim/kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace terrace::kernels {
namespace HWY_NAMESPACE {
namespace {

// Calls f(T*) with T float or BF16.
template <typename F>
HWY_INLINE void WithBlock(const MatrixBlock& block, const F& f) {
  WithElements(TensorView{block.data, block.dtype, {}, "block"}, f);
}

void WidenBlock(const MatrixBlock& from, int64_t rows, int64_t columns, float* to,
                int64_t to_stride) {
  WithBlock(from, [&](auto* source) {
    for (int64_t i = 0; i < rows; ++i) {
      ForUnits(
          columns,
          [&](int64_t, const auto* x, float* wide) HWY_ATTR {
            ForVectors([&](int64_t at, int64_t) HWY_ATTR { Store(Load(x + at), wide + at); });
          },
          static_cast<const std::remove_pointer_t<decltype(source)>*>(source + i * from.stride),
          to + i * to_stride);
    }
  });
}

void Directions(float* x, int64_t x_stride, float* momentum, float* second, int64_t moments_stride,
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
        x + i * x_stride, momentum + i * moments_stride, second + i * moments_stride);
  }
}

template <typename Weight>
HWY_INLINE void DescendStripe(Weight* weight, VF keep, const float* source, VF step, int64_t count,
                              uint64_t stripe_key) {
  UnitStore<Weight> store(stripe_key);
  ForUnits(
      count,
      [&](int64_t, Weight* w, const float* x) HWY_ATTR {
        const auto updated = [&](int64_t at) HWY_ATTR {
          return hn::NegMulAdd(Load(x + at), step, hn::Mul(Load(w + at), keep));
        };
        store(updated, w);
      },
      weight, source);
}

void Descent(const MatrixBlock& weight, float keep, const float* x, int64_t x_stride, float step,
             int64_t rows, int64_t columns, uint64_t rounding_key, BlockStripes stripes) {
  WithBlock(weight, [&](auto* w) {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; j += kStripe) {
        const int64_t stripe = stripes.first + i * stripes.per_row + j / kStripe;
        DescendStripe(w + i * weight.stride + j, hn::Set(F32(), keep), x + i * x_stride + j,
                      hn::Set(F32(), step), std::min(kStripe, columns - j),
                      StripeKey(rounding_key, stripe));
      }
    }
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace terrace::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace terrace::kernels {

HWY_EXPORT(WidenBlock);
HWY_EXPORT(Directions);
HWY_EXPORT(Descent);

void Widen(const MatrixBlock& from, int64_t rows, int64_t columns, float* to, int64_t to_stride) {
  HWY_DYNAMIC_DISPATCH(WidenBlock)(from, rows, columns, to, to_stride);
}

void ToAdamDirection(float* x, int64_t x_stride, float* momentum, float* second,
                     int64_t moments_stride, int64_t rows, int64_t columns,
                     const AdamDirection& step) {
  HWY_DYNAMIC_DISPATCH(Directions)
  (x, x_stride, momentum, second, moments_stride, rows, columns, step);
}

void DescendBlock(const MatrixBlock& weight, float keep, const float* x, int64_t x_stride,
                  float step, int64_t rows, int64_t columns, uint64_t rounding_key,
                  BlockStripes stripes) {
  HWY_DYNAMIC_DISPATCH(Descent)
  (weight, keep, x, x_stride, step, rows, columns, rounding_key, stripes);
}

}  // namespace terrace::kernels
#endif  // HWY_ONCE
