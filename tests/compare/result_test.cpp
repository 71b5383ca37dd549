#include "compare/result.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "compare/study_testing.h"
#include "core/error.h"
#include "train/metrics.h"

namespace terrace {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A run of `steps` steps of half a second and 100 tokens, evaluated every 10 and at the end.
std::string MetricsOf(int64_t steps) {
  std::string text;
  for (int64_t step = 1; step <= steps; ++step) {
    StepMetrics metrics;
    metrics.step = step;
    metrics.loss = 10.0 / static_cast<double>(step);
    metrics.aux_loss = 0.1 * static_cast<double>(step % 2);
    metrics.tokens = 100 * step;
    metrics.seconds = 0.5;
    metrics.tokens_per_second = step == 1 ? 1 : 200 + static_cast<double>(step % 3);
    metrics.floored[static_cast<size_t>(Population::kRouter)] = 0.5;
    LayerLoad layer{.layer = 3, .counts = {step, 0, 1, 2}, .load = {}};
    layer.load.max_share = 0.5;
    metrics.layers = {layer};
    if (step % 10 == 0 || step == steps) {
      metrics.evaluation = Evaluation{.tokens = 64,
                                      .loss = 5.0 - 0.01 * static_cast<double>(step),
                                      .perplexity = 1,
                                      .unigram_entropy = 3.5};
    }
    text += ToJsonLine(metrics) + "\n";
  }
  return text;
}

RunResult Make(const std::string& metrics, RunFacts facts = {}) {
  return MakeRunResult(std::move(facts), metrics, "metrics.jsonl");
}

std::string MessageOf(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(ResultTest, ComesFromTheMetrics) {
  const RunResult result = Make(MetricsOf(25));
  EXPECT_EQ(result.steps, 25);
  EXPECT_EQ(result.tokens, 2500);
  EXPECT_EQ(result.seconds, 12.5);
  EXPECT_EQ(result.tokens_per_second, 201);  // the slow first step does not count
  EXPECT_EQ(result.first_loss, 10);
  EXPECT_EQ(result.unigram_entropy, 3.5);
  ASSERT_EQ(result.validation.size(), 3u);
  EXPECT_EQ(result.validation[1].step, 20);
  EXPECT_EQ(result.validation[1].tokens, 2000);
  EXPECT_EQ(result.validation[1].seconds, 10);
  EXPECT_EQ(result.final_loss(), 4.75);
  ASSERT_EQ(result.curve.size(), 25u);
  EXPECT_EQ(result.curve[3].loss, 2.5);
  EXPECT_EQ(result.curve[3].seconds, 2);
  EXPECT_EQ(result.curve[3].imbalance, 2);  // half of the load on one of four experts
  EXPECT_EQ(result.curve[3].floored[static_cast<size_t>(Population::kRouter)], 0.5);
  EXPECT_FALSE(result.curve[3].floored[static_cast<size_t>(Population::kExpert)]);
  // The last tenth: steps 23 to 25.
  ASSERT_EQ(result.loads.size(), 1u);
  EXPECT_EQ(result.loads[0].layer, 3);
  EXPECT_THAT(result.loads[0].counts, ElementsAre(23 + 24 + 25, 0, 3, 6));
}

TEST(ResultTest, LongRunsAreThinnedToMeans) {
  const RunResult result = Make(MetricsOf(1001));
  EXPECT_LE(std::ssize(result.curve), RunResult::kCurvePoints);
  EXPECT_GT(std::ssize(result.curve), RunResult::kCurvePoints / 2);
  // Steps 1 to 6.
  EXPECT_EQ(result.curve[0].step, 6);
  EXPECT_EQ(result.curve[0].tokens, 600);
  EXPECT_NEAR(result.curve[0].loss, 10 * (1 + 1 / 2. + 1 / 3. + 1 / 4. + 1 / 5. + 1 / 6.) / 6,
              1e-12);
  EXPECT_NEAR(result.curve[0].aux_loss, 0.05, 1e-12);
  EXPECT_NEAR(*result.curve[0].floored[static_cast<size_t>(Population::kRouter)], 0.5, 1e-12);
  EXPECT_EQ(result.curve.back().step, 1001);
  EXPECT_EQ(result.curve.back().seconds, 500.5);
}

TEST(ResultTest, ALossThatIsNotFiniteAtTheEndIsADivergence) {
  StepMetrics metrics;
  metrics.step = 1;
  metrics.evaluation = Evaluation{.tokens = 1, .loss = std::numeric_limits<double>::quiet_NaN()};
  const RunResult result = Make(ToJsonLine(metrics) + "\n");
  ASSERT_TRUE(result.diverged());
  EXPECT_EQ(result.facts.diverged->step, 1);
  EXPECT_EQ(result.facts.diverged->reason, "the validation loss is not finite");
}

TEST(ResultTest, ARunThatDivergedAtOnceHasNoMetrics) {
  RunFacts facts;
  facts.diverged = Divergence{1, "reason"};
  const RunResult result = Make("", facts);
  EXPECT_EQ(result.steps, 0);
  EXPECT_TRUE(result.curve.empty());
  EXPECT_TRUE(ParseRunResult(ToJson(result), "result.json").diverged());
}

TEST(ResultTest, ReadsBackWhatItWrites) {
  RunFacts facts = ResultOf({"mine", 3e-4, 7}, 1).facts;
  for (const std::optional<Divergence>& diverged :
       {std::optional<Divergence>(), std::optional(Divergence{7, "the \"loss\"\n"})}) {
    facts.diverged = diverged;
    const RunResult result = Make(MetricsOf(25), facts);
    const std::string text = ToJson(result);
    const RunResult read = ParseRunResult(text, "result.json");
    EXPECT_EQ(ToJson(read), text);
    EXPECT_EQ(read.facts.policy, "mine");
    EXPECT_EQ(read.facts.learning_rate, 3e-4);
    EXPECT_EQ(read.facts.seed, 7);
    EXPECT_EQ(read.facts.policy_toml, facts.policy_toml);
    EXPECT_EQ(read.facts.memory.at_peak_bytes, facts.memory.at_peak_bytes);
    EXPECT_EQ(read.facts.memory.state.by_population, facts.memory.state.by_population);
    EXPECT_EQ(read.diverged(), diverged.has_value());
    EXPECT_EQ(read.final_loss(), 4.75);
    EXPECT_EQ(read.loads[0].counts, result.loads[0].counts);
  }
}

TEST(ResultTest, DamageIsNamed) {
  EXPECT_EQ(MessageOf([] { Make("{\"step\":\n"); }),
            "metrics.jsonl: is damaged; without the run's folder the run is made again");
  EXPECT_EQ(MessageOf([] { Make(""); }), "metrics.jsonl: holds no validation");
  std::string lines = MetricsOf(3);
  lines.erase(0, lines.find('\n') + 1);
  EXPECT_EQ(MessageOf([&] { Make(lines); }),
            "metrics.jsonl: has no line of step 1; without the run's folder the run is made again");
  const std::string text = ToJson(Make(MetricsOf(3)));
  for (const std::string& bad :
       {std::string(), text.substr(0, text.size() / 2), std::string("{}"), std::string("[]")}) {
    EXPECT_EQ(MessageOf([&] { ParseRunResult(bad, "result.json"); }), "result.json: is damaged");
  }
  std::string newer = text;
  newer.replace(newer.find("\"format\": 1"), 11, "\"format\": 2");
  EXPECT_EQ(MessageOf([&] { ParseRunResult(newer, "result.json"); }),
            "result.json: was written by another version");
}

}  // namespace
}  // namespace terrace
