#include "support/compare.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "support/reference_backend.h"

namespace terrace {
namespace {

constexpr double kFloatEpsilon = 0x1p-24;  // largest relative error of rounding to float32
constexpr double kBF16Step = 0x1p-7;       // largest relative step between bfloat16 neighbours

testing::AssertionResult SameForm(const TensorView& actual, const TensorView& expected) {
  if (actual.shape == expected.shape && actual.dtype == expected.dtype) {
    return testing::AssertionSuccess();
  }
  return testing::AssertionFailure()
         << actual.name << " is " << NameOf(actual.dtype) << " " << actual.shape.ToString()
         << ", not " << NameOf(expected.dtype) << " " << expected.shape.ToString();
}

// How far beyond the tolerance: at most 1 passes; infinite for what no tolerance covers.
double Excess(double actual, double expected, const Tolerance& tolerance) {
  if (std::isnan(actual) || std::isnan(expected)) {
    return std::isnan(actual) && std::isnan(expected) ? 0.0 : HUGE_VAL;
  }
  if (actual == expected) return 0.0;
  if (std::isinf(actual) || std::isinf(expected)) return HUGE_VAL;
  const double allowed = tolerance.relative * std::abs(expected) + tolerance.absolute;
  return allowed > 0 ? std::abs(actual - expected) / allowed : HUGE_VAL;
}

}  // namespace

Tolerance RoundingOf(DType dtype, double magnitude, int64_t terms) {
  return {.relative = dtype == DType::kBF16 ? kBF16Step : 8 * kFloatEpsilon,
          .absolute = kFloatEpsilon * magnitude * (8 + 2 * std::sqrt(static_cast<double>(terms)))};
}

double MaxAbs(const TensorView& view) {
  double largest = 0;
  for (int64_t i = 0; i < view.size(); ++i) {
    const double value = std::abs(ElementAt(view, i));
    if (std::isfinite(value)) largest = std::max(largest, value);
  }
  return largest;
}

testing::AssertionResult Near(const TensorView& actual, const TensorView& expected,
                              const Tolerance& tolerance) {
  if (const auto form = SameForm(actual, expected); !form) return form;
  double worst = 1;
  int64_t errors = 0;
  int64_t at = -1;
  for (int64_t i = 0; i < actual.size(); ++i) {
    const double excess = Excess(ElementAt(actual, i), ElementAt(expected, i), tolerance);
    if (excess <= 1) continue;
    ++errors;
    if (excess > worst) {
      worst = excess;
      at = i;
    }
  }
  if (errors == 0) return testing::AssertionSuccess();
  return testing::AssertionFailure()
         << actual.name << " " << actual.shape.ToString() << ": " << errors << " of "
         << actual.size() << " elements are off, at " << at << " " << ElementAt(actual, at)
         << " instead of " << ElementAt(expected, at) << ", " << worst << " times the tolerance";
}

testing::AssertionResult SameBytes(const TensorView& actual, const TensorView& expected) {
  if (const auto form = SameForm(actual, expected); !form) return form;
  if (actual.bytes() == 0) return testing::AssertionSuccess();
  const auto [a, b] = std::mismatch(actual.data, actual.data + actual.bytes(), expected.data);
  if (a == actual.data + actual.bytes()) return testing::AssertionSuccess();
  return testing::AssertionFailure()
         << actual.name << " " << actual.shape.ToString() << " differs at element "
         << (a - actual.data) / BytesOf(actual.dtype);
}

}  // namespace terrace
