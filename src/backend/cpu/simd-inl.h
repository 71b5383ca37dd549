// What the vector kernels share: loops over rows of any length, and float32 or bfloat16 memory
// seen as float32 lanes. Compiled once for each instruction set, hence the unusual guard.
//
// A kernel is a template over element types, reached through a table of its instances and one
// exported function for each operation: Highway dispatches functions, not templates.
#if defined(TERRACE_BACKEND_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TERRACE_BACKEND_CPU_SIMD_INL_H_
#undef TERRACE_BACKEND_CPU_SIMD_INL_H_
#else
#define TERRACE_BACKEND_CPU_SIMD_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>

#include "core/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace terrace {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using FullTag = hn::ScalableTag<float>;
using FullVec = hn::Vec<FullTag>;
using OneTag = hn::CappedTag<float, 1>;

// Unaligned loads and stores of Lanes(d) elements.
template <class D>
HWY_INLINE hn::Vec<D> LoadLanes(D d, const float* from) {
  return hn::LoadU(d, from);
}

template <class D>
HWY_INLINE hn::Vec<D> LoadLanes(D d, const BF16* from) {
  const hn::Rebind<uint16_t, D> half;
  const hn::Rebind<uint32_t, D> word;
  const auto bits = hn::PromoteTo(word, hn::LoadU(half, reinterpret_cast<const uint16_t*>(from)));
  return hn::BitCast(d, hn::ShiftLeft<16>(bits));
}

template <class D>
HWY_INLINE void StoreLanes(hn::Vec<D> value, D d, float* to) {
  hn::StoreU(value, d, to);
}

// Rounds as ToBF16 does: to nearest, ties to even, NaN kept.
template <class D>
HWY_INLINE void StoreLanes(hn::Vec<D> value, D /*d*/, BF16* to) {
  const hn::Rebind<uint16_t, D> half;
  const hn::Rebind<uint32_t, D> word;
  const hn::Rebind<int32_t, D> signed_word;  // DemoteTo takes no unsigned words
  const auto bits = hn::BitCast(word, value);
  const auto upper = hn::ShiftRight<16>(bits);
  const auto odd = hn::And(upper, hn::Set(word, 1u));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(word, 0x7fffu))));
  const auto quiet = hn::Or(upper, hn::Set(word, 0x40u));
  const auto result = hn::IfThenElse(hn::RebindMask(word, hn::IsNaN(value)), quiet, rounded);
  hn::StoreU(hn::DemoteTo(half, hn::BitCast(signed_word, result)), half,
             reinterpret_cast<uint16_t*>(to));
}

// e^x to a relative error of 1e-7, for x from -87 to 88 (of NaN it makes a number: the low bits of
// x become an exponent). Half the instructions of the vector library's Exp, which must also serve
// arguments whose results are denormal.
template <class D>
HWY_INLINE hn::Vec<D> ExpInRange(D d, hn::Vec<D> x) {
  const hn::Rebind<uint32_t, D> word;
  // x = n log(2) + rest. Adding 1.5 * 2^23 rounds to an integer, and leaves n in the low bits.
  const auto shift = hn::Set(d, 12582912.0f);
  const auto shifted = hn::MulAdd(x, hn::Set(d, 1.44269504f), shift);
  const auto n = hn::Sub(shifted, shift);
  // log(2) in two parts, of which n times the first is exact.
  const auto rest =
      hn::NegMulAdd(n, hn::Set(d, 1.42860677e-6f), hn::NegMulAdd(n, hn::Set(d, 0.693145752f), x));
  // Minimax polynomial on [-log(2) / 2, log(2) / 2]; relative error 3e-9.
  auto p = hn::Set(d, 0.0013814467f);
  p = hn::MulAdd(p, rest, hn::Set(d, 0.008368781f));
  p = hn::MulAdd(p, rest, hn::Set(d, 0.041668393f));
  p = hn::MulAdd(p, rest, hn::Set(d, 0.1666652f));
  p = hn::MulAdd(p, rest, hn::Set(d, 0.49999994f));
  p = hn::MulAdd(p, rest, hn::Set(d, 1.0f));
  p = hn::MulAdd(p, rest, hn::Set(d, 1.0f));
  const auto power = hn::ShiftLeft<23>(hn::BitCast(word, shifted));
  return hn::BitCast(d, hn::Add(hn::BitCast(word, p), power));
}

// The same for any x <= 88, with the result at -87 for what is below; every NaN stays NaN, whatever
// its payload: a model that has diverged must show in its loss.
template <class D>
HWY_INLINE hn::Vec<D> ExpLanes(D d, hn::Vec<D> x) {
  // Max may take either operand where one is NaN.
  const auto power = ExpInRange(d, hn::Max(x, hn::Set(d, -87.0f)));
  return hn::IfThenElse(hn::IsNaN(x), x, power);
}

// For any x <= 88 and no NaN; 0 below -87.
template <class D>
HWY_INLINE hn::Vec<D> ExpOrZeroLanes(D d, hn::Vec<D> x) {
  const auto lowest = hn::Set(d, -87.0f);
  return hn::IfThenElseZero(hn::Ge(x, lowest), ExpInRange(d, hn::Max(x, lowest)));
}

// Calls body(tag, i) for full vectors, then for what remains lane by lane. The body is a generic
// lambda marked HWY_ATTR.
template <class Body>
HWY_INLINE void ForLanes(int64_t count, const Body& body) {
  const FullTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) body(d, i);
  for (; i < count; ++i) body(OneTag(), i);
}

// A float32 sum whose terms come from ForLanes.
class LaneSum {
 public:
  HWY_INLINE LaneSum() : lanes_(hn::Zero(FullTag())) {}

  template <class D>
  HWY_INLINE void Add(D /*d*/, hn::Vec<D> value) {
    if constexpr (hn::MaxLanes(D()) == 1) {
      rest_ += hn::GetLane(value);
    } else {
      lanes_ = hn::Add(lanes_, value);
    }
  }
  HWY_INLINE float Total() const { return hn::GetLane(hn::SumOfLanes(FullTag(), lanes_)) + rest_; }

 private:
  FullVec lanes_;
  float rest_ = 0;
};

}  // namespace HWY_NAMESPACE
}  // namespace terrace
HWY_AFTER_NAMESPACE();

#endif  // TERRACE_BACKEND_CPU_SIMD_INL_H_
