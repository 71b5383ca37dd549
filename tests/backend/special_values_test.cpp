// Approximations of exp on all kinds of float32: every exponent, NaN of every payload, infinities.
#include <gmock/gmock.h>

#include <bit>
#include <cmath>
#include <limits>

#include "backend/cpu/softmax.h"
#include "support/kernel_fixture.h"

namespace terrace {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Each exponent of either sign with these in the mantissa: ends, single bits, and what lies
// between.
std::vector<uint32_t> Mantissas() {
  std::vector<uint32_t> mantissas = {0, 0x7fffff, 0x3fffff, 0x2aaaaa, 0x555555, 0x7f0000, 0x00ffff};
  for (int bit = 0; bit < 23; ++bit) mantissas.push_back(1u << bit);
  for (uint64_t i = 0; i < 34; ++i) {
    mantissas.push_back(static_cast<uint32_t>(RandomBits(1, i)) & 0x7fffffu);
  }
  return mantissas;
}

std::vector<float> FloatsOfEveryExponent() {
  std::vector<float> values;
  for (const uint32_t mantissa : Mantissas()) {
    for (uint32_t upper = 0; upper < 512; ++upper) {
      values.push_back(std::bit_cast<float>(upper << 23 | mantissa));
    }
  }
  return values;
}

// Quiet and signalling, of either sign.
std::vector<float> Nans() {
  std::vector<float> nans;
  for (const float value : FloatsOfEveryExponent()) {
    if (std::isnan(value)) nans.push_back(value);
  }
  return nans;
}

class SpecialValuesTest : public KernelTest {};
INSTANTIATE_KERNEL_TEST(SpecialValuesTest);

// In every lane of full vectors, and in what remains behind them.
TEST_P(SpecialValuesTest, NanInLogitsShowsInTheLossAndItsGradient) {
  const std::vector<float> nans = Nans();
  ASSERT_GT(nans.size(), 100u);
  constexpr int64_t kWidth = 37;
  for (const DType dtype : kFloatTypes) {
    const TensorView gradient = New(dtype, {kWidth}, "gradient");
    for (size_t n = 0; n < nans.size(); ++n) {
      std::vector<float> logits(kWidth);
      for (size_t i = 0; i < kWidth; ++i) logits[i] = static_cast<float>(i % 5) - 2;
      logits[n % kWidth] = nans[n];
      const float loss =
          CrossEntropyRow(logits.data(), kWidth, 11, 1, gradient.data, gradient.dtype);
      EXPECT_TRUE(std::isnan(loss)) << std::bit_cast<uint32_t>(nans[n]);
      for (int64_t i = 0; i < kWidth; ++i) {
        ASSERT_TRUE(std::isnan(ElementAt(gradient, i))) << std::bit_cast<uint32_t>(nans[n]);
      }
    }
  }
}

TEST_P(SpecialValuesTest, NanInScoresShowsInProbabilitiesAndGradients) {
  const std::vector<float> nans = Nans();
  constexpr int64_t kKeys = 21;
  for (const DType dtype : kFloatTypes) {
    const ScoreBlock block{1, 1, kKeys, kKeys, kKeys, 0.5f, dtype};
    for (size_t n = 0; n < nans.size(); ++n) {
      SCOPED_TRACE(std::bit_cast<uint32_t>(nans[n]));
      std::vector<float> scores(kKeys, 1.0f), probabilities, gradients(kKeys, 1.0f);
      scores[n % kKeys] = nans[n];
      probabilities = scores;
      float log_sum = 0;
      SoftmaxScores(block, probabilities.data(), &log_sum);
      EXPECT_TRUE(std::isnan(log_sum));
      const float delta = 0;
      SoftmaxScoresBackward(block, scores.data(), gradients.data(), &log_sum, &delta);
      for (const std::vector<float>* row : {&probabilities, &scores, &gradients}) {
        const TensorView view{
            reinterpret_cast<std::byte*>(const_cast<float*>(row->data())), dtype, {kKeys}, "row"};
        for (int64_t i = 0; i < kKeys; ++i) ASSERT_TRUE(std::isnan(ElementAt(view, i)));
      }
    }
  }
}

// exp(x) / (1 + exp(x)) from two logits.
TEST_P(SpecialValuesTest, ProbabilitiesOfAllNumbers) {
  for (const float x : FloatsOfEveryExponent()) {
    if (std::isnan(x)) continue;
    float logits[] = {x, 0}, gradient[2];
    const float loss = CrossEntropyRow(logits, 2, 1, 1, gradient, DType::kF32);
    if (x == kInfinity) {  // as infinity less infinity
      EXPECT_TRUE(std::isnan(loss));
      continue;
    }
    // Subnormal numbers may be taken as zero.
    const double exact = 1 / (1 + std::exp(-static_cast<double>(x)));
    EXPECT_NEAR(gradient[0], exact, 4e-7 * exact + 2e-38) << x;
    const double exact_loss = std::log1p(std::exp(-std::abs(static_cast<double>(x)))) +
                              std::max(0.0, static_cast<double>(x));
    EXPECT_NEAR(loss, exact_loss, 4e-7 * std::max(1.0, exact_loss)) << x;
  }
}

TEST_P(SpecialValuesTest, SwiGluOfAllNumbers) {
  const std::vector<float> gates = FloatsOfEveryExponent();
  const auto count = std::ssize(gates);
  const TensorView gate = New(DType::kF32, {1, count}, "gate"), h = New(DType::kF32, {1, count});
  const TensorView up = New(DType::kF32, {1, count}, "up"), dh = New(DType::kF32, {1, count});
  const TensorView dgate = New(DType::kF32, {1, count}), dup = New(DType::kF32, {1, count});
  std::copy(gates.begin(), gates.end(), gate.as<float>());
  std::fill_n(up.as<float>(), count, 1.0f);
  std::fill_n(dh.as<float>(), count, 1.0f);
  cpu_.SwiGlu(gate, up, TensorView(), h);
  cpu_.SwiGluBackward(dh, gate, up, TensorView(), dgate, dup, TensorView());
  for (int64_t i = 0; i < count; ++i) {
    const double x = gates[static_cast<size_t>(i)];
    const float value = h.as<float>()[i];
    EXPECT_EQ(std::bit_cast<uint32_t>(dh.as<float>()[i]), std::bit_cast<uint32_t>(value));
    if (std::isnan(x)) {
      EXPECT_TRUE(std::isnan(value) && std::isnan(dgate.as<float>()[i]) &&
                  std::isnan(dup.as<float>()[i]))
          << std::bit_cast<uint32_t>(gates[static_cast<size_t>(i)]);
    } else if (std::isinf(x)) {
      EXPECT_FALSE(std::isfinite(value));
    } else {
      // The sigmoid does not fall below exp(-87).
      const double silu = x / (1 + std::exp(-x));
      EXPECT_NEAR(value, silu, 1e-6 * std::abs(silu) + 2e-38 * (1 + std::abs(x))) << x;
      EXPECT_EQ(dup.as<float>()[i], value);
    }
  }
}

// A NaN of the other factor, too.
TEST_P(SpecialValuesTest, NanInUpShowsInSwiGlu) {
  const std::vector<float> nans = Nans();
  const auto count = std::ssize(nans);
  for (const float at : {-kInfinity, -1e4f, -1.0f, 0.0f, 1.0f, 1e4f, kInfinity}) {
    const TensorView gate = New(DType::kF32, {1, count}, "gate"), h = New(DType::kBF16, {1, count});
    const TensorView up = New(DType::kF32, {1, count}, "up");
    std::fill_n(gate.as<float>(), count, at);
    std::copy(nans.begin(), nans.end(), up.as<float>());
    cpu_.SwiGlu(gate, up, TensorView(), h);
    for (int64_t i = 0; i < count; ++i) EXPECT_TRUE(std::isnan(ElementAt(h, i))) << at;
  }
}

}  // namespace
}  // namespace terrace
