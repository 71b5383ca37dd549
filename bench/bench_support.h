// What benchmarks share: a clock, this machine's memory bandwidth, and the line that a figure is.
#pragma once

#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "core/arena.h"
#include "core/parallel.h"
#include "core/rng.h"

namespace terrace {

// Seconds that f() takes.
template <typename F>
double SecondsOf(const F& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

inline double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<int64_t>(values.size()) / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// The yardstick of memory-bound work: a = a * x + b over float32 arrays much larger than any
// cache, on all threads, in memory as the engine has it (huge pages). Run it right beside what it
// measures: shared machines vary by the second.
class PlainLoop {
 public:
  static constexpr int64_t kSize = int64_t{1} << 25;

  PlainLoop() {
    for (float* array : {a_, x_, b_}) {
      ParallelFor(kSize, kSize / MaxThreads(),
                  [&](int64_t begin, int64_t end) { std::fill(array + begin, array + end, 0.5f); });
    }
  }

  // Bytes per second with arrays x and b: reads a, x, b, writes a.
  double WithArrays() {
    const double seconds = SecondsOf([&] {
      ParallelFor(kSize, kGrain, [&](int64_t begin, int64_t end) {
#pragma omp simd
        for (int64_t i = begin; i < end; ++i) a_[i] = a_[i] * x_[i] + b_[i];
      });
    });
    return 4 * sizeof(float) * kSize / seconds;
  }

  // The same with scalars x and b: reads a, writes a. Memory that reads and writes at the same
  // time reaches more when both are balanced.
  double WithScalars(float x = 0.5f, float b = 0.5f) {
    const double seconds = SecondsOf([&] {
      ParallelFor(kSize, kGrain, [&](int64_t begin, int64_t end) {
#pragma omp simd
        for (int64_t i = begin; i < end; ++i) a_[i] = a_[i] * x + b;
      });
    });
    return 2 * sizeof(float) * kSize / seconds;
  }

 private:
  static constexpr int64_t kGrain = int64_t{1} << 18;  // so that no thread waits for another

  float* Allocate() {
    return arena_.Allocate(Memory::kScratch, DType::kF32, {kSize}, "array").as<float>();
  }

  Arena arena_{3 * (kSize + 64) * static_cast<int64_t>(sizeof(float))};
  float* a_ = Allocate();
  float* x_ = Allocate();
  float* b_ = Allocate();
};

// Weights or gradients, float32 or bfloat16: uniform within 1e-3 of 0.
inline void FillRandom(TensorView view, uint64_t key) {
  ParallelFor(view.size(), 1 << 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float value = 1e-3f * (static_cast<float>(RandomBits(key, i) >> 40) * 0x1p-23f - 1);
      if (view.dtype == DType::kBF16) {
        view.as<BF16>()[i] = ToBF16(value);
      } else {
        view.as<float>()[i] = value;
      }
    }
  });
}

// Prints {"name", "value", "unit", "bar", "conditions"}; a figure without a bar has null there.
// Returns whether the bar is met.
inline bool PrintFigure(const std::string& name, double value, const std::string& unit,
                        std::optional<double> bar, const std::string& conditions) {
  nlohmann::ordered_json line;
  line["name"] = name;
  line["value"] = std::stod(fmt::format("{:.4g}", value));
  line["unit"] = unit;
  line["bar"] = bar ? nlohmann::ordered_json(*bar) : nlohmann::ordered_json();
  line["conditions"] = conditions;
  std::puts(line.dump().c_str());
  std::fflush(stdout);
  return !bar || value >= *bar;
}

}  // namespace terrace
