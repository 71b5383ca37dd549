// block_quantization.h for SIMD kernels; compiled once for each instruction set.

#if defined(TERRACE_OPTIM_KERNELS_BLOCK_CODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TERRACE_OPTIM_KERNELS_BLOCK_CODE_INL_H_
#undef TERRACE_OPTIM_KERNELS_BLOCK_CODE_INL_H_
#else
#define TERRACE_OPTIM_KERNELS_BLOCK_CODE_INL_H_
#endif

#include <algorithm>

#include "backend/cpu/units-inl.h"
#include "optim/kernels/block_quantization.h"

HWY_BEFORE_NAMESPACE();
namespace terrace::kernels {
namespace HWY_NAMESPACE {

using U8 = hn::Rebind<uint8_t, F32>;
using S8 = hn::Rebind<int8_t, F32>;
using S32 = hn::Rebind<int32_t, F32>;

// What codes stand for, in units of their block's scale.
template <Code kCode>
HWY_INLINE VF DequantizeVector(const uint8_t* codes) {
  using F = CodeFormat<kCode>;
  const VU unit = hn::Set(U32(), F::kUnitBits);
  const VF subtracted = hn::Set(F32(), F::kUnit);
  if constexpr (F::kSign == 0) {
    const VU code = hn::PromoteTo(U32(), hn::LoadU(U8(), codes));
    const VU bits = hn::Or(hn::ShiftLeft<F::kDropped>(code), unit);
    return hn::Sub(hn::BitCast(F32(), bits), subtracted);
  } else {
    // Promoted as a signed number, a code has its sign where float32 has it.
    const auto promoted =
        hn::PromoteTo(S32(), hn::LoadU(S8(), reinterpret_cast<const int8_t*>(codes)));
    const VU code = hn::BitCast(U32(), promoted);
    const VU magnitude = hn::Set(U32(), (F::kSign - 1) << F::kDropped);
    const VU bits = hn::OrAnd(unit, hn::ShiftLeft<F::kDropped>(code), magnitude);
    const VF value = hn::Sub(hn::BitCast(F32(), bits), subtracted);
    return hn::CopySignToAbs(value, hn::BitCast(F32(), code));
  }
}

// An element in a code: what is loaded is in units of its block's scale, too.
struct SignedCode {
  uint8_t code;
};
HWY_INLINE VF Load(const SignedCode* from) { return DequantizeVector<Code::kSigned>(&from->code); }

template <Code kCode>
HWY_INLINE void QuantizeVector(VF value, VF inverse, VU random16, uint8_t* codes) {
  using F = CodeFormat<kCode>;
  // The product is exact: with fused multiply-add or without, the sum is the same.
  const VF z = hn::MulAdd(hn::Abs(value), inverse, hn::Set(F32(), F::kUnit));
  const VU random =
      hn::Add(hn::ShiftLeft<F::kDropped - 16>(random16), hn::Set(U32(), 8 - F::kUnitBits));
  VU code = hn::ShiftRight<F::kDropped>(hn::Add(hn::BitCast(U32(), z), random));
  if constexpr (kCode == Code::kUnsigned) {
    code = hn::Max(code, hn::Set(U32(), 1));
  } else {
    const VU sign = hn::ShiftRight<24>(hn::BitCast(U32(), value));
    code = hn::Or(code, hn::And(sign, hn::Set(U32(), F::kSign)));
  }
  hn::StoreU(hn::TruncateTo(U8(), code), U8(), codes);
}

// The bits of the largest magnitude; NaN is larger than all numbers.
struct LargestBits {
  HWY_INLINE LargestBits() : lanes(hn::Zero(U32())) {}
  HWY_INLINE void Add(VF value) { AddPositive(hn::Abs(value)); }
  // Not negative, or NaN of any sign.
  HWY_INLINE void AddPositive(VF value) { lanes = hn::Max(lanes, hn::BitCast(U32(), value)); }
  HWY_INLINE uint32_t Largest() const { return hn::GetLane(hn::MaxOfLanes(U32(), lanes)); }
  VU lanes;
};

// Codes the units of a block in order, given its largest magnitude. The block begins with that unit
// of its stripe.
template <Code kCode>
struct UnitQuantizer {
  HWY_INLINE UnitQuantizer(const LargestBits& largest, uint64_t stripe_key, int64_t first_unit)
      : scale(ScaleOf(largest.Largest())),
        inverse(hn::Set(F32(), InverseScale(scale))),
        bits(stripe_key, first_unit) {}

  HWY_INLINE void operator()(const float* values, uint8_t* codes) {
    for (int64_t at = 0; at < kHalfUnit; at += kLanes) {
      const UnitBits::Pair random = bits.Draw();
      QuantizeVector<kCode>(Load(values + at), inverse, random.low, codes + at);
      QuantizeVector<kCode>(Load(values + at + kHalfUnit), inverse, random.high,
                            codes + at + kHalfUnit);
    }
  }

  // The scale. A block without one has codes of 0.
  HWY_INLINE float Finish(int64_t units, uint8_t* codes) const {
    if (!(scale > 0)) std::fill_n(codes, units * kUnit, uint8_t{0});
    return scale;
  }

  float scale;
  VF inverse;
  UnitBits bits;
};

// The same for the first `units` units of a block; returns the scale.
template <Code kCode>
HWY_INLINE float QuantizeUnits(const float* values, const LargestBits& largest, int64_t units,
                               uint64_t stripe_key, int64_t first_unit, uint8_t* codes) {
  UnitQuantizer<kCode> encode(largest, stripe_key, first_unit);
  for (int64_t at = 0; at < units * kUnit; at += kUnit) encode(values + at, codes + at);
  return encode.Finish(units, codes);
}

// Calls block(first, units, pointers...) for each block of arrays of `count` elements, with the
// pointers at its first element, or at zero-padded copies in a block that is no multiple of a unit.
template <typename Block, typename... T>
HWY_INLINE void ForQuantizedBlocks(int64_t count, const Block& block, T*... arrays) {
  for (int64_t at = 0; at < count; at += kQuantizationBlock) {
    const int64_t length = count - at < kQuantizationBlock ? count - at : kQuantizationBlock;
    if (length % kUnit == 0) {
      block(at, length / kUnit, (arrays + at)...);
    } else {
      [&](Padded<std::remove_const_t<T>, kQuantizationBlock>... padded) HWY_ATTR {
        block(at, length / kUnit + 1, static_cast<T*>(padded.elements)...);
        (padded.CopyTo(arrays + at, length), ...);
      }(Padded<std::remove_const_t<T>, kQuantizationBlock>(arrays + at, length)...);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace terrace::kernels
HWY_AFTER_NAMESPACE();

#endif  // TERRACE_OPTIM_KERNELS_BLOCK_CODE_INL_H_
