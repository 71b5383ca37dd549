// What benchmarks share: a clock, this machine's memory bandwidth, and the line that a figure is.
#pragma once

#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "core/parallel.h"

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
// cache, on all threads. Run it right beside what it measures: shared machines vary by the
// second.
class PlainLoop {
 public:
  static constexpr int64_t kSize = int64_t{1} << 25;
  static constexpr int64_t kBytes = kSize * 4 * 4;  // reads a, x, b, writes a

  PlainLoop() {
    ParallelFor(kSize, kSize / MaxThreads(), [&](int64_t begin, int64_t end) {
      std::fill(a_.get() + begin, a_.get() + end, 1.0f);
      std::fill(x_.get() + begin, x_.get() + end, 0.5f);
      std::fill(b_.get() + begin, b_.get() + end, 0.5f);
    });
  }

  double BytesPerSecond() {
    float* a = a_.get();
    const float* x = x_.get();
    const float* b = b_.get();
    const double seconds = SecondsOf([&] {
#pragma omp parallel for simd schedule(static)
      for (int64_t i = 0; i < kSize; ++i) a[i] = a[i] * x[i] + b[i];
    });
    return kBytes / seconds;
  }

 private:
  std::unique_ptr<float[]> a_ = std::make_unique_for_overwrite<float[]>(kSize);
  std::unique_ptr<float[]> x_ = std::make_unique_for_overwrite<float[]>(kSize);
  std::unique_ptr<float[]> b_ = std::make_unique_for_overwrite<float[]>(kSize);
};

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
