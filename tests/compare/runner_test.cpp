#include "compare/runner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <omp.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "compare/study_testing.h"
#include "core/atomic_file.h"
#include "core/error.h"
#include "support/file_size_limit.h"
#include "support/message_of.h"
#include "support/temporary_folder.h"

namespace terrace {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
namespace fs = std::filesystem;

class RunnerTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    shared_ = new TemporaryFolder;
    PrepareSmallCorpus(*shared_ / "corpus");
  }
  static void TearDownTestSuite() { delete shared_; }

  // One thread suffices for so small a model.
  RunnerTest() : base_(SmallRun(*shared_ / "corpus")), threads_(omp_get_max_threads()) {
    omp_set_num_threads(1);
  }
  ~RunnerTest() override { omp_set_num_threads(threads_); }

  // Stops, as an interrupt does, once this many steps are done in total.
  StudyOutcome Run(const StudyRequest& request, int64_t stop_after = INT64_MAX,
                   bool keep_checkpoints = false) {
    started_.clear();
    int64_t steps = 0;
    const auto stop = [&] { return steps >= stop_after; };
    StudyCallbacks callbacks;
    callbacks.start = [&](const StudyStart& start) { start_ = start; };
    callbacks.run = [&](const RunSpec& run, int64_t, int64_t) {
      if (!stop()) started_.push_back(NameOf(run));
      return TrainCallbacks{.begin = {},
                            .step = [&](const StepMetrics&) { ++steps; },
                            .warning = {},
                            .saved = {},
                            .stop = stop};
    };
    return RunStudy(MakeStudy(base_, request), folder_ / "study",
                    {.command = "command", .machine = "", .keep_checkpoints = keep_checkpoints},
                    callbacks);
  }
  std::string MessageOfRun(const StudyRequest& request) {
    return MessageOf([&] { Run(request); });
  }
  fs::path RunOf(const std::string& name) const { return folder_ / "study/runs" / name; }
  RunResult ResultIn(const std::string& name) const {
    const fs::path path = RunOf(name) / "result.json";
    return ParseRunResult(ReadFile(path), path.string());
  }
  // Everything that has to be the same in every repetition.
  std::string RepeatableResult(const std::string& name) const {
    nlohmann::json json = nlohmann::json::parse(ReadFile(RunOf(name) / "result.json"));
    for (const char* key : {"seconds", "tokens_per_second"}) json.erase(key);
    for (const char* list : {"validation", "curve"}) {
      for (auto& point : json[list]) point.erase("seconds");
    }
    return json.dump();
  }

  static TemporaryFolder* shared_;
  TemporaryFolder folder_;
  RunConfig base_;
  StudyStart start_;
  int threads_;
  std::vector<std::string> started_;
};
TemporaryFolder* RunnerTest::shared_ = nullptr;

TEST_F(RunnerTest, PoliciesStartAlikeAndSeeTheSameBatchesInTheSameOrder) {
  // A learning rate too small to change a weight leaves the losses of the batches themselves.
  Run({.policies = {"adamw", "skewadam"}, .learning_rates = {"1e-30"}, .seeds = 2});
  const auto losses = [&](const std::string& run) {
    return MetricOf(RunOf(run) / "metrics.jsonl", "loss");
  };
  EXPECT_EQ(losses("adamw-lr1e-30-seed1").size(), 20u);
  EXPECT_EQ(losses("adamw-lr1e-30-seed1"), losses("skewadam-lr1e-30-seed1"));
  EXPECT_EQ(losses("adamw-lr1e-30-seed2"), losses("skewadam-lr1e-30-seed2"));
  EXPECT_NE(losses("adamw-lr1e-30-seed1"), losses("adamw-lr1e-30-seed2"));
}

TEST_F(RunnerTest, TheFirstLossIsTheSameForEveryPolicyAndRate) {
  Run({.policies = {"adamw", "skewadam"}, .learning_rates = {"1x", "10x"}});
  const double first = ResultIn("adamw-lr0.0003-seed1").first_loss;
  EXPECT_EQ(ResultIn("adamw-lr0.003-seed1").first_loss, first);
  EXPECT_EQ(ResultIn("skewadam-lr0.0003-seed1").first_loss, first);
  EXPECT_NE(ResultIn("adamw-lr0.0003-seed1").final_loss(),
            ResultIn("skewadam-lr0.0003-seed1").final_loss());
}

TEST_F(RunnerTest, ASweepChoosesAndFinishedRunsAreNotRepeated) {
  const StudyRequest request{.policies = {"skewadam"},
                             .ablations = {"skewadam-uniform"},
                             .learning_rates = {"1e-6", "1e-2"},
                             .seeds = 2};
  const StudyOutcome outcome = Run(request);
  EXPECT_FALSE(outcome.interrupted);
  EXPECT_THAT(started_, ElementsAre("skewadam-lr1e-06-seed1", "skewadam-lr0.01-seed1",
                                    "skewadam-uniform-lr0.01-seed1", "skewadam-lr0.01-seed2",
                                    "skewadam-uniform-lr0.01-seed2"));
  const PolicyRow& row = outcome.comparison.policies.at(0);
  EXPECT_EQ(row.learning_rate, 0.01);
  EXPECT_TRUE(row.chosen.at_edge);
  EXPECT_EQ(row.seeds, 2);
  EXPECT_EQ(ResultIn("skewadam-lr0.01-seed1").steps, 20);
  EXPECT_FALSE(fs::exists(RunOf("skewadam-lr0.01-seed1") / "checkpoints"));

  const std::string page = ReadFile(folder_ / "study/report.html");
  for (const char* name : {"compare.md", "compare.csv", "compare.json", "runs.csv"}) {
    EXPECT_TRUE(fs::exists(folder_ / "study" / name)) << name;
  }
  Run(request);
  EXPECT_THAT(started_, IsEmpty());
  EXPECT_EQ(ReadFile(folder_ / "study/report.html"), page);

  // More rates and seeds are more runs of the same study.
  StudyRequest larger = request;
  larger.learning_rates.push_back("1e-5");
  larger.seeds = 3;
  Run(larger);
  EXPECT_THAT(started_, ElementsAre("skewadam-lr1e-05-seed1", "skewadam-lr0.01-seed3",
                                    "skewadam-uniform-lr0.01-seed3"));
}

TEST_F(RunnerTest, RunsOfOtherCommandsAreNamed) {
  Run({.policies = {"skewadam"}, .learning_rates = {"1e-3", "1e-2"}, .seeds = 2});
  EXPECT_THAT(start_.others, IsEmpty());
  EXPECT_THAT(start_.threads, IsEmpty());
  // Of a sweep that has not chosen yet, no rate's other seeds are foreign.
  Run({.policies = {"skewadam"}, .learning_rates = {"1e-3", "1e-2", "1e-1"}, .seeds = 2}, 0);
  EXPECT_THAT(start_.others, IsEmpty());
  EXPECT_THAT(start_.threads, ElementsAre(1));
  Run({.policies = {"adamw", "skewadam"}, .learning_rates = {"1e-3"}});
  EXPECT_THAT(start_.others, ElementsAre("skewadam-lr0.01-seed1", "skewadam-lr0.01-seed2"));
}

TEST_F(RunnerTest, WhatIsNotThisStudysIsRefused) {
  const StudyRequest request{.policies = {"skewadam"}, .learning_rates = {"1e-3", "1e-2"}};
  // Somebody's folder that happens to have a folder of that name.
  fs::create_directories(folder_ / "study/runs");
  WriteFileAtomically(folder_ / "study/report.html", "mine");
  EXPECT_THAT(MessageOfRun(request), HasSubstr("has a report.html, but no compare.json"));
  EXPECT_EQ(ReadFile(folder_ / "study/report.html"), "mine");
  fs::remove_all(folder_ / "study");

  Run(request);
  const fs::path path = RunOf("skewadam-lr0.01-seed1") / "result.json";
  const std::string result = ReadFile(path);
  const auto message_with = [&](const std::string& text) {
    WriteFileAtomically(path, text);
    return MessageOfRun(request);
  };
  EXPECT_THAT(message_with(ReadFile(RunOf("skewadam-lr0.001-seed1") / "result.json")),
              HasSubstr("is of skewadam-lr0.001-seed1, not of skewadam-lr0.01-seed1"));
  const auto without = [&](const char* key) {
    auto json = nlohmann::json::parse(result);
    json[key] = nlohmann::json::array();
    return json.dump();
  };
  EXPECT_THAT(message_with(without("curve")), HasSubstr("result.json: is incomplete"));
  EXPECT_THAT(message_with(without("loads")), HasSubstr("result.json: is incomplete"));
  EXPECT_EQ(message_with(result), "");
}

TEST_F(RunnerTest, DataThatChangedInTheMiddleIsNoticed) {
  fs::copy(*shared_ / "corpus", folder_ / "corpus", fs::copy_options::recursive);
  base_.data.folder = folder_ / "corpus";
  const StudyRequest request{.policies = {"skewadam"}};
  Run(request, 10);
  EXPECT_EQ(started_.size(), 1u);

  // Other tokens in a file of the same size, behind whatever begins it.
  const fs::path shard = folder_ / "corpus/train-00000.bin";
  std::string tokens = ReadFile(shard);
  std::reverse(tokens.begin() + static_cast<int64_t>(tokens.size() / 2), tokens.end());
  for (size_t i = tokens.size() / 2; i + 1 < tokens.size(); i += 2) {
    std::swap(tokens[i], tokens[i + 1]);
  }
  WriteFileAtomically(shard, tokens);
  EXPECT_THAT(MessageOfRun(request), HasSubstr("study: is of other data"));
}

TEST_F(RunnerTest, MemoryIsThatOfTheRun) {
  Run({.policies = {"skewadam"}});
  const RunMemory memory = ResultIn("skewadam-lr0.0003-seed1").facts.memory;
  const std::vector<double> counted =
      MetricOf(RunOf("skewadam-lr0.0003-seed1") / "metrics.jsonl", "ledger_peak_bytes");
  EXPECT_EQ(memory.peak_bytes, static_cast<int64_t>(counted.back()));
  int64_t sum = 0;
  for (const int64_t bytes : memory.at_peak_bytes) sum += bytes;
  EXPECT_EQ(sum, memory.peak_bytes);
  EXPECT_GT(memory.state.total, 0);
  // The arena rounds each state up.
  EXPECT_LE(memory.state.total, memory.at_peak_bytes[static_cast<size_t>(Memory::kOptimizer)]);
}

TEST_F(RunnerTest, InterruptedAnywhereItGoesOnBitForBit) {
  const StudyRequest request{.policies = {"skewadam", "adamw"}};
  Run(request);
  const std::string first = RepeatableResult("skewadam-lr0.0003-seed1");
  const std::string second = RepeatableResult("adamw-lr0.0003-seed1");
  for (const int64_t stop_after : {7, 20, 33}) {
    fs::remove_all(folder_ / "study");
    EXPECT_TRUE(Run(request, stop_after).interrupted);
    EXPECT_EQ(fs::exists(RunOf("skewadam-lr0.0003-seed1") / "result.json"), stop_after >= 20);
    const StudyOutcome outcome = Run(request);
    EXPECT_FALSE(outcome.interrupted);
    EXPECT_EQ(started_.size(), stop_after >= 20 ? 1u : 2u);
    EXPECT_EQ(RepeatableResult("skewadam-lr0.0003-seed1"), first) << stop_after;
    EXPECT_EQ(RepeatableResult("adamw-lr0.0003-seed1"), second) << stop_after;
    // Time is that of all 20 steps, whichever process took them.
    const auto seconds = MetricOf(RunOf("adamw-lr0.0003-seed1") / "metrics.jsonl", "seconds");
    double sum = 0;
    for (const double value : seconds) sum += value;
    EXPECT_EQ(seconds.size(), 20u);
    EXPECT_DOUBLE_EQ(ResultIn("adamw-lr0.0003-seed1").seconds, sum);
  }
}

TEST_F(RunnerTest, KilledBeforeItsResultWasWrittenARunIsNotTrainedAgain) {
  const StudyRequest request{.policies = {"adamw"}};
  Run(request, INT64_MAX, true);
  const std::string before = RepeatableResult("adamw-lr0.0003-seed1");
  EXPECT_TRUE(fs::exists(RunOf("adamw-lr0.0003-seed1") / "checkpoints/step-20"));
  fs::remove(RunOf("adamw-lr0.0003-seed1") / "result.json");
  int64_t steps = 0;
  RunStudy(MakeStudy(base_, request), folder_ / "study", {.command = "", .machine = ""},
           {.start = {},
            .run =
                [&](const RunSpec&, int64_t, int64_t) {
                  return TrainCallbacks{.begin = {},
                                        .step = [&](const StepMetrics&) { ++steps; },
                                        .warning = {},
                                        .saved = {},
                                        .stop = {}};
                },
            .finished = {}});
  EXPECT_EQ(steps, 0);
  EXPECT_EQ(RepeatableResult("adamw-lr0.0003-seed1"), before);
  EXPECT_FALSE(fs::exists(RunOf("adamw-lr0.0003-seed1") / "checkpoints"));
}

TEST_F(RunnerTest, ARunThatDivergesIsAResultAndNeverChosen) {
  std::ofstream(folder_ / "wild.toml") << "base = \"adamw\"\n[default]\nlr_multiplier = 1e6\n";
  const StudyRequest request{
      .policies = {folder_ / "wild.toml"}, .learning_rates = {"1e-9", "1e3"}, .seeds = 2};
  const StudyOutcome outcome = Run(request);
  EXPECT_THAT(started_,
              ElementsAre("wild-lr1e-09-seed1", "wild-lr1000-seed1", "wild-lr1e-09-seed2"));
  const RunResult diverged = ResultIn("wild-lr1000-seed1");
  ASSERT_TRUE(diverged.diverged());
  EXPECT_GE(diverged.facts.diverged->step, 2);
  EXPECT_THAT(diverged.facts.diverged->reason, HasSubstr("not finite"));
  EXPECT_EQ(outcome.comparison.policies.at(0).learning_rate, 1e-9);
  Run(request);
  EXPECT_THAT(started_, IsEmpty());
}

TEST_F(RunnerTest, AFullDiskEndsTheStudyAndTheNextStartGoesOn) {
  const StudyRequest request{.policies = {"adamw"}};
  {
    const FileSizeLimit limit(30'000);
    EXPECT_THAT(MessageOfRun(request), HasSubstr("cannot write"));
  }
  EXPECT_FALSE(fs::exists(RunOf("adamw-lr0.0003-seed1") / "result.json"));
  EXPECT_FALSE(Run(request).interrupted);
  EXPECT_FALSE(ResultIn("adamw-lr0.0003-seed1").diverged());
}

TEST_F(RunnerTest, AnotherStudyNeedsAnotherFolder) {
  const StudyRequest request{.policies = {"adamw"}};
  Run(request);
  const RunConfig same = base_;
  base_.training.steps = 21;
  EXPECT_THAT(MessageOfRun(request), HasSubstr("was run with training.steps = 20, not 21"));
  // Also where none of the runs is wanted again.
  EXPECT_THAT(MessageOfRun({.policies = {"skewadam"}}), HasSubstr("training.steps = 20, not 21"));
  base_ = same;
  base_.optimizer.weight_decay = 0.5f;
  EXPECT_THAT(MessageOfRun(request), HasSubstr("optimizer.weight_decay = nothing, not 0.5"));
  base_ = same;
  base_.training.checkpoint_interval = 7;  // how it is kept is not what it is
  EXPECT_EQ(MessageOfRun(request), "");

  // The policy's name means something else by now.
  const fs::path path = RunOf("adamw-lr0.0003-seed1") / "result.json";
  const std::string text = ReadFile(path);
  std::string other = text;
  const size_t found = other.find("beta2 = 0.95");
  ASSERT_NE(found, std::string::npos);
  other.replace(found, 12, "beta2 = 0.75");
  std::ofstream(path) << other;
  EXPECT_THAT(MessageOfRun(request), HasSubstr(".beta2 = 0.75, which is 0.95"));
  // A setting that it did not have yet is none that differs.
  other.replace(found, 14, "");
  std::ofstream(path) << other;
  EXPECT_EQ(MessageOfRun(request), "");

  // The same data elsewhere.
  std::ofstream(path) << text;
  PrepareSmallCorpus(folder_ / "corpus");
  base_.data.folder = folder_ / "corpus";
  EXPECT_EQ(MessageOfRun(request), "");
  base_ = same;
  other = text;
  other.replace(other.find("\"train "), 7, "\"train 1");
  std::ofstream(path) << other;
  EXPECT_THAT(MessageOfRun(request), HasSubstr("was trained on other data"));
}

TEST_F(RunnerTest, WhatCannotRunIsRefusedBeforeAnythingIsWritten) {
  std::ofstream(folder_ / "partial.toml") << "learning_rate = 1\n[expert]\nrule = \"adamw\"\n";
  EXPECT_THAT(MessageOfRun({.policies = {"adamw", folder_ / "partial.toml"}}),
              HasSubstr("policy partial: "));
  EXPECT_THAT(MessageOfRun({.policies = {"adamw", folder_ / "partial.toml"}}),
              HasSubstr("population embedding has no rule; tok_emb.weight needs one"));
  const RunConfig same = base_;
  base_.data.folder = folder_ / "absent";
  EXPECT_THAT(MessageOfRun({.policies = {"adamw"}}), HasSubstr("there is no such folder"));
  base_ = same;
  base_.training.micro_batch_size = 1'000'000;
  EXPECT_THAT(MessageOfRun({.policies = {"adamw"}}), HasSubstr("memory: "));
  base_ = same;
  EXPECT_FALSE(fs::exists(folder_ / "study"));

  fs::create_directory(folder_ / "study");
  std::ofstream(folder_ / "study/thesis.txt") << "mine";
  EXPECT_THAT(MessageOfRun({.policies = {"adamw"}}), HasSubstr("holds no comparison"));
  EXPECT_FALSE(fs::exists(folder_ / "study/runs"));
}

}  // namespace
}  // namespace terrace
