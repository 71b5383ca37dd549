#include "backend/cpu/sum_of_squares.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "backend/cpu/kernel.h"
#include "core/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/sum_of_squares.cpp"
#include <hwy/foreach_target.h>

#include "backend/cpu/units-inl.h"

HWY_BEFORE_NAMESPACE();
namespace terrace::kernels {
namespace HWY_NAMESPACE {
namespace {

using HalfF32 = hn::Half<F32>;
using F64 = hn::Rebind<double, HalfF32>;
inline constexpr int64_t kWideLanes = hn::MaxLanes(F64());
inline constexpr int64_t kWideVectors = kHalfUnit / kWideLanes;

HWY_INLINE hn::VFromD<F64> LoadWide(const float* from) {
  return hn::PromoteTo(F64(), hn::LoadU(HalfF32(), from));
}
HWY_INLINE hn::VFromD<F64> LoadWide(const BF16* from) {
  const hn::Rebind<uint16_t, F64> half;
  const hn::Rebind<uint32_t, F64> word;
  const auto bits = hn::PromoteTo(word, hn::LoadU(half, reinterpret_cast<const uint16_t*>(from)));
  return hn::PromoteTo(F64(), hn::BitCast(HalfF32(), hn::ShiftLeft<16>(bits)));
}

// With one accumulator for each of kHalfUnit lanes, as all sums over units.
template <typename X>
HWY_INLINE double SumOf(const X* all, int64_t count) {
  hn::VFromD<F64> sums[kWideVectors];
  for (auto& sum : sums) sum = hn::Zero(F64());
  ForUnits(
      count,
      [&](int64_t, const X* x) HWY_ATTR {
        for (int64_t half = 0; half < kUnit; half += kHalfUnit) {
          for (int64_t v = 0; v < kWideVectors; ++v) {
            const auto value = LoadWide(x + half + v * kWideLanes);
            sums[v] = hn::MulAdd(value, value, sums[v]);
          }
        }
      },
      all);
  for (int64_t half = kWideVectors / 2; half >= 1; half /= 2) {
    for (int64_t v = 0; v < half; ++v) sums[v] = hn::Add(sums[v], sums[v + half]);
  }
  HWY_ALIGN double lanes[kWideLanes];
  hn::Store(sums[0], F64(), lanes);
  for (int64_t half = kWideLanes / 2; half >= 1; half /= 2) {
    for (int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

double SquareSum(const TensorView& x, int64_t begin, int64_t end) {
  return IsBF16(x) ? SumOf(x.as<BF16>() + begin, end - begin)
                   : SumOf(x.as<float>() + begin, end - begin);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace terrace::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace terrace {
namespace kernels {
HWY_EXPORT(SquareSum);
}  // namespace kernels

double SumOfSquares(TensorView x) {
  CheckFloat(x);
  std::vector<double> sums((x.size() + kBlockElements - 1) / kBlockElements);
  ParallelFor(x.size(), kBlockElements, [&](int64_t begin, int64_t end) {
    using namespace kernels;  // NOLINT: of the dispatch table
    sums[begin / kBlockElements] = HWY_DYNAMIC_DISPATCH(SquareSum)(x, begin, end);
  });
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

}  // namespace terrace
#endif  // HWY_ONCE
