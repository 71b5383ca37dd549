#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "core/stochastic_rounding.h"
#include "optim/rule_testing.h"

namespace terrace {
namespace {

using kernels::RoundingBits;
using kernels::RoundStochastically;
using kernels::StripeKey;

TEST(StochasticRoundingTest, ExpectationIsTheFloatExactly) {
  for (float value : {1.0f, 1.001f, -3.14159f, 1e-20f, -65537.0f, 0.0f}) {
    double sum = 0;
    for (uint32_t random = 0; random < 65536; ++random) {
      sum += ToFloat(RoundStochastically(value, random));
    }
    EXPECT_DOUBLE_EQ(sum / 65536, value);
  }
}

TEST(StochasticRoundingTest, KeepsInfinityAndNan) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (uint32_t random : {0u, 1u, 65535u}) {
    EXPECT_EQ(ToFloat(RoundStochastically(infinity, random)), infinity);
    EXPECT_EQ(ToFloat(RoundStochastically(-infinity, random)), -infinity);
    for (uint32_t bits : {0x7fffffffu, 0xffffffffu, 0x7f800001u}) {
      EXPECT_TRUE(std::isnan(ToFloat(RoundStochastically(std::bit_cast<float>(bits), random))));
    }
  }
}

// Draws along the directions in which a weak generator would repeat itself: neighbours within a
// stripe, stripes, steps, tensors.
std::vector<uint32_t> DrawsAlong(int direction, int64_t count) {
  std::vector<uint32_t> draws(count);
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t rounding_key = MixKeys(1, direction == 3 ? i : 5, direction == 2 ? i : 7);
    const uint64_t key = StripeKey(rounding_key, direction == 1 ? i : direction == 0 ? i >> 14 : 3);
    draws[i] = RoundingBits(key, direction == 0 ? i & 16383 : 11);
  }
  return draws;
}

TEST(StochasticRoundingTest, BitsAreUniformAndUncorrelated) {
  constexpr int64_t kCount = 1 << 20;
  for (int direction = 0; direction < 4; ++direction) {
    SCOPED_TRACE(direction);
    const std::vector<uint32_t> draws = DrawsAlong(direction, kCount);
    // Mean of a uniform variable on [0, 65535].
    double sum = 0;
    for (uint32_t draw : draws) sum += draw;
    EXPECT_NEAR(sum / kCount, 32767.5, 3 * 65536 / std::sqrt(12.0 * kCount));
    // 256 equally likely cells of the upper 8 bits, and of the lower: chi-squared of 255 degrees.
    for (int shift : {0, 8}) {
      std::vector<int64_t> cells(256);
      for (uint32_t draw : draws) ++cells[draw >> shift & 255];
      double chi = 0;
      for (int64_t cell : cells) chi += std::pow(cell - kCount / 256.0, 2) / (kCount / 256.0);
      EXPECT_NEAR(chi, 255, 4 * std::sqrt(2 * 255.0));
    }
    // Correlation at lags up to the two halves of a word.
    for (int64_t lag : {1, 2, 16, 32, 64, 8192}) {
      double products = 0;
      for (int64_t i = 0; i + lag < kCount; ++i) {
        products += (draws[i] - 32767.5) * (draws[i + lag] - 32767.5);
      }
      const double variance = 65536.0 * 65536.0 / 12;
      EXPECT_LT(std::abs(products / variance), 4 * std::sqrt(1.0 * kCount)) << "lag " << lag;
    }
  }
}

RuleSettings Exact() {
  return {.momentum = "none", .second_moment = SecondMoment::kExact, .rms_clip = 0};
}

// One step of a constant update from 1: the mean of the rounded weights is the float32 result.
TEST(StochasticRoundingTest, UpdatesAreUnbiased) {
  constexpr int64_t kSize = 200000;
  for (float step_size : {1e-5f, 3e-4f, 2.5e-3f, 1e-2f}) {
    RuleBench exact("skewadam", Exact(), {kSize});
    RuleBench rounded("skewadam", Exact(), {kSize}, DType::kBF16);
    for (RuleBench* bench : {&exact, &rounded}) {
      Fill(bench->weight(), std::vector<float>(kSize, 1));
      Fill(bench->gradient(), std::vector<float>(kSize, 0.5f));
      bench->context().learning_rate = step_size;
      bench->Step();
    }
    const double expected = ValuesOf(exact.weight())[0];
    double sum = 0, squares = 0;
    for (float w : ValuesOf(rounded.weight())) {
      sum += w - expected;
      squares += (w - expected) * (w - expected);
    }
    ASSERT_GT(squares, 0) << "nothing was rounded: the case tests nothing";
    EXPECT_LT(std::abs(sum), 3 * std::sqrt(squares)) << step_size;
  }
}

// A decay of 1.5e-5 a step is far below the half ulp (2^-9) that rounding to nearest would drop.
TEST(StochasticRoundingTest, SmallDecayShrinksWeights) {
  constexpr int64_t kSize = 8192;
  constexpr int kSteps = 2000;
  RuleSettings settings = Exact();
  settings.weight_decay = 0.05f;
  RuleBench bench("skewadam", settings, {kSize}, DType::kBF16);
  Fill(bench.weight(), std::vector<float>(kSize, 1));
  Fill(bench.gradient(), std::vector<float>(kSize, 0));
  bench.context().learning_rate = 3e-4f;
  for (int step = 0; step < kSteps; ++step) bench.Step();
  double sum = 0, squares = 0;
  for (float w : ValuesOf(bench.weight())) {
    sum += w;
    squares += double{w} * w;
  }
  const double mean = sum / kSize;
  const double error = std::sqrt((squares / kSize - mean * mean) / kSize);
  EXPECT_NEAR(mean, std::pow(1 - 1.5e-5, kSteps), 3 * error);
  EXPECT_LT(mean, 1 - 20 * error);
}

// A momentum of bfloat16 that forgets slowly moves by less than half an ulp a step: rounding to
// nearest would stop it at 2^-2 or so. Its mean follows the float32 one.
TEST(StochasticRoundingTest, MomentumIsUnbiased) {
  constexpr int kSteps = 2000;
  for (const Shape& shape : {Shape{64, 128}, Shape{8192}}) {  // factored, exact
    RuleBench bench("skewadam", {.beta1 = 0.999, .momentum = "bf16"}, shape);
    Fill(bench.weight(), std::vector<float>(shape.size(), 1));
    Fill(bench.gradient(), std::vector<float>(shape.size(), 1));
    ASSERT_EQ(bench.state()[0].dtype, DType::kBF16);
    for (int step = 0; step < kSteps; ++step) bench.Step();
    const std::vector<float> momentum = ValuesOf(bench.state()[0]);
    const double size = static_cast<double>(shape.size());
    double sum = 0, squares = 0;
    for (float m : momentum) {
      sum += m;
      squares += double{m} * m;
    }
    const double mean = sum / size;
    const double error = std::sqrt((squares / size - mean * mean) / size);
    ASSERT_GT(error, 0) << "nothing was rounded: the case tests nothing";
    EXPECT_NEAR(mean, 1 - std::pow(0.999, kSteps), 3 * error);
  }
}

// Equal values get different bits as weights and as momentum.
TEST(StochasticRoundingTest, MomentumHasBitsOfItsOwn) {
  constexpr int64_t kSize = 4096;
  const uint64_t key = MixKeys(1, 5, 7);
  int64_t equal = 0;
  for (int64_t i = 0; i < kSize; ++i) {
    equal += RoundingBits(StripeKey(key, 3), i) ==
             RoundingBits(StripeKey(kernels::MomentumKey(key), 3), i);
  }
  EXPECT_LT(equal, 4);  // 1/16 are expected
}

}  // namespace
}  // namespace terrace
