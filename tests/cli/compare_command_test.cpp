// terrace compare as a user runs it.

#include <algorithm>
#include <chrono>
#include <csignal>
#include <fstream>
#include <thread>

#include "cli/command_test.h"
#include "core/atomic_file.h"
#include "support/small_run.h"

namespace terrace {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
namespace fs = std::filesystem;

class CompareCommandTest : public CommandTest {
 protected:
  static void SetUpTestSuite() {
    shared_ = new TemporaryFolder;
    PrepareSmallCorpus(*shared_ / "corpus");
    RunConfig config = SmallRun(*shared_ / "corpus");
    config.training.threads = 1;
    std::ofstream(*shared_ / "small.toml") << ToToml(FieldsOf(config));
  }
  static void TearDownTestSuite() { delete shared_; }

  // `terrace compare small.toml` and more.
  static std::vector<std::string> Compare(std::vector<std::string> more) {
    more.insert(more.begin(), {"compare", *shared_ / "small.toml"});
    return more;
  }

  static TemporaryFolder* shared_;
};
TemporaryFolder* CompareCommandTest::shared_ = nullptr;

TEST_F(CompareCommandTest, ComparesAndContinues) {
  const std::vector<std::string> arguments =
      Compare({"--output", "study", "--policies", "skewadam,adamw", "--ablations",
               "skewadam-uniform", "--lr", "1x,10x", "--seeds", "2"});
  const ProgramResult first = Run(arguments);
  EXPECT_EQ(first.exit_code, 0) << first.errors;
  EXPECT_THAT(first.output, StartsWith("policy            learning rate"));
  EXPECT_THAT(first.output, HasSubstr("study/report.html"));
  EXPECT_THAT(first.errors, HasSubstr("policy adamw: state 0."));
  EXPECT_THAT(first.errors, HasSubstr("8 runs of 2560 tokens each, 0 of them done:\n"));
  EXPECT_THAT(first.errors, HasSubstr("  to do  adamw-lr0.003-seed1\n"));
  EXPECT_THAT(first.errors, HasSubstr("  to do  4 more at the best learning rates (2 seeds)\n"));
  EXPECT_THAT(first.errors, HasSubstr("run 8 of 8: "));
  EXPECT_THAT(first.errors, HasSubstr("run 8/8, all in 0:00  step 20/20  loss "));
  EXPECT_THAT(first.errors, HasSubstr("optimizer.learning_rate is not used"));
  EXPECT_THAT(ReadFile(folder_ / "study/compare.md"),
              HasSubstr("--output study --policies skewadam,adamw --ablations skewadam-uniform "
                        "--lr 1x,10x --seeds 2`"));

  // By the option's old name, too.
  std::vector<std::string> old_arguments = arguments;
  std::replace(old_arguments.begin(), old_arguments.end(), std::string("--output"),
               std::string("--out"));
  const ProgramResult again = Run(old_arguments);
  EXPECT_EQ(again.exit_code, 0) << again.errors;
  EXPECT_THAT(again.errors, StartsWith("notice: --out is called --output now; "));
  EXPECT_EQ(again.output, first.output);
  EXPECT_THAT(again.errors, HasSubstr("8 runs of 2560 tokens each, 8 of them done:\n"));
  EXPECT_THAT(again.errors, Not(HasSubstr("step ")));
}

TEST_F(CompareCommandTest, MistakesGiveOneLineAndChangeNothing) {
  EXPECT_THAT(ErrorOf({"compare"}), HasSubstr("config is required"));
  EXPECT_THAT(ErrorOf(Compare({})), HasSubstr("--output is required"));
  EXPECT_THAT(ErrorOf(Compare({"--output", "x"})), HasSubstr("--policies is required"));
  const auto error_of = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"--output", "x", "--policies"});
    return ErrorOf(Compare(more));
  };
  EXPECT_THAT(error_of({"adam"}), HasSubstr("no policy is called \"adam\""));
  EXPECT_THAT(error_of({"adamw", "--lr", "fast"}), HasSubstr("--lr fast: neither"));
  EXPECT_THAT(error_of({"adamw", "--seeds", "0"}), HasSubstr("--seeds: 0"));
  EXPECT_THAT(error_of({"adamw", "--ablations", "skewadam-uniform"}), HasSubstr("its base"));
  EXPECT_THAT(error_of({"adamw", "--set", "training.stpes=5"}), HasSubstr("training.steps"));
  EXPECT_THAT(error_of({"adamw", "--set", "data.folder=absent"}), HasSubstr("absent"));
  EXPECT_THAT(error_of({"adamw", "--set", "training.eval_interval=0"}),
              HasSubstr("training.eval_interval = 0"));
  EXPECT_TRUE(fs::is_empty(folder_.path()));
}

TEST_F(CompareCommandTest, InterruptsSaveAndTheSameCommandContinues) {
  const std::vector<std::string> arguments =
      Compare({"--output", "study", "--policies", "adamw,skewadam", "--set", "training.steps=200",
               "--set", "training.checkpoint_interval=0"});
  Program program(Arguments(arguments), Options());
  const fs::path metrics = folder_ / "study/runs/adamw-lr0.0003-seed1/metrics.jsonl";
  const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!fs::exists(metrics) && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_THAT(ErrorOf(arguments), HasSubstr("another process is training in it"));
  program.Send(SIGINT);
  const ProgramResult interrupted = program.Wait();
  EXPECT_EQ(interrupted.exit_code, 0) << interrupted.errors;
  EXPECT_THAT(interrupted.output, HasSubstr("0 of 2 runs are done."));
  EXPECT_THAT(interrupted.output, HasSubstr("interrupted and saved; the same command continues"));

  const ProgramResult resumed = Run(arguments);
  EXPECT_EQ(resumed.exit_code, 0) << resumed.errors;
  EXPECT_THAT(resumed.errors, HasSubstr("resuming after step "));
  EXPECT_THAT(resumed.output, Not(HasSubstr("runs are done")));
}

}  // namespace
}  // namespace terrace
