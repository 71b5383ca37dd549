#include "model/initialize.h"

#include <cmath>
#include <numbers>

#include "core/parallel.h"
#include "core/rng.h"

namespace terrace {
namespace {

constexpr uint64_t kPurpose = 0x696e6974;  // keeps these keys apart from other uses of a seed
constexpr int64_t kGrain = int64_t{1} << 15;

// In (0, 1), 24 bits: the tails end at 5.9 deviations.
float Uniform(uint64_t bits) { return (static_cast<float>(bits >> 40) + 0.5f) * 0x1p-24f; }

float RoundedTo(float, float value) { return value; }
BF16 RoundedTo(BF16, float value) { return ToBF16(value); }

// Elements 2p and 2p + 1 are the two normal numbers that Box and Muller's method makes of draws
// 2p and 2p + 1. In float32, since billions of them are wanted.
template <typename T>
void FillNormal(T* values, int64_t count, float stddev, uint64_t key) {
  ParallelFor((count + 1) / 2, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t pair = begin; pair < end; ++pair) {
      const float radius = stddev * std::sqrt(-2.0f * std::log(Uniform(RandomBits(key, 2 * pair))));
      const float angle = 2.0f * std::numbers::pi_v<float> * Uniform(RandomBits(key, 2 * pair + 1));
      values[2 * pair] = RoundedTo(T{}, radius * std::cos(angle));
      if (2 * pair + 1 < count) values[2 * pair + 1] = RoundedTo(T{}, radius * std::sin(angle));
    }
  });
}

template <typename T>
void Fill(const Parameter& parameter, uint64_t seed) {
  const std::span<T> values = parameter.value.span<T>();
  if (parameter.init_std != 0) {
    FillNormal(values.data(), std::ssize(values), parameter.init_std,
               MixKeys(seed, kPurpose, parameter.id));
  } else {
    std::fill(values.begin(), values.end(), RoundedTo(T{}, parameter.init_constant));
  }
}

}  // namespace

void InitializeParameter(const Parameter& parameter, uint64_t seed) {
  if (parameter.value.dtype == DType::kBF16) {
    Fill<BF16>(parameter, seed);
  } else {
    Fill<float>(parameter, seed);
  }
}

}  // namespace terrace
