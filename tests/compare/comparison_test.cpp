#include "compare/comparison.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "compare/report.h"
#include "compare/study_testing.h"
#include "compare/tables.h"

namespace terrace {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

// AdamW is best at the edge, SkewAdam within; an ablation; one seed of SkewAdam diverged.
class ComparisonTest : public ::testing::Test {
 protected:
  ComparisonTest()
      : study_(StudyOf({.policies = {"adamw", "skewadam"},
                        .ablations = {"skewadam-uniform"},
                        .learning_rates = {"1", "2", "3"},
                        .seeds = 3})) {
    AddResult(results_, {"adamw", 1, 5}, 4);
    AddResult(results_, {"adamw", 2, 5}, 3.5);
    AddResult(results_, {"adamw", 3, 5}, 3);
    AddResult(results_, {"skewadam", 1, 5}, 3.2);
    AddResult(results_, {"skewadam", 2, 5}, 2.9);
    AddDiverged(results_, {"skewadam", 3, 5});
    AddResult(results_, {"adamw", 3, 6}, 3.1);
    AddResult(results_, {"adamw", 3, 7}, 3.5);
    AddResult(results_, {"skewadam", 2, 6}, 2.7);
    AddDiverged(results_, {"skewadam", 2, 7});
    for (const int64_t seed : {5, 6, 7}) AddResult(results_, {"skewadam-uniform", 2, seed}, 2.8);
  }
  Comparison Make() const {
    return Compare(study_, results_,
                   {.command = "terrace compare a | b",
                    .machine = "a machine",
                    .train_tokens = 2924058,
                    .val_tokens = 1000});
  }

  Study study_;
  RunResults results_;
};

TEST(MeanSpreadTest, IsTheSampleStandardDeviation) {
  EXPECT_EQ(MeanSpreadOf({}).mean, 0);
  EXPECT_EQ(MeanSpreadOf({3}).mean, 3);
  EXPECT_FALSE(MeanSpreadOf({3}).stddev);
  const MeanSpread spread = MeanSpreadOf({1, 2, 6});
  EXPECT_DOUBLE_EQ(spread.mean, 3);
  EXPECT_DOUBLE_EQ(*spread.stddev, std::sqrt((4 + 1 + 9) / 2.0));
}

TEST_F(ComparisonTest, RowsAreMeansOverSeedsAtTheChosenRate) {
  const Comparison comparison = Make();
  ASSERT_EQ(comparison.policies.size(), 3u);
  const PolicyRow& adamw = comparison.policies[0];
  EXPECT_EQ(adamw.learning_rate, 3);
  EXPECT_TRUE(adamw.chosen.at_edge);
  EXPECT_EQ(adamw.seeds, 3);
  EXPECT_DOUBLE_EQ(adamw.loss.mean, 3.2);
  EXPECT_DOUBLE_EQ(*adamw.loss.stddev, std::sqrt((0.04 + 0.01 + 0.09) / 2));
  EXPECT_DOUBLE_EQ(adamw.perplexity.mean, (std::exp(3) + std::exp(3.1) + std::exp(3.5)) / 3);
  ASSERT_EQ(adamw.validation.size(), 2u);
  EXPECT_EQ(adamw.validation[0].tokens, 1280);
  EXPECT_DOUBLE_EQ(adamw.validation[0].loss.mean, 4.2);
  EXPECT_THAT(adamw.loads.at(0).counts, ElementsAre(30, 60, 90, 120));

  const PolicyRow& skewadam = comparison.policies[1];
  EXPECT_EQ(skewadam.learning_rate, 2);
  EXPECT_FALSE(skewadam.chosen.at_edge);
  EXPECT_EQ(skewadam.seeds, 2);
  EXPECT_EQ(skewadam.diverged, 1);  // at this rate: the other one is in the sweep
  EXPECT_DOUBLE_EQ(skewadam.loss.mean, 2.8);

  const PolicyRow& uniform = comparison.policies[2];
  EXPECT_EQ(uniform.base, "skewadam");
  EXPECT_EQ(uniform.learning_rate, 2);
  EXPECT_EQ(uniform.seeds, 3);
  EXPECT_DOUBLE_EQ(*uniform.loss.stddev, 0);

  EXPECT_EQ(comparison.runs_done, 13);
  EXPECT_EQ(comparison.runs_total, 13);
  EXPECT_EQ(comparison.title, "Comparison of adamw, skewadam, and 1 ablation");
}

TEST_F(ComparisonTest, TablesMarkWhatWasChosenAndWhatIsNotTuned) {
  const std::string text = ToTerminal(Make());
  EXPECT_THAT(text, HasSubstr("adamw             3 (best of 3), at the edge      3"));
  EXPECT_THAT(text, HasSubstr("skewadam          2 (best of 3)                   2"));
  EXPECT_THAT(text, HasSubstr("skewadam-uniform  2 (skewadam's)                  3"));
  EXPECT_THAT(text, HasSubstr("2.8000 ± 0.1414"));
  EXPECT_THAT(text, HasSubstr("3.0000       20.09       1  chosen, at the edge: a better one may"));
  EXPECT_THAT(text, HasSubstr("2.9000       18.17       1  chosen\n"));
  EXPECT_THAT(text, HasSubstr("diverged in step 7: the loss is not finite"));
  EXPECT_THAT(text, Not(HasSubstr("runs are done")));

  const std::string markdown = ToMarkdown(Make());
  EXPECT_THAT(markdown, StartsWith("# Comparison of adamw, skewadam, and 1 ablation\n"));
  EXPECT_THAT(markdown, HasSubstr("- **Command:** `terrace compare a | b`\n"));
  EXPECT_THAT(markdown,
              HasSubstr("corpus: 2,924,058 tokens to train on, 1,000 to validate, 128 of them"));
  EXPECT_THAT(markdown, HasSubstr("| adamw | 3 (best of 3), at the edge | 3 | 3.2000 ± 0.2646 |"));
  EXPECT_THAT(markdown, HasSubstr("| 1.5 | 5.0 |"));  // MiB of state and at the peak
}

// Memory of all seeds of a policy at its chosen rate.
class FrontOfPoliciesTest : public ComparisonTest {
 protected:
  void Take(const std::string& policy, double rate, int64_t peak_bytes) {
    for (const int64_t seed : {5, 6, 7}) {
      results_.at(NameOf(RunSpec{policy, rate, seed})).facts.memory.peak_bytes = peak_bytes;
    }
  }
  std::vector<bool> Front() const {
    std::vector<bool> front;
    for (const PolicyRow& row : Make().policies) front.push_back(row.on_front);
    return front;
  }
};

TEST_F(FrontOfPoliciesTest, IsByAllMemoryAndMeanLoss) {
  AddResult(results_, {"skewadam", 2, 7}, 2.8);  // mean losses 3.2, 2.8 and 2.8
  // The same memory, and two losses that are the same: both, and adamw not.
  EXPECT_THAT(Front(), ElementsAre(false, true, true));
  Take("adamw", 3, 1 << 20);
  Take("skewadam", 2, 3 << 20);
  Take("skewadam-uniform", 2, 4 << 20);
  EXPECT_THAT(Front(), ElementsAre(true, true, false));
  const Comparison comparison = Make();
  const double parameters = static_cast<double>(SizeOf(study_.base.model).parameters);
  EXPECT_EQ(comparison.policies[1].bytes_per_parameter, (3 << 20) / parameters);
  EXPECT_EQ(static_cast<double>(comparison.parameters), parameters);

  EXPECT_THAT(ToMarkdown(comparison),
              HasSubstr(fmt::format("| 1.5 | 3.0 | {:.2f} | yes |", (3 << 20) / parameters)));
  EXPECT_THAT(ToMarkdown(comparison),
              HasSubstr(fmt::format("| 1.5 | 4.0 | {:.2f} |  |", (4 << 20) / parameters)));
  const auto json = nlohmann::json::parse(ToJson(comparison));
  EXPECT_EQ(json["policies"][1]["on_front"], true);
  EXPECT_EQ(json["policies"][2]["on_front"], false);
  EXPECT_EQ(json["policies"][1]["bytes_per_parameter"], (3 << 20) / parameters);
  EXPECT_EQ(json["parameters"], comparison.parameters);
}

TEST_F(FrontOfPoliciesTest, APolicyThatDivergedIsNoChoiceAndKeepsNobodyOff) {
  // One seed of skewadam, the best and smallest of all, has diverged at its rate.
  Take("skewadam", 2, 1 << 20);
  EXPECT_THAT(Front(), ElementsAre(false, false, true));
}

TEST_F(FrontOfPoliciesTest, OnePolicyIsTheFront) {
  study_.policies.resize(1);
  EXPECT_THAT(Front(), ElementsAre(true));
  for (const double rate : {1.0, 2.0, 3.0}) AddDiverged(results_, {"adamw", rate, 5});
  EXPECT_THAT(Front(), ElementsAre(false));
}

TEST_F(ComparisonTest, SpikesAreThoseOfAllRunsAtTheRate) {
  results_.at("skewadam-lr2-seed6").spikes = 4;
  Comparison comparison = Make();
  EXPECT_EQ(comparison.policies[1].spikes, 1 + 4 + 1);  // of the diverged run, too
  EXPECT_THAT(ToTerminal(comparison), HasSubstr("       6         1\n"));
  EXPECT_THAT(ToTerminal(comparison), HasSubstr("       18.17       1  chosen\n"));
  EXPECT_THAT(ToMarkdown(comparison), HasSubstr("the median of the 50 before by more than 7"));
  // Results of version 0.1 do not say.
  results_.at("skewadam-lr2-seed6").spikes.reset();
  comparison = Make();
  EXPECT_FALSE(comparison.policies[1].spikes);
  EXPECT_THAT(ToTerminal(comparison), HasSubstr("1.50 ± 0.00x                 1\n"));
  EXPECT_TRUE(nlohmann::json::parse(ToJson(comparison))["policies"][1]["spikes"].is_null());
  // All diverged: the runs at every rate, here with two of another seed at one of them.
  for (const double rate : {1.0, 2.0, 3.0}) AddDiverged(results_, {"adamw", rate, 5});
  EXPECT_EQ(Make().policies[0].spikes, 3 + 2);
}

TEST_F(ComparisonTest, WhatTheRunsHadInCommonIsSaid) {
  EXPECT_THAT(ToMarkdown(Make()), HasSubstr("- **Machine:** a machine\n"));
  EXPECT_THAT(ToMarkdown(Make()), Not(HasSubstr("Over every policy")));
  results_.at("adamw-lr3-seed6").facts.threads = 1;
  EXPECT_THAT(ToMarkdown(Make()), HasSubstr("- **Machine:** a machine, 1 thread\n"));
  results_.at("adamw-lr3-seed7").facts.threads = 2;
  EXPECT_THAT(ToMarkdown(Make()), HasSubstr("- **Machine:** a machine, 1 or 2 threads\n"));

  EXPECT_THAT(ToMarkdown(Make()), HasSubstr("- **Gradients:** f32, sink accumulate\n"));
  EXPECT_THAT(ToMarkdown(Make()), HasSubstr("- **Schedule:** cosine, 3 % warm-up, to 0 of "));
  study_.base.optimizer.schedule = ScheduleKind::kWsd;
  EXPECT_THAT(ToMarkdown(Make()),
              HasSubstr("- **Schedule:** wsd, 3 % warm-up, 20 % decay, to 0 of the peak;"));
  study_.base.training.sink = SinkKind::kRelease;
  study_.base.training.activation_checkpointing = true;
  EXPECT_THAT(ToMarkdown(Make()),
              HasSubstr("- **Gradients:** f32, sink release, activation checkpointing\n"));
  study_.base.optimizer.weight_decay = 0.25f;
  study_.base.optimizer.populations[static_cast<size_t>(Population::kExpert)] = {
      {"lr_multiplier", 2.0}};
  EXPECT_THAT(ToMarkdown(Make()),
              HasSubstr("- **Over every policy:** optimizer.weight\\_decay = 0.25, "
                        "optimizer.populations.expert = { lr\\_multiplier = 2 }\n"));
}

TEST_F(ComparisonTest, ALossAboveTheFirstOneIsMarked) {
  AddResult(results_, {"adamw", 1, 5}, 5.6);
  EXPECT_THAT(ToTerminal(Make()), HasSubstr(" 5.6000      270.43       1  worse than untrained\n"));
  AddResult(results_, {"adamw", 2, 5}, 5.7);
  AddResult(results_, {"adamw", 3, 5}, 5.8);
  EXPECT_THAT(ToTerminal(Make()), HasSubstr("chosen, at the edge: a better one may lie beyond; "
                                            "worse than untrained\n"));
}

TEST_F(ComparisonTest, AnUnfinishedStudySaysSo) {
  results_.erase("adamw-lr3-seed5");
  results_.erase("skewadam-uniform-lr2-seed7");
  const Comparison comparison = Make();
  EXPECT_EQ(comparison.policies[0].learning_rate, 2);
  EXPECT_FALSE(comparison.policies[0].chosen.complete);
  const std::string text = ToTerminal(comparison);
  EXPECT_THAT(text, HasSubstr("2 (best so far)"));
  EXPECT_THAT(text, HasSubstr("to be run"));
  EXPECT_THAT(text, HasSubstr("9 of 13 runs are done."));
}

TEST_F(ComparisonTest, WithoutResultsThereAreRowsWithoutNumbers) {
  results_.clear();
  const Comparison comparison = Make();
  EXPECT_EQ(comparison.policies.size(), 3u);
  EXPECT_EQ(comparison.runs_done, 0);
  EXPECT_EQ(comparison.runs_total, 6 + 2 + 2 + 3);
  EXPECT_THAT(ToTerminal(comparison), HasSubstr("0 of 13 runs are done."));
  EXPECT_THAT(ToHtml(comparison), HasSubstr("\"runs_done\":0"));
}

TEST_F(ComparisonTest, APolicyThatAlwaysDivergesIsAResult) {
  for (const double rate : {1.0, 2.0, 3.0}) AddDiverged(results_, {"adamw", rate, 5});
  const Comparison comparison = Make();
  EXPECT_FALSE(comparison.policies[0].learning_rate);
  EXPECT_EQ(comparison.policies[0].diverged, 3);
  EXPECT_THAT(ToTerminal(comparison), HasSubstr("all diverged"));
}

TEST_F(ComparisonTest, APerplexityBeyondAllNumbersHasAShortName) {
  AddResult(results_, {"adamw", 3, 5}, 2.5);
  AddResult(results_, {"adamw", 3, 6}, 50);
  AddResult(results_, {"adamw", 3, 7}, 60);
  EXPECT_THAT(ToTerminal(Make()), HasSubstr(" 3.81e+25 ± 6.59e+25 "));
  AddResult(results_, {"adamw", 3, 7}, 1000);
  EXPECT_THAT(ToTerminal(Make()), HasSubstr(" inf "));
  EXPECT_THAT(ToJson(Make()), HasSubstr("\"perplexity\": {\n    \"mean\": null,"));
}

TEST_F(ComparisonTest, CsvHasALineForEachPolicyAndForEachRun) {
  const std::string csv = ToCsv(Make());
  EXPECT_EQ(std::count(csv.begin(), csv.end(), '\n'), 1 + 3);
  EXPECT_THAT(csv, HasSubstr("\nadamw,,3,3,true,3,0,3,3.2"));
  EXPECT_THAT(csv, HasSubstr("\nskewadam-uniform,skewadam,2,0,false,3,0,3,2.8"));
  EXPECT_THAT(csv, HasSubstr(",true,1048576,2097152,1048576,524288,524288\n"));
  const std::string runs = RunsToCsv(Make());
  EXPECT_EQ(std::count(runs.begin(), runs.end(), '\n'), 1 + 13);
  // Text with a comma is quoted.
  EXPECT_THAT(runs, HasSubstr(",7,\"the loss is not finite, first in the head\",1\n"));
  const auto cells_of = [](const std::string& line) {
    return std::count(line.begin(), line.end(), ',');
  };
  EXPECT_EQ(cells_of(csv.substr(0, csv.find('\n'))), 26);
  results_.clear();
  const std::string empty = ToCsv(Make());
  EXPECT_EQ(cells_of(empty), 4 * 26);
}

TEST_F(ComparisonTest, NamesCannotBreakThePageOrTheTable) {
  const std::string evil = "</script><b>|\"a\xff";
  study_.policies[0].name = evil;
  results_.clear();
  for (const double rate : {1.0, 2.0, 3.0}) AddResult(results_, {evil, rate, 5}, rate);
  const Comparison comparison = Make();
  const std::string page = ToHtml(comparison);
  EXPECT_THAT(page, Not(HasSubstr("</script><b>")));
  EXPECT_THAT(page, HasSubstr("\\u003c/script>\\u003cb>|\\\"a"));
  EXPECT_THAT(page, HasSubstr("Chart.js v"));
  EXPECT_THAT(page, Not(HasSubstr("{{")));
  EXPECT_THAT(ToMarkdown(comparison), HasSubstr("| \\</script>\\<b>\\|\"a"));
  EXPECT_THAT(ToCsv(comparison), HasSubstr("\n\"</script><b>|\"\"a"));
  const auto json = nlohmann::json::parse(ToJson(comparison));
  EXPECT_THAT(json["policies"][0]["policy"].get<std::string>(), StartsWith("</script><b>|\"a"));
}

TEST_F(ComparisonTest, ThePageLoadsNothing) {
  const std::string page = ToHtml(Make());
  EXPECT_THAT(page, Not(HasSubstr("<link")));
  EXPECT_THAT(page, Not(HasSubstr("src=")));
  EXPECT_THAT(page, Not(HasSubstr("@import")));
  EXPECT_THAT(page, Not(HasSubstr("fetch(")));
}

}  // namespace
}  // namespace terrace
