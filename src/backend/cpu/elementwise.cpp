// Zero, copy, sum of squares.
#include <cstring>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/kernel.h"
#include "core/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/elementwise.cpp"
#include <hwy/foreach_target.h>

#include "backend/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace terrace {
namespace HWY_NAMESPACE {
namespace {

template <typename X, typename Y>
void ConvertOf(const TensorView& x, const TensorView& y, int64_t begin, int64_t end) {
  const X* from = x.as<X>() + begin;
  Y* to = y.as<Y>() + begin;
  ForLanes(end - begin,
           [=](auto d, int64_t i) HWY_ATTR { StoreLanes(LoadLanes(d, from + i), d, to + i); });
}

void ConvertBlock(const TensorView& x, const TensorView& y, int64_t begin, int64_t end) {
  (IsBF16(x) ? ConvertOf<BF16, float> : ConvertOf<float, BF16>)(x, y, begin, end);
}

// Squares are taken and summed in float64: exact for one element, and free of overflow.
template <typename X>
double SumOfSquaresOf(const X* x, int64_t count) {
  const hn::ScalableTag<double> wide;
  const hn::Rebind<float, decltype(wide)> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  auto sum0 = hn::Zero(wide);
  auto sum1 = hn::Zero(wide);
  int64_t i = 0;
  for (; i + 2 * lanes <= count; i += 2 * lanes) {
    const auto x0 = hn::PromoteTo(wide, LoadLanes(d, x + i));
    const auto x1 = hn::PromoteTo(wide, LoadLanes(d, x + i + lanes));
    sum0 = hn::MulAdd(x0, x0, sum0);
    sum1 = hn::MulAdd(x1, x1, sum1);
  }
  double sum = hn::GetLane(hn::SumOfLanes(wide, hn::Add(sum0, sum1)));
  for (; i < count; ++i) {
    const double rest = ToFloat(x[i]);
    sum += rest * rest;
  }
  return sum;
}

double SumOfSquaresBlock(const TensorView& x, int64_t begin, int64_t end) {
  return IsBF16(x) ? SumOfSquaresOf(x.as<BF16>() + begin, end - begin)
                   : SumOfSquaresOf(x.as<float>() + begin, end - begin);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace terrace
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace terrace {

HWY_EXPORT(ConvertBlock);
HWY_EXPORT(SumOfSquaresBlock);

void CpuBackend::Zero(TensorView x) {
  if (dry()) return;
  const int64_t element_bytes = BytesOf(x.dtype);
  ParallelFor(x.size(), kBlockElements, [&](int64_t begin, int64_t end) {
    std::memset(x.data + begin * element_bytes, 0, (end - begin) * element_bytes);
  });
}

void CpuBackend::Copy(TensorView x, TensorView y) {
  CheckSize(y, x.size());
  if (x.dtype != y.dtype) {
    CheckFloat(x);
    CheckFloat(y);
  }
  if (dry()) return;
  const int64_t element_bytes = BytesOf(x.dtype);
  ParallelFor(x.size(), kBlockElements, [&](int64_t begin, int64_t end) {
    if (x.dtype == y.dtype) {
      std::memcpy(y.data + begin * element_bytes, x.data + begin * element_bytes,
                  (end - begin) * element_bytes);
    } else {
      HWY_DYNAMIC_DISPATCH(ConvertBlock)(x, y, begin, end);
    }
  });
}

double CpuBackend::SumOfSquares(TensorView x) {
  CheckFloat(x);
  const Arena::Frame frame(arena());
  const int64_t blocks = (x.size() + kBlockElements - 1) / kBlockElements;
  double* const sums = AllocateDoubles(arena(), blocks, "SumOfSquares.sums");
  if (dry()) return 0;
  ParallelFor(x.size(), kBlockElements, [&](int64_t begin, int64_t end) {
    sums[begin / kBlockElements] = HWY_DYNAMIC_DISPATCH(SumOfSquaresBlock)(x, begin, end);
  });
  double total = 0;
  for (int64_t block = 0; block < blocks; ++block) total += sums[block];
  return total;
}

}  // namespace terrace
#endif  // HWY_ONCE
