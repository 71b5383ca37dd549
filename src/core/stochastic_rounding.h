// Stochastic rounding of float32 to bfloat16, defined here element by element; the SIMD kernels
// compute exactly this, whatever their vector width.
//
// A float32 lies between two neighbouring bfloat16 values. Adding a uniform 16-bit number to its
// lower half before cutting that half off picks the upper neighbour with a probability equal to
// the distance from the lower one: the expectation is the float32 itself.
//
// The random numbers are counter-based. A tensor is cut into stripes of consecutive elements, at
// most kStripe long and never longer than a row; (rounding key, stripe number) gives a 64-bit
// stripe key by the project's generator (core/rng.h), once a stripe. Within a stripe a 32-bit
// integer hash of the position, keyed with both halves of the stripe key, yields two 16-bit
// numbers: one for each of two elements kHalfUnit apart.
#pragma once

#include <bit>
#include <cstdint>

#include "core/dtype.h"
#include "core/rng.h"

namespace terrace::kernels {

inline constexpr int64_t kStripe = 16384;  // elements
inline constexpr int64_t kUnit = 64;       // elements that are processed together
inline constexpr int64_t kHalfUnit = kUnit / 2;

constexpr uint64_t StripeKey(uint64_t rounding_key, int64_t stripe) {
  return RandomBits(rounding_key, static_cast<uint64_t>(stripe));
}

// The rounding key of a tensor's momentum, from that of its weights: the two are rounded apart.
constexpr uint64_t MomentumKey(uint64_t rounding_key) {
  return MixKeys(rounding_key, 0x6d6f6d656e74756d);
}
// Likewise of its second moment.
constexpr uint64_t SecondMomentKey(uint64_t rounding_key) {
  return MixKeys(rounding_key, 0x7365636f6e646d6f);
}

// One multiplicative round on a Weyl sequence: stripe keys are mixed thoroughly already, within a
// stripe it suffices to be uniform and uncorrelated. One half of the key offsets the sequence,
// the other enters before the multiplication.
inline constexpr uint32_t kCounterStep = 0x9e3779b9u;  // 2^32 / golden ratio
inline constexpr uint32_t kMultiplier = 0x846ca68bu;

constexpr uint32_t HashWord(uint64_t stripe_key, uint32_t counter) {
  uint32_t x = counter * kCounterStep + static_cast<uint32_t>(stripe_key);
  x = (x ^ (x >> 15) ^ static_cast<uint32_t>(stripe_key >> 32)) * kMultiplier;
  return x ^ (x >> 16);
}

// The 16 random bits of element `offset` of a stripe.
constexpr uint32_t RoundingBits(uint64_t stripe_key, int64_t offset) {
  const int64_t lane = offset % kUnit;
  const uint32_t counter = static_cast<uint32_t>(offset / kUnit * kHalfUnit + lane % kHalfUnit);
  const uint32_t word = HashWord(stripe_key, counter);
  return lane < kHalfUnit ? word & 0xffffu : word >> 16;
}

// NaN stays NaN (quiet), infinities stay.
constexpr BF16 RoundStochastically(float value, uint32_t random16) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + random16) >> 16)};
}

}  // namespace terrace::kernels
