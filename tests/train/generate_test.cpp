#include "train/generate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>

#include "core/error.h"
#include "support/small_run.h"
#include "train/planned_model.h"

namespace terrace {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::map<int32_t, double> FrequenciesOf(const std::vector<float>& logits,
                                        const SamplingOptions& options) {
  constexpr int64_t kDraws = 20'000;
  std::map<int32_t, double> frequencies;
  for (int64_t i = 0; i < kDraws; ++i) frequencies[SampleToken(logits, options, i)] += 1.0 / kDraws;
  return frequencies;
}

// Within 4 standard errors of 20,000 draws.
void ExpectShare(double frequency, double probability) {
  EXPECT_NEAR(frequency, probability, 4 * std::sqrt(probability * (1 - probability) / 20'000));
}

const std::vector<float> kLogits = {0, std::log(2.0f), std::log(4.0f), std::log(1.0f)};  // 1 2 4 1

TEST(SampleTokenTest, DrawsFromTheSoftmax) {
  const auto shares = FrequenciesOf(kLogits, {.temperature = 1});
  ExpectShare(shares.at(0), 1.0 / 8);
  ExpectShare(shares.at(1), 2.0 / 8);
  ExpectShare(shares.at(2), 4.0 / 8);
}

TEST(SampleTokenTest, TemperatureSharpens) {
  const auto shares = FrequenciesOf(kLogits, {.temperature = 0.5f});
  ExpectShare(shares.at(2), 16.0 / 22);
  EXPECT_EQ(FrequenciesOf(kLogits, {.temperature = 0}).size(), 1u);
  EXPECT_EQ(SampleToken(kLogits, {.temperature = 0}, 0), 2);
}

TEST(SampleTokenTest, TopKAndTopPKeepTheLikeliest) {
  const auto two = FrequenciesOf(kLogits, {.temperature = 1, .top_k = 2});
  EXPECT_EQ(two.size(), 2u);
  ExpectShare(two.at(2), 4.0 / 6);
  EXPECT_EQ(FrequenciesOf(kLogits, {.temperature = 1, .top_p = 0.5f}).size(), 1u);
  EXPECT_EQ(FrequenciesOf(kLogits, {.temperature = 1, .top_p = 0.51f}).size(), 2u);
  EXPECT_EQ(FrequenciesOf(kLogits, {.temperature = 1, .top_p = 0.76f}).size(), 3u);
  // Ties go to the lower id.
  EXPECT_TRUE(FrequenciesOf(kLogits, {.temperature = 1, .top_k = 3}).contains(0));
  EXPECT_EQ(FrequenciesOf(kLogits, {.temperature = 1, .top_k = 99}).size(), 4u);
}

TEST(SampleTokenTest, SkipsPaddingAndWhatIsNotFinite) {
  std::vector<float> logits = kLogits;
  logits[2] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_FALSE(FrequenciesOf(logits, {.temperature = 1}).contains(2));
  EXPECT_FALSE(
      FrequenciesOf(kLogits, {.temperature = 1, .can_draw = [](int32_t id) { return id < 2; }})
          .contains(2));
  const auto odd = FrequenciesOf(
      kLogits, {.temperature = 1, .top_k = 2, .can_draw = [](int32_t id) { return id % 2 == 1; }});
  EXPECT_EQ(odd.size(), 2u);
  ExpectShare(odd.at(1), 2.0 / 3);
  for (float& logit : logits) logit = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THROW(SampleToken(logits, {}, 0), Error);
}

TEST(SampleTokenTest, ExtremeLogitsAreNoTrouble) {
  EXPECT_EQ(SampleToken(std::vector<float>{-3e38f, 3e38f}, {.temperature = 1e-6f}, 0), 1);
}

TEST(CheckSamplingTest, NamesTheOption) {
  const std::pair<SamplingOptions, std::string> kCases[] = {
      {{.max_tokens = 0}, "max_tokens = 0"},
      {{.temperature = -1}, "temperature = -1"},
      {{.temperature = std::numeric_limits<float>::quiet_NaN()}, "temperature = nan"},
      {{.top_k = -1}, "top_k = -1"},
      {{.top_p = 0}, "top_p = 0"},
      {{.top_p = 1.5f}, "top_p = 1.5"},
  };
  for (const auto& [options, message] : kCases) {
    try {
      CheckSampling(options);
      FAIL() << message;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(message));
    }
  }
}

std::vector<int32_t> Continue(const std::vector<int32_t>& prompt, const SamplingOptions& options) {
  std::vector<int32_t> tokens;
  UsePlannedModel(SmallRun("corpus").model, [&](Model& model) {
    model.Initialize(1);
    Generate(model, prompt, options, [&](int32_t token) { tokens.push_back(token); });
  });
  return tokens;
}

TEST(GenerateTest, RepeatsForASeedAndStopsWhereItMust) {
  const std::vector<int32_t> prompt = {10, 20, 30};
  const auto first = Continue(prompt, {.max_tokens = 12, .temperature = 1});
  EXPECT_EQ(first.size(), 12u);
  EXPECT_EQ(Continue(prompt, {.max_tokens = 12, .temperature = 1}), first);
  EXPECT_NE(Continue(prompt, {.max_tokens = 12, .temperature = 1, .seed = 2}), first);
  // The model has 32 positions.
  EXPECT_EQ(Continue(prompt, {.max_tokens = 1000, .temperature = 1}).size(), 29u);
  const auto ended = Continue(prompt, {.max_tokens = 12, .temperature = 1, .end_token = first[4]});
  EXPECT_EQ(ended,
            std::vector<int32_t>(first.begin(), std::find(first.begin(), first.end(), first[4])));
  EXPECT_EQ(Continue(prompt, {.max_tokens = 1}).size(), 1u);
}

TEST(GenerateTest, APromptThatFillsThePositionsIsRefused) {
  EXPECT_THROW(Continue(std::vector<int32_t>(32, 1), {}), Error);
}

}  // namespace
}  // namespace terrace
