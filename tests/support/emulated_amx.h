// AMX and the AVX-512 instructions that its products use, in plain C++: one function for each
// instruction, after Intel's description of it. See backend/cpu/amx_products-inl.h. None is
// inlined: unrolled loops of them would take the compiler minutes.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "core/dtype.h"
#include "core/error.h"

namespace terrace {

struct EmulatedAmx {
  // 64 bytes.
  struct Vec {
    std::array<uint16_t, 32> lanes;
  };

  struct Tile {
    std::array<std::array<uint32_t, 16>, 16> words;
  };

  // Fresh tiles hold NaNs, and without a session there are none.
  class Session {
   public:
    Session() {
      TERRACE_CHECK(!configured, "a session within a session");
      configured = true;
      for (Tile& tile : tiles) {
        for (auto& row : tile.words) row.fill(0x7fc00000u);
      }
    }
    ~Session() { configured = false; }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

  template <int kTile>
  [[gnu::noinline]] static void Zero() {
    TileOf(kTile) = {};
  }
  template <int kTile>
  [[gnu::noinline]] static void Load(const std::byte* from, int64_t stride) {
    for (int64_t row = 0; row < 16; ++row) {
      std::memcpy(TileOf(kTile).words[static_cast<size_t>(row)].data(), from + row * stride, 64);
    }
  }
  template <int kTile>
  [[gnu::noinline]] static void Store(std::byte* to, int64_t stride) {
    for (int64_t row = 0; row < 16; ++row) {
      std::memcpy(to + row * stride, TileOf(kTile).words[static_cast<size_t>(row)].data(), 64);
    }
  }

  // Two sums of 16 products, of the even and of the odd positions, from 0; then their sum is added.
  // A product of two bfloat16 is exact in float32, so that a fused one differs in subnormals only.
  template <int kSum, int kLeft, int kRight>
  [[gnu::noinline]] static void Multiply() {
    Tile& sum = TileOf(kSum);
    const Tile& left = TileOf(kLeft);
    const Tile& right = TileOf(kRight);
    for (size_t row = 0; row < 16; ++row) {
      std::array<float, 16> even{}, odd{};
      for (size_t pair = 0; pair < 16; ++pair) {
        const uint32_t factors = left.words[row][pair];
        const float even_factor = Low(factors), odd_factor = High(factors);
        for (size_t column = 0; column < 16; ++column) {
          even[column] = Flush(even[column] + even_factor * Low(right.words[pair][column]));
          odd[column] = Flush(odd[column] + odd_factor * High(right.words[pair][column]));
        }
      }
      for (size_t column = 0; column < 16; ++column) {
        const float before = Flush(std::bit_cast<float>(sum.words[row][column]));
        const float both = Flush(even[column] + odd[column]);
        sum.words[row][column] = std::bit_cast<uint32_t>(Flush(before + both));
      }
    }
  }

  static Vec ZeroVec() { return {}; }
  static Vec Load(const std::byte* from) { return LoadPart(from, 32); }
  [[gnu::noinline]] static Vec LoadPart(const std::byte* from, int64_t count) {
    Vec value{};
    std::memcpy(value.lanes.data(), from, static_cast<size_t>(count) * 2);
    return value;
  }
  static void StoreVec(std::byte* to, Vec value) { StorePart(to, value, 32); }
  [[gnu::noinline]] static void StorePart(std::byte* to, Vec value, int64_t count) {
    std::memcpy(to, value.lanes.data(), static_cast<size_t>(count) * 2);
  }
  static void Stream(std::byte* to, Vec value) {
    TERRACE_CHECK(reinterpret_cast<uintptr_t>(to) % 64 == 0, "an unaligned streaming store");
    StoreVec(to, value);
  }
  static void Fence() {}

  [[gnu::noinline]] static Vec UnpackLow16(Vec a, Vec b) { return Unpack<uint16_t>(a, b, 0); }
  [[gnu::noinline]] static Vec UnpackHigh16(Vec a, Vec b) { return Unpack<uint16_t>(a, b, 1); }
  [[gnu::noinline]] static Vec UnpackLow32(Vec a, Vec b) { return Unpack<uint32_t>(a, b, 0); }
  [[gnu::noinline]] static Vec UnpackHigh32(Vec a, Vec b) { return Unpack<uint32_t>(a, b, 1); }
  [[gnu::noinline]] static Vec UnpackLow64(Vec a, Vec b) { return Unpack<uint64_t>(a, b, 0); }
  [[gnu::noinline]] static Vec UnpackHigh64(Vec a, Vec b) { return Unpack<uint64_t>(a, b, 1); }
  [[gnu::noinline]] static Vec EvenBlocks(Vec a, Vec b) { return Blocks(a, b, 0); }
  [[gnu::noinline]] static Vec OddBlocks(Vec a, Vec b) { return Blocks(a, b, 1); }
  [[gnu::noinline]] static Vec ZipHalves16(Vec a) { return ZipHalves<uint16_t>(a); }
  [[gnu::noinline]] static Vec ZipHalves64(Vec a) { return ZipHalves<uint64_t>(a); }

  [[gnu::noinline]] static Vec RoundToBF16(Vec low, Vec high) {
    Vec result;
    for (size_t i = 0; i < 16; ++i) {
      result.lanes[i] = ToBF16(Flush(LanesOf<float>(low)[i])).bits;
      result.lanes[16 + i] = ToBF16(Flush(LanesOf<float>(high)[i])).bits;
    }
    return result;
  }
  [[gnu::noinline]] static Vec Add32(Vec a, Vec b) {
    auto sums = LanesOf<float>(a);
    for (size_t i = 0; i < 16; ++i) sums[i] += LanesOf<float>(b)[i];
    return std::bit_cast<Vec>(sums);
  }

 private:
  static inline thread_local bool configured = false;
  static inline thread_local std::array<Tile, 8> tiles;

  static Tile& TileOf(int tile) {
    TERRACE_CHECK(configured, "tiles outside a session");
    return tiles[static_cast<size_t>(tile)];
  }

  static float Flush(float value) {
    return std::abs(value) < std::numeric_limits<float>::min() ? std::copysign(0.0f, value) : value;
  }
  static float Low(uint32_t word) { return Flush(std::bit_cast<float>(word << 16)); }
  static float High(uint32_t word) { return Flush(std::bit_cast<float>(word & 0xffff0000u)); }

  template <typename T>
  static std::array<T, 64 / sizeof(T)> LanesOf(Vec value) {
    return std::bit_cast<std::array<T, 64 / sizeof(T)>>(value);
  }

  // In each block of 128 bits: the lanes of one half of a's and b's block by turns.
  template <typename T>
  static Vec Unpack(Vec a, Vec b, size_t half) {
    constexpr size_t kLanes = 16 / sizeof(T);
    const auto from_a = LanesOf<T>(a), from_b = LanesOf<T>(b);
    std::array<T, 64 / sizeof(T)> result;
    for (size_t block = 0; block < 4; ++block) {
      for (size_t i = 0; i < kLanes / 2; ++i) {
        const size_t from = block * kLanes + half * kLanes / 2 + i;
        result[block * kLanes + 2 * i] = from_a[from];
        result[block * kLanes + 2 * i + 1] = from_b[from];
      }
    }
    return std::bit_cast<Vec>(result);
  }

  static Vec Blocks(Vec a, Vec b, size_t odd) {
    Vec result;
    for (size_t i = 0; i < 8; ++i) {
      result.lanes[i] = a.lanes[8 * odd + i];
      result.lanes[8 + i] = a.lanes[8 * (2 + odd) + i];
      result.lanes[16 + i] = b.lanes[8 * odd + i];
      result.lanes[24 + i] = b.lanes[8 * (2 + odd) + i];
    }
    return result;
  }

  template <typename T>
  static Vec ZipHalves(Vec a) {
    constexpr size_t kHalf = 32 / sizeof(T);
    const auto from = LanesOf<T>(a);
    std::array<T, 2 * kHalf> result;
    for (size_t i = 0; i < kHalf; ++i) {
      result[2 * i] = from[i];
      result[2 * i + 1] = from[kHalf + i];
    }
    return std::bit_cast<Vec>(result);
  }
};

}  // namespace terrace
