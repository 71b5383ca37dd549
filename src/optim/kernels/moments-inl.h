// What kernels share that move an average of gradients by element; compiled once for each
// instruction set.

#if defined(TERRACE_OPTIM_KERNELS_MOMENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TERRACE_OPTIM_KERNELS_MOMENTS_INL_H_
#undef TERRACE_OPTIM_KERNELS_MOMENTS_INL_H_
#else
#define TERRACE_OPTIM_KERNELS_MOMENTS_INL_H_
#endif

#include <algorithm>

#include "backend/cpu/units-inl.h"

HWY_BEFORE_NAMESPACE();
namespace terrace::kernels {
namespace HWY_NAMESPACE {

// Calls stripe(first, count, number) for the stripes of [begin, end).
template <typename Stripe>
HWY_INLINE void ForStripes(int64_t begin, int64_t end, const Stripe& stripe) {
  for (int64_t first = begin; first < end; first += kStripe) {
    stripe(first, std::min(kStripe, end - first), first / kStripe);
  }
}

// An average that forgets: beta * old + (1 - beta) * x.
struct Decay {
  explicit HWY_INLINE Decay(double beta)
      : keep(hn::Set(F32(), static_cast<float>(beta))),
        gain(hn::Set(F32(), static_cast<float>(1 - beta))) {}
  HWY_INLINE VF operator()(VF old, VF x) const { return hn::MulAdd(keep, old, hn::Mul(gain, x)); }
  VF keep;
  VF gain;
};

}  // namespace HWY_NAMESPACE
}  // namespace terrace::kernels
HWY_AFTER_NAMESPACE();

#endif  // TERRACE_OPTIM_KERNELS_MOMENTS_INL_H_
