#include "compare/result.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <streambuf>

#include "compare/study_testing.h"
#include "core/error.h"
#include "support/message_of.h"
#include "train/measure.h"
#include "train/metrics.h"

namespace terrace {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Json = nlohmann::json;

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
  std::istringstream lines(metrics);
  return MakeRunResult(std::move(facts), lines, "metrics.jsonl");
}

TEST(ResultTest, ComesFromTheMetrics) {
  const RunResult result = Make(MetricsOf(25));
  EXPECT_EQ(result.steps, 25);
  EXPECT_EQ(result.tokens, 2500);
  EXPECT_EQ(result.seconds, 12.5);
  EXPECT_EQ(result.tokens_per_second, 201);  // the slow first step does not count
  EXPECT_EQ(result.first_loss, 10);
  EXPECT_EQ(result.spikes, 0);
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

TEST(ResultTest, SpikesOfTheTrainingLossAreCounted) {
  std::string lines;
  for (int64_t step = 1; step <= 60; ++step) {
    StepMetrics metrics;
    metrics.step = step;
    metrics.loss = step == 30 || step == 50 ? 9 : 5;
    if (step == 60) metrics.evaluation = Evaluation{.tokens = 1, .loss = 5};
    lines += ToJsonLine(metrics) + "\n";
  }
  EXPECT_EQ(Make(lines).spikes, 2);
}

// Results of version 0.1.
TEST(ResultTest, AResultWithoutSpikesIsRead) {
  Json json = Json::parse(ToJson(Make(MetricsOf(25))));
  ASSERT_EQ(json.erase("spikes"), 1u);
  const RunResult result = ParseRunResult(json.dump(), "result.json");
  EXPECT_FALSE(result.spikes);
  EXPECT_EQ(result.final_loss(), 4.75);
  EXPECT_FALSE(ParseRunResult(ToJson(result), "result.json").spikes);
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

// Every value of a line of metrics or of a result, in turn, is of each wrong type, or not there:
// what is said names the place and never comes from another exception.
std::vector<Json> WithOneValueWrong(const Json& whole) {
  const Json flat = whole.flatten();
  std::vector<Json> all;
  for (const auto& [pointer, value] : flat.items()) {
    for (const char* wrong : {"null", "true", "\"7\"", "[]", "{}", "[{}]", "0.5", "-3", "1e300",
                              "18446744073709551615"}) {
      Json changed = whole;
      changed[Json::json_pointer(pointer)] = Json::parse(wrong);
      all.push_back(std::move(changed));
    }
    Json without = whole;
    Json& parent = without[Json::json_pointer(pointer).parent_pointer()];
    if (parent.is_object()) {
      parent.erase(Json::json_pointer(pointer).back());
      all.push_back(std::move(without));
    }
  }
  return all;
}

TEST(ResultTest, MetricsOfWrongTypesAreNamedByTheirLine) {
  const std::string lines = MetricsOf(10);
  const size_t second = lines.find('\n') + 1, third = lines.find('\n', second) + 1;
  const Json line = Json::parse(lines.substr(lines.rfind('\n', lines.size() - 2) + 1));
  int64_t refused = 0;
  for (const Json& changed : WithOneValueWrong(line)) {
    // The last line is the one with an evaluation.
    const std::string message = MessageOf([&] {
      Make(lines.substr(0, lines.rfind('\n', lines.size() - 2) + 1) + changed.dump() + "\n");
    });
    if (message.empty() || message == "metrics.jsonl: holds no validation") continue;
    EXPECT_THAT(message, testing::StartsWith("metrics.jsonl:10: ")) << changed;
    EXPECT_THAT(message, testing::Not(HasSubstr("json.exception")));
    ++refused;
  }
  EXPECT_GT(refused, 100);
  EXPECT_EQ(
      MessageOf([&] { Make(lines.substr(0, second) + "{\"step\":null}\n" + lines.substr(third)); }),
      "metrics.jsonl:2: step is no whole number (null); without the run's folder the run is "
      "made again");
}

TEST(ResultTest, ResultsOfWrongTypesAreNamed) {
  int64_t refused = 0;
  for (const Json& changed : WithOneValueWrong(Json::parse(ToJson(Make(MetricsOf(3)))))) {
    const std::string message = MessageOf([&] { ParseRunResult(changed.dump(), "result.json"); });
    if (message.empty()) continue;
    EXPECT_THAT(message, testing::StartsWith("result.json: ")) << changed;
    EXPECT_THAT(message, testing::Not(HasSubstr("json.exception")));
    ++refused;
  }
  EXPECT_GT(refused, 100);
}

// A stream of lines, padded with blanks, that is nowhere as a whole.
class PaddedLines : public std::streambuf {
 public:
  PaddedLines(std::vector<std::string> lines, size_t line_bytes)
      : lines_(std::move(lines)), line_(line_bytes, ' ') {
    line_.back() = '\n';
  }

 protected:
  int_type underflow() override {
    if (next_ == lines_.size()) return traits_type::eof();
    const std::string& text = lines_[next_++];
    std::fill(line_.begin(), line_.end() - 1, ' ');
    std::copy(text.begin(), text.end(), line_.begin());
    setg(line_.data(), line_.data(), line_.data() + line_.size());
    return traits_type::to_int_type(line_.front());
  }
  // Only back to the start.
  pos_type seekpos(pos_type position, std::ios_base::openmode) override {
    next_ = 0;
    setg(nullptr, nullptr, nullptr);
    return position;
  }
  pos_type seekoff(off_type, std::ios_base::seekdir, std::ios_base::openmode) override { return 0; }

 private:
  std::vector<std::string> lines_;
  std::string line_;
  size_t next_ = 0;
};

TEST(ResultTest, MetricsAreNotHeldInMemory) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "AddressSanitizer keeps freed memory";
#endif
  std::vector<std::string> lines;
  std::istringstream text(MetricsOf(600));
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  PaddedLines padded(std::move(lines), 1 << 16);  // 39 MB
  std::istream stream(&padded);
  const ResidentMemory before = ReadResidentMemory();
  const RunResult result = MakeRunResult({}, stream, "metrics.jsonl");
  EXPECT_LT(ReadResidentMemory().peak_bytes - before.peak_bytes, int64_t{8} << 20);
  EXPECT_EQ(result.steps, 600);
  EXPECT_EQ(ToJson(result), ToJson(Make(MetricsOf(600))));
}

TEST(ResultTest, DamageIsNamed) {
  EXPECT_EQ(MessageOf([] { Make("{\"step\":\n"); }),
            "metrics.jsonl:1: is not JSON; without the run's folder the run is made again");
  EXPECT_EQ(MessageOf([] { Make(""); }), "metrics.jsonl: holds no validation");
  std::string lines = MetricsOf(3);
  lines.erase(0, lines.find('\n') + 1);
  EXPECT_EQ(
      MessageOf([&] { Make(lines); }),
      "metrics.jsonl:1: is of step 2, not of step 1; without the run's folder the run is made "
      "again");
  const std::string text = ToJson(Make(MetricsOf(3)));
  for (const std::string& bad : {std::string(), text.substr(0, text.size() / 2)}) {
    EXPECT_EQ(MessageOf([&] { ParseRunResult(bad, "result.json"); }),
              "result.json: is damaged (not JSON)");
  }
  EXPECT_EQ(MessageOf([&] { ParseRunResult("{}", "result.json"); }),
            "result.json: format is missing");
  EXPECT_EQ(MessageOf([&] { ParseRunResult("[]", "result.json"); }),
            "result.json: holds array in place of an object");
  std::string newer = text;
  newer.replace(newer.find("\"format\": 1"), 11, "\"format\": 2");
  EXPECT_EQ(MessageOf([&] { ParseRunResult(newer, "result.json"); }),
            "result.json: was written by another version");
}

}  // namespace
}  // namespace terrace
