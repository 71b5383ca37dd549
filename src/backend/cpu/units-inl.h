// What kernels share whose results are the same bits on all instruction sets, and those that round
// to bfloat16 stochastically: those of the optimizer, and sums of gradients. Compiled once for each
// instruction set.
//
// Kernels process units of kUnit elements. A unit that is cut short by the end of a row is copied
// into a zero-padded buffer and back, so that the arithmetic exists only once. Sums keep one
// accumulator for each of kHalfUnit lanes whatever the vector width and are reduced in one fixed
// order: all instruction sets with fused multiply-add give the same bits.

#if defined(TERRACE_BACKEND_CPU_UNITS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TERRACE_BACKEND_CPU_UNITS_INL_H_
#undef TERRACE_BACKEND_CPU_UNITS_INL_H_
#else
#define TERRACE_BACKEND_CPU_UNITS_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/dtype.h"
#include "core/stochastic_rounding.h"

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

// The random bits of stochastic_rounding.h for the units of a stripe in order, from `first_unit`
// on. A draw is for the vectors at an offset in the first half of a unit and in its second half.
struct UnitBits {
  struct Pair {
    VU low;  // the halves of HashWord
    VU high;
  };

  explicit HWY_INLINE UnitBits(uint64_t stripe_key, int64_t first_unit = 0)
      : counter(hn::Add(hn::Set(U32(), static_cast<uint32_t>(stripe_key)),
                        hn::Mul(hn::Iota(U32(), static_cast<uint32_t>(first_unit * kHalfUnit)),
                                hn::Set(U32(), kCounterStep)))),
        key(hn::Set(U32(), static_cast<uint32_t>(stripe_key >> 32))) {}

  // The counter is a running sum.
  HWY_INLINE Pair Draw() {
    const VU mixed = hn::Xor(hn::Xor(counter, key), hn::ShiftRight<15>(counter));
    counter = hn::Add(counter, hn::Set(U32(), static_cast<uint32_t>(kLanes) * kCounterStep));
    const VU product = hn::Mul(mixed, hn::Set(U32(), kMultiplier));
    const VU high = hn::ShiftRight<16>(product);
    return {hn::And(hn::Xor(product, high), hn::Set(U32(), 0xffffu)), high};
  }

  VU counter;
  VU key;
};

// Stores the units of one stripe of weights or momentum in order, from `first_unit` on: float32 as
// they are, bfloat16 rounded as stochastic_rounding.h defines it.
template <typename Weight>
struct UnitStore {
  explicit HWY_INLINE UnitStore(uint64_t, int64_t /*first_unit*/ = 0) {}

  // updated(at) gives the new values of elements at + [0, kLanes) of the next unit.
  template <typename Updated>
  HWY_INLINE void operator()(const Updated& updated, float* unit) {
    for (int64_t at = 0; at < kUnit; at += kLanes) Store(updated(at), unit + at);
  }
};

template <>
struct UnitStore<BF16> {
  explicit HWY_INLINE UnitStore(uint64_t stripe_key, int64_t first_unit = 0)
      : bits(stripe_key, first_unit) {}

  template <typename Updated>
  HWY_INLINE void operator()(const Updated& updated, BF16* unit) {
    for (int64_t at = 0; at < kHalfUnit; at += 2 * kLanes) {
      const int64_t high = at + kHalfUnit;
      const UnitBits::Pair bits0 = bits.Draw();
      const UnitBits::Pair bits1 = bits.Draw();
      StorePair(Rounded(updated(at), bits0.low), Rounded(updated(at + kLanes), bits1.low),
                unit + at);
      StorePair(Rounded(updated(high), bits0.high), Rounded(updated(high + kLanes), bits1.high),
                unit + high);
    }
  }

 private:
  // The bfloat16 is in the upper halves. NaN that arithmetic yields is quiet: cutting keeps it.
  static HWY_INLINE VU Rounded(VF value, VU random16) {
    const VU bits = hn::BitCast(U32(), value);
    const auto number = hn::RebindMask(U32(), hn::Eq(value, value));
    return hn::IfThenElse(number, hn::Add(bits, random16), bits);
  }

  static HWY_INLINE void StorePair(VU first_half, VU second_half, BF16* to) {
    auto* words = reinterpret_cast<uint16_t*>(to);
#if HWY_TARGET == HWY_SCALAR
    words[0] = static_cast<uint16_t>(hn::GetLane(first_half) >> 16);
    words[1] = static_cast<uint16_t>(hn::GetLane(second_half) >> 16);
#else
    const hn::Repartition<uint16_t, F32> d;
    const auto odd = hn::ConcatOdd(d, hn::BitCast(d, second_half), hn::BitCast(d, first_half));
    hn::StoreU(odd, d, words);
#endif
  }

  UnitBits bits;
};

// Sum of kCount values, `stride` apart: neighbours at distance kCount / 2 first, then half of that.
template <int64_t kCount>
HWY_INLINE float SumTree(const float* values, int64_t stride = 1) {
  if constexpr (kCount == 1) {
    return values[0];
  } else {
    return SumTree<kCount / 2>(values, 2 * stride) +
           SumTree<kCount / 2>(values + stride, 2 * stride);
  }
}

// Lane accumulators of one sum.
struct Accumulator {
  VF lanes[kVectors];

  HWY_INLINE Accumulator() {
    for (VF& lane : lanes) lane = hn::Zero(F32());
  }
  // The SumTree of all lanes. May be called once.
  HWY_INLINE float Sum() {
    for (int64_t half = kVectors / 2; half >= 1; half /= 2) {
      for (int64_t v = 0; v < half; ++v) lanes[v] = hn::Add(lanes[v], lanes[v + half]);
    }
    HWY_ALIGN float values[kLanes];
    hn::Store(lanes[0], F32(), values);
    return SumTree<kLanes>(values);
  }
};

// A unit, or another number of elements, that the end of its row cuts short, with zeros behind it.
template <typename T, int64_t kLength = kUnit>
struct Padded {
  HWY_INLINE Padded(const T* from, int64_t count) {
    std::memset(elements, 0, sizeof(elements));
    std::memcpy(elements, from, count * sizeof(T));
  }
  HWY_INLINE void CopyTo(T* to, int64_t count) const {
    std::memcpy(to, elements, count * sizeof(T));
  }
  HWY_INLINE void CopyTo(const T*, int64_t) const {}  // was only read
  HWY_ALIGN T elements[kLength];
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

// to[columns] (+)= from[columns], rounded stochastically: columns [first, first + columns) of row
// `row` of a matrix of `width` columns, each row in stripes of its own. `first` is a multiple of
// kUnit.
HWY_INLINE void RoundRow(const float* from, int64_t first, int64_t columns, int64_t width,
                         int64_t row, bool add, uint64_t rounding_key, BF16* to) {
  const int64_t stripes = (width + kStripe - 1) / kStripe;
  for (int64_t j = first; j < first + columns;) {
    const int64_t count = std::min(first + columns, (j / kStripe + 1) * kStripe) - j;
    UnitStore<BF16> store(StripeKey(rounding_key, row * stripes + j / kStripe),
                          j % kStripe / kUnit);
    ForUnits(
        count,
        [&](int64_t, const float* x, BF16* sum) HWY_ATTR {
          const auto added = [&](int64_t at)
                                 HWY_ATTR { return hn::Add(Load(sum + at), Load(x + at)); };
          const auto replaced = [&](int64_t at) HWY_ATTR { return Load(x + at); };
          if (add) {
            store(added, sum);
          } else {
            store(replaced, sum);
          }
        },
        from + (j - first), to + (j - first));
    j += count;
  }
}

// How many zeros pad the last unit of `count` elements; they count as floored, for example.
HWY_INLINE int64_t PaddingOf(int64_t count) { return (kUnit - count % kUnit) % kUnit; }

// Calls vector(at, v) for the vectors of a unit: their offset, and their lanes of an Accumulator.
template <typename Vector>
HWY_INLINE void ForVectors(const Vector& vector) {
  for (int64_t half = 0; half < kUnit; half += kHalfUnit) {
    for (int64_t v = 0; v < kVectors; ++v) vector(half + v * kLanes, v);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace terrace::kernels
HWY_AFTER_NAMESPACE();

#endif  // TERRACE_BACKEND_CPU_UNITS_INL_H_
