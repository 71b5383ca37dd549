// What the optimizer's SIMD kernels share; compiled once for each instruction set.
//
// Kernels process units of kUnit elements. A unit that is cut short by the end of a row is copied
// into a zero-padded buffer and back, so that the arithmetic exists only once. Sums keep one
// accumulator for each of kHalfUnit lanes whatever the vector width and are reduced in one fixed
// order: all instruction sets with fused multiply-add give the same bits.

#if defined(TERRACE_OPTIM_KERNELS_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TERRACE_OPTIM_KERNELS_SIMD_INL_H_
#undef TERRACE_OPTIM_KERNELS_SIMD_INL_H_
#else
#define TERRACE_OPTIM_KERNELS_SIMD_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/dtype.h"
#include "optim/kernels/stochastic_rounding.h"

HWY_BEFORE_NAMESPACE();
namespace terrace::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::CappedTag<float, 16>;
using U32 = hn::Rebind<uint32_t, F32>;
using U16 = hn::Rebind<uint16_t, F32>;
using VF = hn::VFromD<F32>;
using VU = hn::VFromD<U32>;

inline constexpr int64_t kLanes = hn::MaxLanes(F32());
inline constexpr int64_t kVectors = kHalfUnit / kLanes;  // in half a unit

HWY_INLINE VF Load(const float* from) { return hn::LoadU(F32(), from); }
HWY_INLINE VF Load(const BF16* from) {
  const auto half = hn::LoadU(U16(), reinterpret_cast<const uint16_t*>(from));
  return hn::BitCast(F32(), hn::ShiftLeft<16>(hn::PromoteTo(U32(), half)));
}

HWY_INLINE void Store(VF value, float* to) { hn::StoreU(value, F32(), to); }

// Random bits for the two halves of a unit; float32 weights need none.
template <typename Weight>
struct Rounding {
  explicit Rounding(uint64_t) {}
  HWY_INLINE void Draw(int64_t) {}
  HWY_INLINE void StoreLow(VF value, float* to) const { Store(value, to); }
  HWY_INLINE void StoreHigh(VF value, float* to) const { Store(value, to); }
};

template <>
struct Rounding<BF16> {
  explicit Rounding(uint64_t stripe_key)
      : low_key(hn::Set(U32(), static_cast<uint32_t>(stripe_key))),
        high_key(hn::Set(U32(), static_cast<uint32_t>(stripe_key >> 32))) {}

  // For elements offset + [0, kLanes) and kHalfUnit behind them, offset within the stripe and in
  // the lower half of its unit.
  HWY_INLINE void Draw(int64_t offset) {
    const int64_t counter = offset / kUnit * kHalfUnit + offset % kUnit;
    VU x = hn::Add(hn::Iota(U32(), static_cast<uint32_t>(counter)), low_key);
    x = hn::Mul(hn::Xor(x, hn::ShiftRight<16>(x)), hn::Set(U32(), 0x7feb352du));
    x = hn::Xor(hn::Xor(x, high_key), hn::ShiftRight<15>(x));
    x = hn::Mul(x, hn::Set(U32(), 0x846ca68bu));
    words = hn::Xor(x, hn::ShiftRight<16>(x));
  }
  HWY_INLINE void StoreLow(VF value, BF16* to) const {
    StoreRounded(value, hn::And(words, hn::Set(U32(), 0xffffu)), to);
  }
  HWY_INLINE void StoreHigh(VF value, BF16* to) const {
    StoreRounded(value, hn::ShiftRight<16>(words), to);
  }

 private:
  static HWY_INLINE void StoreRounded(VF value, VU random16, BF16* to) {
    const VU bits = hn::BitCast(U32(), value);
    const VU quiet = hn::Or(bits, hn::Set(U32(), 0x400000u));
    const auto nan = hn::RebindMask(U32(), hn::IsNaN(value));
    const VU sum = hn::IfThenElse(nan, quiet, hn::Add(bits, random16));
    hn::StoreU(hn::TruncateTo(U16(), hn::ShiftRight<16>(sum)), U16(),
               reinterpret_cast<uint16_t*>(to));
  }

  VU low_key;
  VU high_key;
  VU words;
};

// Lane accumulators of one sum.
struct Accumulator {
  VF lanes[kVectors];

  HWY_INLINE Accumulator() {
    for (VF& lane : lanes) lane = hn::Zero(F32());
  }
  HWY_INLINE float Sum() const {
    HWY_ALIGN float values[kHalfUnit];
    for (int64_t v = 0; v < kVectors; ++v) hn::Store(lanes[v], F32(), values + v * kLanes);
    for (int64_t width = kHalfUnit / 2; width >= 1; width /= 2) {
      for (int64_t i = 0; i < width; ++i) values[i] += values[i + width];
    }
    return values[0];
  }
};

// A unit that the end of its row cuts short, with zeros behind it.
template <typename T>
struct Padded {
  HWY_INLINE Padded(const T* from, int64_t count) {
    std::memset(elements, 0, sizeof(elements));
    std::memcpy(elements, from, count * sizeof(T));
  }
  HWY_INLINE void CopyTo(T* to, int64_t count) const {
    std::memcpy(to, elements, count * sizeof(T));
  }
  HWY_INLINE void CopyTo(const T*, int64_t) const {}  // was only read
  HWY_ALIGN T elements[kUnit];
};

// Calls unit(offset, pointers...) for each unit of arrays of `count` elements, with the pointers
// at that offset, or at padded copies in the last unit.
template <typename Unit, typename... T>
HWY_INLINE void ForUnits(int64_t count, const Unit& unit, T*... arrays) {
  int64_t at = 0;
  for (; at + kUnit <= count; at += kUnit) unit(at, (arrays + at)...);
  if (const int64_t rest = count - at; rest > 0) {
    [&](Padded<std::remove_const_t<T>>... padded) HWY_ATTR {
      unit(at, static_cast<T*>(padded.elements)...);
      (padded.CopyTo(arrays + at, rest), ...);
    }(Padded<std::remove_const_t<T>>(arrays + at, rest)...);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace terrace::kernels
HWY_AFTER_NAMESPACE();

#endif  // TERRACE_OPTIM_KERNELS_SIMD_INL_H_
