// Element types of tensors, and bfloat16.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

namespace terrace {

enum class DType : uint8_t { kF32, kBF16, kI32, kI64, kU8 };

constexpr int64_t BytesOf(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBF16:
      return 2;
    case DType::kI64:
      return 8;
    case DType::kU8:
      return 1;
  }
  return 0;
}

// The name used in configurations, errors and tables: "f32", "bf16", "i32", "i64", "u8".
constexpr std::string_view NameOf(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "f32";
    case DType::kBF16:
      return "bf16";
    case DType::kI32:
      return "i32";
    case DType::kI64:
      return "i64";
    case DType::kU8:
      return "u8";
  }
  return "?";
}

// bfloat16 storage: the upper half of a float32.
struct BF16 {
  uint16_t bits;
};
static_assert(sizeof(BF16) == 2);

constexpr float ToFloat(BF16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}
constexpr float ToFloat(float value) { return value; }

// Rounds to nearest, ties to even; NaN stays NaN (quiet).
constexpr BF16 ToBF16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

// The DType of a C++ element type.
template <typename T>
inline constexpr DType kDTypeOf = DType::kF32;
template <>
inline constexpr DType kDTypeOf<BF16> = DType::kBF16;
template <>
inline constexpr DType kDTypeOf<int32_t> = DType::kI32;
template <>
inline constexpr DType kDTypeOf<int64_t> = DType::kI64;
template <>
inline constexpr DType kDTypeOf<uint8_t> = DType::kU8;

}  // namespace terrace
