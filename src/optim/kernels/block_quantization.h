// Block-wise 8-bit storage of float32, defined here element by element; the SIMD kernels compute
// exactly this, whatever their vector width.
//
// Values are stored as codes, one byte each, relative to the scale of their block:
// kQuantizationBlock consecutive values, fewer at the end of a row. A code stands for c * scale,
//   c = (2^e (1 + m / 8) - 1) * unit,   m of 3 bits,
//   kSigned    a sign, e of 4 bits, unit 2^-15: for momentum
//   kUnsigned  e of 5 bits, unit 2^-31:         for second moments
// close to a floating-point number far above the unit, and to a fixed-point one below it: 0 is a
// code like any other, and coding needs no cases. Neighbours around x are at most (|x| + unit) / 8
// apart; the smallest code is an eighth of the unit.
//
// The scale is the power of two that puts the largest magnitude within (0.9375, 1.875] of it, less
// 2^-15: scaling is exact, and a value that comes from a code is stored as it is while the scale
// stays. A block whose largest magnitude is below 2^-126 is stored as zeros. A block with a NaN or
// an infinity, or beyond 1.87 * 2^126, gets NaN as its scale, and all of it is NaN from then on:
// what is wrong stays visible.
//
// Codes are rounded stochastically, with the 16 bits of the project's generator
// (stochastic_rounding.h): the expectation is the value, to within 2^-16 of the distance between
// neighbours. With rounding to nearest, a second moment of beta2 = 0.999, which moves by less than
// half that distance, would never move. Second moments alone are never rounded to 0 but to the
// smallest code, unless the whole block is 0: a momentum over the root of a second moment that was
// rounded away would be an update without bound.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "core/stochastic_rounding.h"
#include "core/tensor.h"

namespace terrace::kernels {

inline constexpr int64_t kQuantizationBlock = 256;  // elements

enum class Code : uint8_t { kSigned, kUnsigned };

template <Code kCode>
struct CodeFormat {
  static constexpr int kExponents = kCode == Code::kSigned ? 16 : 32;
  static constexpr int kMantissaBits = 3;
  static constexpr int kDropped = 23 - kMantissaBits;  // mantissa bits of a float32
  static constexpr uint32_t kSign = kCode == Code::kSigned ? 128 : 0;
  // c + unit is a float32 whose upper bits are the code, but for the unit's own bits.
  static constexpr uint32_t kUnitBits = static_cast<uint32_t>(128 - kExponents) << 23;
  static constexpr float kUnit = std::bit_cast<float>(kUnitBits);
};

// The scale of a block from the largest magnitude's bits (those of NaN are larger than all others).
constexpr float ScaleOf(uint32_t largest_bits) {
  constexpr uint32_t kInfinity = 0x7f800000u, kLargest = 0x7e800000u;  // 2^126
  constexpr uint32_t kRest = 0x1000ffu;                                // from 1.875 - 2^-15 on to 2
  const uint32_t bits = (std::min(largest_bits, kInfinity) + kRest) & kInfinity;
  return bits > kLargest ? std::numeric_limits<float>::quiet_NaN() : std::bit_cast<float>(bits);
}

// The inverse of a scale; 0 for 0 and NaN, so that all codes are 0.
constexpr float InverseScale(float scale) {
  return scale > 0 ? std::bit_cast<float>((254u << 23) - std::bit_cast<uint32_t>(scale)) : 0;
}

template <Code kCode>
constexpr uint8_t Quantize(float value, float scale, uint32_t random16) {
  using F = CodeFormat<kCode>;
  if (!(scale > 0)) return 0;
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const float z = std::bit_cast<float>(bits & 0x7fffffffu) * InverseScale(scale) + F::kUnit;
  // 8: the middle of the values that 16 random bits stand for.
  const uint32_t random = (random16 << (F::kDropped - 16)) + 8;
  const uint32_t code = (std::bit_cast<uint32_t>(z) - F::kUnitBits + random) >> F::kDropped;
  if constexpr (kCode == Code::kUnsigned) return static_cast<uint8_t>(std::max(code, 1u));
  return static_cast<uint8_t>(code | (bits >> 24 & F::kSign));
}

template <Code kCode>
constexpr float Dequantize(uint8_t code, float scale) {
  using F = CodeFormat<kCode>;
  const uint32_t magnitude = code & ~F::kSign & 0xffu;
  const float z = std::bit_cast<float>((magnitude << F::kDropped) + F::kUnitBits);
  const float value = (z - F::kUnit) * scale;
  return code & F::kSign ? -value : value;
}

// Values as they are stored: float32, bfloat16, or codes (kU8) with the scales of their blocks.
struct Stored {
  Stored(TensorView stored, TensorView scales_of_blocks = {})  // NOLINT: a view is stored values
      : values(stored), scales(scales_of_blocks) {}

  TensorView values;
  TensorView scales;  // float32, of QuantizationScales(values.shape); empty but for codes
};

// How long the rows are in which blocks lie: those of a matrix; a vector is one row, and more
// dimensions are a matrix of as many rows as the first.
constexpr int64_t CodeRow(const Shape& shape) {
  if (shape.rank() < 2) return shape.size();
  return shape[0] > 0 ? shape.size() / shape[0] : 0;
}
constexpr int64_t CodeBlocks(int64_t elements) {
  return (elements + kQuantizationBlock - 1) / kQuantizationBlock;
}
// One scale a block: [rows, blocks of a row], or [blocks] of a vector.
constexpr Shape QuantizationScales(const Shape& shape) {
  if (shape.rank() < 2) return {CodeBlocks(shape.size())};
  return {shape[0], CodeBlocks(CodeRow(shape))};
}

// How many elements of a tensor a thread moves at a time, where it takes them in order: whole
// stripes, and of codes whole rows.
inline int64_t GrainOf(const Stored& x) {
  constexpr int64_t kGrain = 4 * kStripe;
  if (x.values.dtype != DType::kU8 || x.values.shape.rank() < 2) return kGrain;
  const int64_t row = std::max(int64_t{1}, CodeRow(x.values.shape));
  return std::max(int64_t{1}, kGrain / row) * row;
}

}  // namespace terrace::kernels
