// Zero, copy, sum of squares.
#include <cstring>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/kernel.h"
#include "backend/cpu/sum_of_squares.h"
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

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace terrace
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace terrace {

HWY_EXPORT(ConvertBlock);

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
  return dry() ? 0 : terrace::SumOfSquares(x);
}

}  // namespace terrace
#endif  // HWY_ONCE
