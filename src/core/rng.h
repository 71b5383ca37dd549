// Counter-based random numbers: a value depends on (key, counter) alone, never on the order or
// the thread in which it is drawn.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

namespace terrace {

// A bijection of 64-bit words in which every input bit reaches every output bit
// (the finaliser of splitmix64: Steele, Lea, Flood, OOPSLA 2014).
constexpr uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// A key for a purpose: MixKeys(seed, purpose, step). The order of words matters.
template <typename... Words>
constexpr uint64_t MixKeys(uint64_t first, Words... rest) {
  uint64_t key = Mix(first + 0x9e3779b97f4a7c15u);
  ((key = Mix(key ^ (static_cast<uint64_t>(rest) + 0x9e3779b97f4a7c15u))), ...);
  return key;
}

constexpr uint64_t RandomBits(uint64_t key, uint64_t counter) {
  return Mix(key + Mix(counter + 0x9e3779b97f4a7c15u));
}

// In (0, 1): never 0, so that its logarithm is finite.
constexpr double RandomUniform(uint64_t key, uint64_t counter) {
  return (static_cast<double>(RandomBits(key, counter) >> 12) + 0.5) * 0x1p-52;
}

// N(0, 1), by Box and Muller from two draws of counters 2 * counter and 2 * counter + 1.
inline float RandomNormal(uint64_t key, uint64_t counter) {
  const double radius = std::sqrt(-2.0 * std::log(RandomUniform(key, 2 * counter)));
  const double angle = 2.0 * std::numbers::pi * RandomUniform(key, 2 * counter + 1);
  return static_cast<float>(radius * std::cos(angle));
}

}  // namespace terrace
