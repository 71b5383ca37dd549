// The checker of the kernel tests must itself refuse what is wrong.
#include "support/compare.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace terrace {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

TensorView ViewOf(std::vector<float>& values) {
  return {reinterpret_cast<std::byte*>(values.data()),
          DType::kF32,
          {static_cast<int64_t>(values.size())},
          "values"};
}

bool Passes(float actual, float expected, Tolerance tolerance) {
  std::vector<float> a = {1.0f, actual, 2.0f};
  std::vector<float> b = {1.0f, expected, 2.0f};
  const bool near = static_cast<bool>(Near(ViewOf(a), ViewOf(b), tolerance));
  // Which of the two is off by a sign or a NaN must not matter.
  EXPECT_EQ(near, static_cast<bool>(Near(ViewOf(b), ViewOf(a), tolerance)));
  return near;
}

TEST(CompareTest, AcceptsWhatIsWithinTheTolerance) {
  EXPECT_TRUE(Passes(5.0f, 5.0f, {}));
  EXPECT_TRUE(Passes(5.01f, 5.0f, {.relative = 0.01}));
  EXPECT_TRUE(Passes(-5.01f, -5.0f, {.absolute = 0.02}));
  EXPECT_TRUE(Passes(0.0f, -0.0f, {}));
  EXPECT_TRUE(Passes(kNan, kNan, {}));
  EXPECT_TRUE(Passes(-kInfinity, -kInfinity, {}));
}

TEST(CompareTest, RefusesWrongValuesOfBothSigns) {
  constexpr Tolerance kTolerance{.relative = 0.01, .absolute = 0.01};
  EXPECT_FALSE(Passes(5.2f, 5.0f, kTolerance));
  EXPECT_FALSE(Passes(-5.2f, -5.0f, kTolerance));
  EXPECT_FALSE(Passes(-5.0f, 5.0f, kTolerance));
  EXPECT_FALSE(Passes(-50.0f, -5.0f, kTolerance));
  EXPECT_FALSE(Passes(0.0f, 5.0f, kTolerance));
  EXPECT_FALSE(Passes(0.0f, -5.0f, kTolerance));
  EXPECT_FALSE(Passes(0.02f, 0.0f, kTolerance));
}

TEST(CompareTest, RefusesNanAndInfinityWhateverTheTolerance) {
  constexpr Tolerance kTolerance{.relative = 1e30, .absolute = 1e30};
  EXPECT_FALSE(Passes(kNan, 5.0f, kTolerance));
  EXPECT_FALSE(Passes(kNan, 0.0f, kTolerance));
  EXPECT_FALSE(Passes(kNan, kInfinity, kTolerance));
  EXPECT_FALSE(Passes(kInfinity, 5.0f, kTolerance));
  EXPECT_FALSE(Passes(kInfinity, -kInfinity, kTolerance));
}

TEST(CompareTest, NamesTheWorstElement) {
  std::vector<float> a = {1.0f, 2.1f, -3.0f, 4.0f};
  std::vector<float> b = {1.0f, 2.0f, 3.0f, 4.0f};
  const std::string message = Near(ViewOf(a), ViewOf(b), {.absolute = 0.01}).message();
  EXPECT_NE(message.find("2 of 4 elements are off, at 2 -3 instead of 3"), std::string::npos)
      << message;
}

TEST(CompareTest, RefusesOtherShapesAndDtypes) {
  std::vector<float> a = {1.0f, 2.0f};
  std::vector<float> b = {1.0f, 2.0f, 3.0f};
  EXPECT_FALSE(Near(ViewOf(a), ViewOf(b), {}));
  TensorView integers = ViewOf(a);
  integers.dtype = DType::kI32;
  EXPECT_FALSE(Near(ViewOf(a), integers, {}));
  EXPECT_FALSE(SameBytes(ViewOf(a), integers));
}

TEST(CompareTest, SameBytesTellsSignsOfZeroApart) {
  std::vector<float> a = {1.0f, 0.0f};
  std::vector<float> b = {1.0f, -0.0f};
  EXPECT_TRUE(SameBytes(ViewOf(a), ViewOf(a)));
  EXPECT_FALSE(SameBytes(ViewOf(a), ViewOf(b)));
}

TEST(CompareTest, RoundingCoversOneStepOfItsType) {
  // 1 and its bfloat16 successor differ by 2^-7; two steps are too many.
  EXPECT_TRUE(Passes(1.0f + 0x1p-7f, 1.0f, RoundingOf(DType::kBF16, 0)));
  EXPECT_FALSE(Passes(1.0f + 0x1p-6f, 1.0f, RoundingOf(DType::kBF16, 0)));
  EXPECT_TRUE(Passes(1.0f + 0x1p-23f, 1.0f, RoundingOf(DType::kF32, 0)));
  EXPECT_FALSE(Passes(1.0f + 0x1p-20f, 1.0f, RoundingOf(DType::kF32, 0)));
}

}  // namespace
}  // namespace terrace
