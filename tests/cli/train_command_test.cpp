// terrace train, eval and generate as a user runs them.

#include <pty.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <fstream>
#include <sstream>
#include <thread>

#include "cli/command_test.h"
#include "core/atomic_file.h"
#include "core/rng.h"
#include "data/files.h"
#include "data/tokenizer_files.h"
#include "model/presets.h"
#include "support/small_run.h"
#include "train/checkpoint.h"

namespace terrace {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
namespace fs = std::filesystem;

class TrainCommandTest : public CommandTest {
 protected:
  static void SetUpTestSuite() {
    shared_ = new TemporaryFolder;
    PrepareSmallCorpus(*shared_ / "corpus");
    RunConfig config = SmallRun(*shared_ / "corpus");
    std::ofstream(*shared_ / "small.toml") << ToToml(FieldsOf(config));
  }
  static void TearDownTestSuite() { delete shared_; }

  std::string Config() const { return *shared_ / "small.toml"; }

  // Waits until `path` is there; fails after a minute.
  static bool WaitFor(const fs::path& path) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    while (!fs::exists(path)) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return true;
  }

  std::string ReadIfThere(const fs::path& name) const {
    return fs::exists(folder_ / name) ? ReadFile(folder_ / name) : "";
  }

  static TemporaryFolder* shared_;
};
TemporaryFolder* TrainCommandTest::shared_ = nullptr;

TEST_F(TrainCommandTest, TrainsEvaluatesAndGenerates) {
  const ProgramResult trained = Run({"train", Config(), "--output", "run", "--threads", "1"});
  EXPECT_EQ(trained.exit_code, 0) << trained.errors;
  EXPECT_THAT(trained.output, StartsWith("run: 20 of 20 steps, validation perplexity "));
  EXPECT_THAT(trained.errors, HasSubstr("step 20/20  loss "));
  EXPECT_THAT(trained.errors, HasSubstr("MFU "));
  EXPECT_THAT(ReadFile(folder_ / "run/config.toml"), HasSubstr("threads = 1 "));

  const ProgramResult evaluated = Run({"eval", "run"});
  EXPECT_EQ(evaluated.exit_code, 0) << evaluated.errors;
  EXPECT_THAT(evaluated.output, HasSubstr("unigram entropy"));
  const ProgramResult checkpoint = Run({"eval", "run/checkpoints/step-10", "--batches", "1"});
  EXPECT_EQ(checkpoint.exit_code, 0) << checkpoint.errors;
  EXPECT_THAT(checkpoint.output, StartsWith("run/checkpoints/step-10: 64 tokens of "));

  const std::vector<std::string> generate = {"generate",     "run", "--prompt", "the old",
                                             "--max-tokens", "9",   "--top-k",  "20",
                                             "--top-p",      "0.9", "--seed",   "3"};
  const ProgramResult first = Run(generate), second = Run(generate);
  EXPECT_EQ(first.exit_code, 0) << first.errors;
  EXPECT_THAT(first.output, StartsWith("the old"));
  EXPECT_GT(first.output.size(), std::string("the old\n").size());
  EXPECT_EQ(first.output, second.output);
  EXPECT_EQ(first.errors, "");

  // More batches than there are.
  EXPECT_EQ(Run({"eval", "run", "--batches", "9223372036854775807"}).output, evaluated.output);
  const ProgramResult full =
      Run({"generate", "run", "--prompt", "the old", "--temperature", "0", "--max-tokens", "1000"});
  EXPECT_EQ(full.exit_code, 0) << full.errors;
  EXPECT_EQ(full.errors, "stopped after 25 tokens: model.max_positions = 32 is reached\n");
}

TEST_F(TrainCommandTest, IdsWithoutATokenAreNotDrawn) {
  TokenizerSpec spec = Tokenizer::Bytes().spec();
  spec.added.push_back({"<far>", 1999, false});
  WriteNewFile(folder_ / "holes.json", ToTokenizerJson(Tokenizer(std::move(spec))));
  ASSERT_EQ(Run({"train", Config(), "-o", "run", "--set", "data.tokenizer=holes.json", "--set",
                 "model.vocab_size=2000", "--set", "training.steps=1"})
                .exit_code,
            0);
  const ProgramResult generated =
      Run({"generate", "run", "--prompt", "the", "--temperature", "100", "--max-tokens", "20"});
  EXPECT_EQ(generated.exit_code, 0) << generated.errors;
}

TEST_F(TrainCommandTest, VersionAndHelp) {
  EXPECT_THAT(Run({"--version"}).output, StartsWith("terrace "));
  const ProgramResult help = Run({"train", "--help"});
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_THAT(help.output, HasSubstr("--resume"));
}

// Every option without which a command refuses to begin is marked in its help, whatever the
// command.
TEST_F(TrainCommandTest, HelpMarksWhatIsRequired) {
  const auto mark_of = [&](std::vector<std::string> command, const std::string& option) {
    command.emplace_back("--help");
    std::istringstream help(Run(command).output);
    for (std::string line; std::getline(help, line);) {
      const size_t at = line.find_first_not_of(' ');
      if (at == std::string::npos || line.starts_with("Usage")) continue;
      const std::string name = line.substr(at, line.find_first_of(" =", at) - at);
      if (name != option && !name.ends_with("," + option)) continue;
      return line.find(" REQUIRED") != std::string::npos ? "marked" : "not marked";
    }
    return "not there";
  };
  // "terrace: --output is required"
  const auto first_required = [&](const std::vector<std::string>& command) {
    const std::string error = Run(command).errors;
    const size_t end = error.find(" is required\n");
    if (end == std::string::npos) return std::string();
    const size_t begin = error.rfind(' ', end - 1) + 1;
    return error.substr(begin, end - begin);
  };
  int64_t found = 0;
  const std::vector<std::vector<std::string>> commands = {{"train"},
                                                          {"plan"},
                                                          {"eval"},
                                                          {"generate"},
                                                          {"compare"},
                                                          {"policies"},
                                                          {"presets"},
                                                          {"tokenizer", "train"},
                                                          {"tokenizer", "encode"},
                                                          {"tokenizer", "decode"},
                                                          {"data", "prepare"},
                                                          {"data", "check"}};
  for (const std::vector<std::string>& command : commands) {
    const std::string option = first_required(command);
    if (option.empty()) continue;
    ++found;
    EXPECT_EQ(mark_of(command, option), "marked") << command.back() << " " << option;
  }
  EXPECT_GE(found, 8);
  for (const char* option : {"config", "--output", "--policies"}) {
    EXPECT_EQ(mark_of({"compare"}, option), "marked") << option;
  }
  for (const char* option : {"--lr", "--seeds", "--ablations"}) {
    EXPECT_EQ(mark_of({"compare"}, option), "not marked") << option;
  }
}

// "1 step", not "1 steps".
TEST_F(TrainCommandTest, OneIsNoPlural) {
  std::ofstream(folder_ / "one.txt") << "The sheep jumped over the fence, and over the next.\n";
  const std::vector<std::vector<std::string>> commands = {
      {"data", "prepare", "-o", "one", "--val-fraction", "0", "one.txt"},
      {"train", Config(), "-o", "run", "--threads", "1", "--set", "training.steps=1"},
      {"train", "--resume", "-o", "run", "--set", "training.steps=1"},
      {"eval", "run", "--batches", "1"},
      {"generate", "run", "--prompt", std::string(31, 'x'), "--max-tokens", "5"},
      {"plan", Config(), "--memory", "1B", "--set", "training.threads=1", "--set",
       "training.micro_batch_size=1", "--set", "training.sequence_length=2"},
      {"compare", Config(), "-o", "study", "--policies", "adamw", "--set", "training.steps=1",
       "--set", "training.threads=1", "--lr", "1x,2x"}};
  for (const std::vector<std::string>& command : commands) {
    const ProgramResult result = Run(command);
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    const std::string text = result.output + result.errors + ReadIfThere("study/compare.md");
    EXPECT_THAT(text, Not(ContainsRegex("(^|[ (])1 [a-z-]*[b-df-hj-rtv-ze]s([ ,;:.)]|\n|$)")));
  }
}

TEST_F(TrainCommandTest, OldNamesGiveANoticeAndAreNotKept) {
  const ProgramResult trained = Run({"train", Config(), "-o", "run", "--set", "training.steps=2",
                                     "--set", "training.micro_batch=2"});
  EXPECT_EQ(trained.exit_code, 0) << trained.errors;
  EXPECT_THAT(trained.errors,
              StartsWith("notice: --set: training.micro_batch is called "
                         "training.micro_batch_size now; the next release will refuse the old "
                         "name\n"));
  EXPECT_THAT(ReadFile(folder_ / "run/config.toml"), HasSubstr("\nmicro_batch_size = 2  #"));
}

// A model of MoE layers only needs no ffn_width; what is trained can be used and resumed.
TEST_F(TrainCommandTest, AModelOfMoeLayersOnlyIsReadBack) {
  RunConfig config = SmallRun(*shared_ / "corpus");
  config.model.ffn = {FeedForwardKind::kMoe};
  config.model.ffn_width = 0;
  config.model.expert_width = 32;
  config.training.steps = 2;
  std::ofstream(folder_ / "moe.toml") << ToToml(FieldsOf(config));
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"train", "moe.toml", "-o", "run"},
        {"eval", "run", "--batches", "1"},
        {"generate", "run", "--prompt", "the", "--max-tokens", "2"},
        {"train", "--resume", "-o", "run", "--set", "training.steps=3"},
        {"plan", "run/config.toml"}}) {
    const ProgramResult result = Run(arguments);
    EXPECT_EQ(result.exit_code, 0) << arguments[0] << result.errors;
  }
  std::string text = ReadFile(folder_ / "run/config.toml");
  text.erase(text.find("[optimizer]"));
  std::ofstream(folder_ / "run/config.toml") << text;
  EXPECT_THAT(ErrorOf({"plan", "run/config.toml"}), HasSubstr("is cut off"));
}

TEST_F(TrainCommandTest, PresetsAreListedWithTheirSizes) {
  const ProgramResult presets = Run({"presets"});
  EXPECT_EQ(presets.exit_code, 0) << presets.errors;
  EXPECT_THAT(presets.output,
              HasSubstr("\nskewadam-6.78b       6.78 B    442.54 M  the published"));
  for (const Preset& preset : Presets()) {
    EXPECT_THAT(presets.output, HasSubstr(std::string(preset.name) + " "));
  }
}

TEST_F(TrainCommandTest, SettingsAreAConfiguration) {
  const ProgramResult defaults = Run({"train", "--settings"});
  EXPECT_EQ(defaults.exit_code, 0) << defaults.errors;
  EXPECT_THAT(defaults.output, HasSubstr("\nsteps = 1000  # optimizer steps\n"));
  EXPECT_THAT(defaults.output, HasSubstr("\n# learning_rate =   # peak; the policy's own"));

  const ProgramResult own = Run({"train", Config(), "--set", "training.steps=7", "--settings"});
  EXPECT_THAT(own.output, HasSubstr("\nsteps = 7  # optimizer steps\n"));
  std::ofstream(folder_ / "again.toml") << own.output;
  EXPECT_EQ(Run({"train", folder_ / "again.toml", "--settings"}).output, own.output);
  EXPECT_FALSE(fs::exists(folder_ / "runs"));
}

TEST_F(TrainCommandTest, PoliciesAreListedAndPrintedAsFiles) {
  EXPECT_THAT(Run({"policies"}).output, StartsWith("skewadam                  SkewAdam as "));
  const ProgramResult ready = Run({"policies", "skewadam-uniform"});
  EXPECT_EQ(ready.exit_code, 0) << ready.errors;
  EXPECT_THAT(ready.output, HasSubstr("\n[expert]  # state of a matrix: momentum f32, "));
  EXPECT_THAT(ready.output,
              HasSubstr("\nmomentum = 'f32'  # as it is stored: none, f32, bf16, int8\n"));
  std::ofstream(folder_ / "mine.toml") << ready.output;
  EXPECT_EQ(Run({"policies", "mine.toml"}).output, ready.output);
  EXPECT_EQ(Run({"train", Config(), "-o", "run", "--set", "optimizer.policy=mine.toml", "--set",
                 "training.steps=2"})
                .exit_code,
            0);
  EXPECT_THAT(ErrorOf({"policies", "adam"}), HasSubstr("no policy is called \"adam\""));
  EXPECT_THAT(ErrorOf({"policies", "absent.toml"}), HasSubstr("absent.toml: cannot read"));
}

TEST_F(TrainCommandTest, MistakesGiveOneLineAndChangeNothing) {
  EXPECT_THAT(ErrorOf({}), HasSubstr("subcommand"));
  EXPECT_THAT(ErrorOf({"trian"}), HasSubstr("unknown command trian, did you mean train?"));
  EXPECT_THAT(ErrorOf({"train"}), HasSubstr("name a configuration"));
  EXPECT_THAT(ErrorOf({"train", "absent.toml"}), HasSubstr("absent.toml: cannot read"));
  EXPECT_THAT(ErrorOf({"train", Config(), "--set", "optimizer.learning_rate=0"}),
              HasSubstr("optimizer.learning_rate = 0 is not within"));
  // The folder of the test has to stay empty.
  const TemporaryFolder policies;
  std::ofstream(policies / "partial.toml") << "learning_rate = 1\n[expert]\nrule = \"adamw\"\n";
  EXPECT_THAT(
      ErrorOf({"train", Config(), "--set",
               fmt::format("optimizer.policy=\"{}\"", (policies / "partial.toml").string())}),
      HasSubstr("partial.toml: population embedding has no rule; tok_emb.weight needs one"));
  EXPECT_THAT(ErrorOf({"train", "moe-laptop"}), HasSubstr("moe-laptop: a preset, but "));
  EXPECT_THAT(ErrorOf({"train", Config(), "--sett", "x=1"}), HasSubstr("--sett"));
  EXPECT_THAT(ErrorOf({"train", Config(), "--set", "training.stpes=5"}),
              HasSubstr("unknown key training.stpes, did you mean training.steps?"));
  EXPECT_THAT(ErrorOf({"train", Config(), "--set", "model.kv_heads=3"}),
              HasSubstr("model.kv_heads = 3"));
  EXPECT_THAT(ErrorOf({"train", Config(), "--set", "data.folder=absent"}), HasSubstr("absent"));
  EXPECT_THAT(ErrorOf({"train", Config(), "--set", R"(data.tokenizer="\u0000")"}),
              HasSubstr("data.tokenizer"));
  EXPECT_THAT(ErrorOf({"train", Config(), "--set", "model.vocab_size=200"}),
              HasSubstr("was made for a vocabulary of 257, the model has 200"));
  EXPECT_THAT(ErrorOf({"train", Config(), "-o", "run", "--resume"}),
              HasSubstr("holds no run to resume"));
  EXPECT_THAT(ErrorOf({"eval", "absent"}), HasSubstr("absent: no such folder"));
  EXPECT_THAT(ErrorOf({"eval", "."}), HasSubstr("holds no checkpoint"));
  EXPECT_THAT(ErrorOf({"generate", ".", "--temperature", "-1"}), HasSubstr("temperature = -1"));
  EXPECT_THAT(ErrorOf({"generate", "."}), HasSubstr("holds no checkpoint"));
  EXPECT_THAT(ErrorOf({"generate", ".", "--seed", "-1"}),
              HasSubstr("--seed: -1 is not a whole number within 0 .. 18446744073709551615"));
  EXPECT_THAT(ErrorOf({"generate", ".", "--seed", "18446744073709551616"}), HasSubstr("--seed: "));
  EXPECT_THAT(ErrorOf({"generate", ".", "--seed", "18446744073709551615"}),
              HasSubstr("holds no checkpoint"));
  EXPECT_THAT(ErrorOf({"generate", ".", "--max-tokens", "9223372036854775808"}),
              HasSubstr("--max-tokens: "));
  EXPECT_THAT(ErrorOf({"generate", ".", "--top-k", "-1"}), HasSubstr("--top-k: -1"));
  EXPECT_THAT(ErrorOf({"eval", ".", "--batches", "-1"}), HasSubstr("--batches: -1"));
  EXPECT_THAT(ErrorOf({"train", Config(), "--set", "training=1"}),
              HasSubstr("--set training=1: training is a table of settings, not a setting"));
  EXPECT_THAT(ErrorOf({"train", Config(), "--set", "=3"}), HasSubstr("--set =3: the key is empty"));
  for (const std::string command : {"eval", "generate"}) {
    for (const std::string threads : {"100000", "4097", "-1"}) {
      EXPECT_THAT(ErrorOf({command, ".", "--threads", threads}),
                  HasSubstr("--threads: " + threads + " is not a whole number within 0 .. 4096"));
    }
    EXPECT_THAT(ErrorOf({command, "."}, {"OMP_NUM_THREADS=100000"}),
                HasSubstr("OMP_NUM_THREADS = 100000 is above 4096"));
  }
  EXPECT_TRUE(fs::is_empty(folder_.path()));
}

TEST_F(TrainCommandTest, TheEnvironmentCapsTheInstructionSet) {
  Program::Options options = Options();
  options.environment.push_back("TERRACE_MAX_ISA=avx2");
  const ProgramResult capped =
      Program(Arguments({"train", Config(), "-o", "avx2"}), options).Wait();
  EXPECT_EQ(capped.exit_code, 0) << capped.errors;
  options.environment.back() = "TERRACE_MAX_ISA=sse9";
  const ProgramResult refused = Program(Arguments({"train", Config()}), options).Wait();
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_THAT(refused.errors, HasSubstr("sse9"));
}

TEST_F(TrainCommandTest, WhereStandardStreamsAreClosedNoFileTakesTheirPlace) {
  const std::string command =
      std::string("exec ") + TERRACE_PROGRAM + " train " + Config() + " -o run <&- >&- 2>&-";
  ASSERT_EQ(Program({"/bin/sh", "-c", command}, Options()).Wait().exit_code, 0);
  ASSERT_EQ(Run({"train", Config(), "-o", "open"}).exit_code, 0);
  EXPECT_EQ(RepeatableParts(folder_ / "run"), RepeatableParts(folder_ / "open"));
}

TEST_F(TrainCommandTest, AFolderThatHoldsARunIsNotOverwritten) {
  ASSERT_EQ(Run({"train", Config(), "-o", "run"}).exit_code, 0);
  const auto before = RepeatableParts(folder_ / "run");
  EXPECT_THAT(ErrorOf({"train", Config(), "-o", "run"}), HasSubstr("run: holds a run already"));
  EXPECT_EQ(RepeatableParts(folder_ / "run"), before);
  // Nothing is left to do: resuming changes nothing.
  EXPECT_EQ(Run({"train", "-o", "run", "--resume"}).exit_code, 0);
  EXPECT_EQ(RepeatableParts(folder_ / "run"), before);
}

TEST_F(TrainCommandTest, KilledWhileSavingItResumesBitForBit) {
  const std::vector<std::string> whole = {"train", Config(), "-o",
                                          "whole", "--set",  "training.checkpoint_interval=10"};
  ASSERT_EQ(Run(whole).exit_code, 0);
  // The kill has to fall into the writing of step 20's checkpoint; where it came too late, again.
  bool during_write = false;
  for (int attempt = 0; attempt < 20 && !during_write; ++attempt) {
    fs::remove_all(folder_ / "cut");
    Program program(Arguments({"train", Config(), "-o", "cut"}), Options());
    ASSERT_TRUE(WaitFor(folder_ / "cut/checkpoints/step-20.tmp"));
    program.Send(SIGKILL);
    EXPECT_EQ(program.Wait().signal, SIGKILL);
    during_write = fs::exists(folder_ / "cut/checkpoints/step-20.tmp");
  }
  ASSERT_TRUE(during_write);
  EXPECT_TRUE(fs::exists(folder_ / "cut/checkpoints/step-10"));
  EXPECT_FALSE(fs::exists(folder_ / "cut/checkpoints/step-20"));
  const ProgramResult resumed = Run({"train", Config(), "-o", "cut", "--resume"});
  EXPECT_EQ(resumed.exit_code, 0) << resumed.errors;
  EXPECT_THAT(resumed.errors, HasSubstr("resuming after step 10"));
  EXPECT_EQ(RepeatableParts(folder_ / "whole"), RepeatableParts(folder_ / "cut"));
  EXPECT_FALSE(fs::exists(folder_ / "cut/checkpoints/step-20.tmp"));
}

// Wherever a kill falls, all that is under a checkpoint's name is complete, has the weights of a
// run that nobody disturbed, and is what the next start goes on from.
class KilledTest : public TrainCommandTest, public ::testing::WithParamInterface<const char*> {
 protected:
  static std::vector<fs::path> Unfinished(const fs::path& checkpoints) {
    std::vector<fs::path> found;
    std::error_code none;
    for (const auto& entry : fs::directory_iterator(checkpoints, none)) {
      if (entry.path().extension() == ".tmp") found.push_back(entry.path());
    }
    return found;
  }
  static fs::file_time_type WriteTimeOf(const fs::path& path) {
    std::error_code none;
    return fs::last_write_time(path, none);
  }
};

TEST_P(KilledTest, AnywhereItLosesNothing) {
#ifdef __SANITIZE_ADDRESS__
  constexpr int kKills = 8, kSteps = 200;  // each start takes a second there
#else
  constexpr int kKills = 25, kSteps = 600;
#endif
  const auto arguments = [&](const std::string& output, int64_t keep) {
    return std::vector<std::string>{"train", Config(),
                                    "-o",    output,
                                    "--set", std::string("training.sink=") + GetParam(),
                                    "--set", fmt::format("training.steps={}", kSteps),
                                    "--set", "training.eval_interval=0",
                                    "--set", "training.checkpoint_interval=5",
                                    "--set", fmt::format("training.keep={}", keep)};
  };
  ASSERT_EQ(Run(arguments("whole", 1000)).exit_code, 0);
  const fs::path checkpoints = folder_ / "cut/checkpoints";
  const auto begin = [&] {
    std::vector<std::string> all = arguments("cut", 2);
    if (fs::exists(folder_ / "cut/config.toml")) all.push_back("--resume");
    return Arguments(all);
  };
  int compared = 0, killed_saving = 0;
  for (int kill = 0; kill < kKills;) {
    enum Moment { kStarting, kTraining, kSaved, kSaving, kMoments };
    const auto moment = static_cast<Moment>(kill % kMoments);
    // What a kill left would pass for what this one waits for; the others start beside it.
    if (moment == kSaving) {
      for (const fs::path& unfinished : Unfinished(checkpoints)) fs::remove_all(unfinished);
    }
    const std::optional<fs::path> saved = LatestCheckpoint(checkpoints);
    const auto written = WriteTimeOf(folder_ / "cut/metrics.jsonl");
    Program program(begin(), Options());
    const auto reached = [&] {
      switch (moment) {
        case kTraining:
          return WriteTimeOf(folder_ / "cut/metrics.jsonl") != written;
        case kSaved:
          return LatestCheckpoint(checkpoints) != saved;
        case kSaving:
          return !Unfinished(checkpoints).empty();
        default:
          return true;
      }
    };
    const auto patience = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    while (!reached() && std::chrono::steady_clock::now() < patience) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    const uint64_t longest_microseconds = moment == kSaving  ? 200
                                          : moment == kSaved ? 10'000
                                                             : 100'000;
    const uint64_t draw = RandomBits(7, static_cast<uint64_t>(kill));
    std::this_thread::sleep_for(std::chrono::microseconds(draw % longest_microseconds));
    program.Send(SIGKILL);
    const ProgramResult result = program.Wait();
    if (result.exit_code == 0) {  // it was faster: again from the start
      fs::remove_all(folder_ / "cut");
      continue;
    }
    ASSERT_EQ(result.signal, SIGKILL) << result.errors;
    ++kill;
    if (moment == kSaving && !Unfinished(checkpoints).empty()) ++killed_saving;
    std::error_code none;
    for (const auto& entry : fs::directory_iterator(checkpoints, none)) {
      if (!StepOf(entry.path())) continue;
      const fs::path same = folder_ / "whole/checkpoints" / entry.path().filename();
      for (const char* file : {"model.safetensors", "optimizer.safetensors", "state.json"}) {
        ASSERT_EQ(ReadFile(entry.path() / file), ReadFile(same / file)) << entry.path();
      }
      ++compared;
    }
  }
  EXPECT_GE(compared, kKills);
  EXPECT_GE(killed_saving, kKills / 8);  // of a quarter that were meant to be
  RecordProperty("killed_saving", killed_saving);
  const ProgramResult resumed = Program(begin(), Options()).Wait();
  EXPECT_EQ(resumed.exit_code, 0) << resumed.errors;
  EXPECT_EQ(RepeatableParts(folder_ / "whole"), RepeatableParts(folder_ / "cut"));
}
INSTANTIATE_TEST_SUITE_P(, KilledTest, ::testing::Values("accumulate", "release"),
                         [](const auto& test) { return std::string(test.param); });

TEST_F(TrainCommandTest, AFolderThatTakesNoMoreCheckpointsIsNamedAndKeepsThem) {
  Program program(Arguments({"train", Config(), "-o", "run", "--set", "training.steps=100000",
                             "--set", "training.eval_interval=0"}),
                  Options());
  ASSERT_TRUE(WaitFor(folder_ / "run/checkpoints/step-10"));
  // As a file system that turns read-only, which binds root as well.
  fs::rename(folder_ / "run/checkpoints", folder_ / "kept");
  std::ofstream(folder_ / "run/checkpoints") << "no folder";
  const ProgramResult result = program.Wait();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.errors,
              AllOf(HasSubstr("terrace: run/checkpoints"), EndsWith("Not a directory\n")));
  fs::remove(folder_ / "run/checkpoints");
  fs::rename(folder_ / "kept", folder_ / "run/checkpoints");
  EXPECT_EQ(Run({"eval", "run"}).exit_code, 0);
  const int64_t last = StepOf(*LatestCheckpoint(folder_ / "run/checkpoints")).value();
  const ProgramResult resumed = Run({"train", Config(), "-o", "run", "--resume", "--set",
                                     fmt::format("training.steps={}", last + 1)});
  EXPECT_EQ(resumed.exit_code, 0) << resumed.errors;
}

TEST_F(TrainCommandTest, InterruptsSaveAndExitWithZero) {
  const auto arguments = [&](const std::string& output) {
    return std::vector<std::string>{"train", Config(),
                                    "-o",    output,
                                    "--set", "training.steps=200",
                                    "--set", "training.checkpoint_interval=0"};
  };
  ASSERT_EQ(Run(arguments("whole")).exit_code, 0);
  const std::pair<int, const char*> signals[] = {
      {SIGINT, "int"}, {SIGTERM, "term"}, {SIGHUP, "hup"}, {SIGUSR1, "usr1"}};
  for (const auto& [signal, signal_name] : signals) {
    const std::string name = signal_name;
    Program program(Arguments(arguments(name)), Options());
    ASSERT_TRUE(WaitFor(folder_ / name / "metrics.jsonl"));
    EXPECT_THAT(ErrorOf({"train", "--resume", "-o", name}),
                HasSubstr(name + ": another process is training in it"));
    // Twice, as wrappers do that signal a process and then its group.
    program.Send(signal);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    program.Send(signal);
    const ProgramResult result = program.Wait();
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    EXPECT_THAT(result.output, HasSubstr("interrupted and saved"));
    std::vector<std::string> resume = arguments(name);
    resume.push_back("--resume");
    const ProgramResult resumed = Run(resume);
    EXPECT_EQ(resumed.exit_code, 0) << resumed.errors;
    EXPECT_EQ(RepeatableParts(folder_ / "whole"), RepeatableParts(folder_ / name));
  }
}

// What a batch system sends while the run has not begun yet ends it before its first step, and
// --resume begins it.
TEST_F(TrainCommandTest, ASignalDuringTheStartStopsBeforeTheFirstStep) {
  ASSERT_EQ(Run({"train", Config(), "-o", "whole"}).exit_code, 0);
  for (const int signal : {SIGUSR1, SIGHUP}) {
    fs::remove_all(folder_ / "run");
    Program::Options options = Options();
    options.pending_signal = signal;
    const ProgramResult result =
        Program(Arguments({"train", Config(), "-o", "run"}), options).Wait();
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    EXPECT_THAT(result.output, StartsWith("run: 0 of 20 steps, interrupted and saved"));
    EXPECT_THAT(result.errors, Not(HasSubstr("step 1/20")));
    const ProgramResult resumed = Run({"train", "--resume", "-o", "run"});
    EXPECT_EQ(resumed.exit_code, 0) << resumed.errors;
    EXPECT_EQ(RepeatableParts(folder_ / "whole"), RepeatableParts(folder_ / "run"));
  }
}

// From the first moment: where nothing but the configuration has been opened, and nobody takes
// signals yet. An interrupt still ends the process there.
TEST_F(TrainCommandTest, AnnouncementsAreHeldFromTheFirstMomentOn) {
  const fs::path pipe = folder_ / "pipe.toml";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  for (const int signal : {SIGUSR1, SIGHUP, SIGINT}) {
    Program program(Arguments({"train", "--settings", "pipe.toml"}), Options());
    std::ofstream config(pipe);  // waits for the reader
    program.Send(signal);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    std::signal(SIGPIPE, SIG_IGN);
    config << ReadFile(Config());
    config.close();
    const ProgramResult result = program.Wait();
    EXPECT_EQ(result.signal, signal == SIGINT ? SIGINT : 0);
    EXPECT_EQ(result.exit_code, signal == SIGINT ? -1 : 0) << result.errors;
  }
  std::signal(SIGPIPE, SIG_DFL);
}

TEST_F(TrainCommandTest, AClosedTerminalSavesTheRun) {
  int terminal = -1;
  const std::string folder = folder_.path();
  std::vector<std::string> arguments =
      Arguments({"train", Config(), "-o", "run", "--set", "training.steps=100000", "--set",
                 "training.checkpoint_interval=0"});
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  const pid_t pid = forkpty(&terminal, nullptr, nullptr, nullptr);
  ASSERT_GE(pid, 0);
  if (pid == 0) {
    if (chdir(folder.c_str()) == 0) execv(argv[0], argv.data());
    _exit(127);
  }
  const bool started = WaitFor(folder_ / "run/metrics.jsonl");
  // The kernel sends SIGHUP, and what is written from now on fails.
  close(terminal);
  int status = 0;
  waitpid(pid, &status, 0);
  ASSERT_TRUE(started);
  EXPECT_TRUE(WIFEXITED(status)) << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_TRUE(LatestCheckpoint(folder_ / "run/checkpoints").has_value());
}

TEST_F(TrainCommandTest, WhereNobodyReadsTheRunGoesOn) {
  const std::string command = std::string("{ ") + TERRACE_PROGRAM + " train " + Config() +
                              " -o run 2>&1; echo $? > exit-code; } | true";
  ASSERT_EQ(Program({"/bin/sh", "-c", command}, Options()).Wait().exit_code, 0);
  ASSERT_TRUE(WaitFor(folder_ / "run/checkpoints/step-20"));
  ASSERT_TRUE(WaitFor(folder_ / "exit-code"));
  EXPECT_EQ(ReadFile(folder_ / "exit-code"), "0\n");
}

TEST_F(TrainCommandTest, AFullDiskEndsInOneLineAndLosesNothing) {
  ASSERT_EQ(Run({"train", Config(), "-o", "run", "--set", "training.steps=10", "--set",
                 "optimizer.schedule=constant", "--set", "optimizer.warmup_fraction=0"})
                .exit_code,
            0);
  const std::string before = ReadFile(folder_ / "run/checkpoints/step-10/model.safetensors");
  Program::Options options = Options();
  options.max_file_bytes = 30'000;
  const ProgramResult result =
      Program(Arguments({"train", Config(), "-o", "run", "--resume"}), options).Wait();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.errors, HasSubstr("terrace: "));
  EXPECT_THAT(result.errors, EndsWith("cannot write: File too large\n"));
  EXPECT_EQ(ReadFile(folder_ / "run/checkpoints/step-10/model.safetensors"), before);
  EXPECT_FALSE(fs::exists(folder_ / "run/checkpoints/step-20"));
  EXPECT_FALSE(fs::exists(folder_ / "run/checkpoints/step-20.tmp"));
  EXPECT_EQ(Run({"train", Config(), "-o", "run", "--resume"}).exit_code, 0);
}

TEST_F(TrainCommandTest, ADiskWithoutRoomForCheckpointsIsNamedBeforeTheFirstStep) {
  const std::string command =
      std::string("mkdir small && mount -t tmpfs -o size=256k tmpfs small || exit 77; ") +
      TERRACE_PROGRAM + " train " + Config() + " -o small/run; code=$?; ls -A small; exit $code";
  const ProgramResult result =
      Program({"/usr/bin/unshare", "-m", "/bin/sh", "-c", command}, Options()).Wait();
  if (result.exit_code == 77 || result.errors.starts_with("unshare: ")) {
    GTEST_SKIP() << "cannot mount: " << result.errors;
  }
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.output, "");
  EXPECT_THAT(result.errors, AllOf(StartsWith("terrace: small/run/checkpoints: "),
                                   HasSubstr(" MiB are needed for "),
                                   HasSubstr("and 0.2 MiB are free"), EndsWith("all the same\n")));
}

TEST_F(TrainCommandTest, ADamagedCheckpointIsNamed) {
  ASSERT_EQ(Run({"train", Config(), "-o", "run"}).exit_code, 0);
  const fs::path model = folder_ / "run/checkpoints/step-20/model.safetensors";
  std::string bytes = ReadFile(model);
  bytes[bytes.size() - 100] = static_cast<char>(bytes[bytes.size() - 100] ^ 1);
  std::ofstream(model, std::ios::binary) << bytes;
  EXPECT_THAT(ErrorOf({"eval", "run"}), HasSubstr("is damaged"));
  EXPECT_THAT(ErrorOf({"generate", "run", "--prompt", "x"}), HasSubstr("is damaged"));
  EXPECT_THAT(LateErrorOf({"train", "-o", "run", "--resume", "--set", "training.steps=30"}),
              AllOf(HasSubstr("step-20/model.safetensors: tensor "),
                    EndsWith("step-20 the run goes on from what was saved before it\n")));
  // The checkpoint before it serves.
  fs::remove_all(folder_ / "run/checkpoints/step-20");
  const ProgramResult resumed = Run({"train", "-o", "run", "--resume"});
  EXPECT_EQ(resumed.exit_code, 0);
  EXPECT_THAT(resumed.errors,
              HasSubstr("steps after 10 are dropped, to be taken again (lines: 10)"));
  fs::remove(folder_ / "run/metrics.jsonl");
  EXPECT_THAT(Run({"train", "-o", "run", "--resume", "--set", "training.steps=21"}).errors,
              HasSubstr("metrics.jsonl: has no lines of steps 1 to 20"));
}

TEST_F(TrainCommandTest, ADamagedConfigurationOfACheckpointIsNamedWithWhatHelps) {
  ASSERT_EQ(Run({"train", Config(), "-o", "run"}).exit_code, 0);
  const fs::path in_checkpoint = folder_ / "run/checkpoints/step-20/config.toml";
  const fs::path in_run = folder_ / "run/config.toml";
  const std::string whole = ReadFile(in_checkpoint);
  const std::string cut = whole.substr(0, whole.find("[training]"));
  std::ofstream(in_checkpoint) << cut;
  EXPECT_THAT(ErrorOf({"train", "-o", "run", "--resume"}),
              AllOf(HasSubstr("step-20/config.toml: is cut off"),
                    EndsWith("step-20 the run goes on from what was saved before it\n")));
  std::ofstream(in_checkpoint) << whole;
  std::ofstream(in_run) << cut;
  EXPECT_THAT(ErrorOf({"train", "-o", "run", "--resume", "--set", "training.steps=30"}),
              AllOf(HasSubstr("run/config.toml: is cut off"),
                    EndsWith("step-20/config.toml is the configuration of its last checkpoint\n")));
  std::ofstream(in_run) << whole;
  EXPECT_THAT(ErrorOf({"train", "-o", "run", "--resume", "--set", "training.stpes=30"}),
              Not(HasSubstr("last checkpoint")));
}

// As the kernel sees the process: the plan, and little for the program itself.
TEST_F(TrainCommandTest, ResidentMemoryIsThePlan) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "AddressSanitizer takes memory of its own";
#endif
  RunConfig config = SmallRun(*shared_ / "corpus");
  config.model = PresetNamed("moe-110m");
  config.training.steps = 2;
  config.training.eval_interval = 1;
  for (const SinkKind sink : {SinkKind::kAccumulate, SinkKind::kRelease}) {
    config.training.sink = sink;
    const std::string name = sink == SinkKind::kRelease ? "release" : "accumulate";
    std::ofstream(folder_ / (name + ".toml")) << ToToml(FieldsOf(config));
    const ProgramResult result = Run({"train", name + ".toml", "-o", name});
    ASSERT_EQ(result.exit_code, 0) << result.errors;
    const auto planned = MetricOf(folder_ / name / "metrics.jsonl", "planned_peak_bytes");
    EXPECT_EQ(planned, MetricOf(folder_ / name / "metrics.jsonl", "ledger_peak_bytes"));
    const double excess = static_cast<double>(result.peak_resident_bytes) - planned.at(0);
    EXPECT_LT(std::abs(excess), 150.0 * (1 << 20)) << name << ": " << planned.at(0);
    fs::remove_all(folder_ / name);
  }
}

TEST_F(TrainCommandTest, WhatDoesNotFitInMemoryIsRefused) {
  for (const char* setting : {"model.vocab_size=2147483647", "model.ffn_width=2147483647"}) {
    EXPECT_THAT(LateErrorOf({"train", Config(), "-o", "run", "--set", setting}),
                AllOf(StartsWith("terrace: memory: "), HasSubstr(" GiB are needed and "),
                      EndsWith("--overcommit starts all the same\n")))
        << setting;
  }
  EXPECT_THAT(ErrorOf({"train", Config(), "-o", "run", "--set", "model.vocab_size=2147483647",
                       "--set", "model.width=2147483520"}),
              HasSubstr("parameters, more than 1e+15"));
  EXPECT_TRUE(fs::is_empty(folder_.path()));
  // More than processors can address: the attempt is made, and fails.
  EXPECT_THAT(LateErrorOf({"train", Config(), "-o", "run", "--overcommit", "--set",
                           "model.ffn_width=2147483647", "--set", "model.width=16384"}),
              HasSubstr("cannot map "));
  EXPECT_EQ(Run({"train", Config(), "-o", "run"}).exit_code, 0);
}

// One that made the folder and no step.
TEST_F(TrainCommandTest, AStartThatCameToNothingCanBeRepeated) {
  fs::create_directories(folder_ / "run/checkpoints");
  std::ofstream(folder_ / "run/config.toml.tmp") << "half";
  EXPECT_EQ(Run({"train", Config(), "-o", "run"}).exit_code, 0);
  std::ofstream(folder_ / "mine") << "x";
  EXPECT_THAT(ErrorOf({"train", Config(), "-o", "."}), HasSubstr("not an empty folder"));
}

TEST_F(TrainCommandTest, DamagedValidationDataIsRefusedAtTheStart) {
  fs::copy(*shared_ / "corpus", folder_ / "corpus", fs::copy_options::recursive);
  std::string shard = ReadFile(folder_ / "corpus/val-00000.bin");
  shard[shard.size() - 40] = static_cast<char>(0xff);
  shard[shard.size() - 39] = static_cast<char>(0xff);
  std::ofstream(folder_ / "corpus/val-00000.bin", std::ios::binary) << shard;
  EXPECT_THAT(ErrorOf({"train", Config(), "-o", "run", "--set", "data.folder=corpus", "--set",
                       "training.eval_batches=1000"}),
              HasSubstr("val-00000.bin"));
  EXPECT_FALSE(fs::exists(folder_ / "run"));
}

TEST_F(TrainCommandTest, EvaluatesOnlyOnTokensOfTheModelsOwnKind) {
  ASSERT_EQ(Run({"train", Config(), "-o", "run"}).exit_code, 0);
  const fs::path corpus = *shared_ / "corpus";
  const ProgramResult same = Run({"eval", "run"});
  EXPECT_EQ(same.errors, "");
  fs::copy(corpus, folder_ / "other", fs::copy_options::recursive);
  EXPECT_EQ(Run({"eval", "run", "--data", "other"}).errors, "");
  // A file on its own is fine too, whatever it is named for.
  EXPECT_EQ(Run({"eval", "run", "--data", "other/train-00000.bin", "--batches", "1"}).exit_code, 0);
  TokenizerSpec spec = Tokenizer::Bytes().spec();
  std::swap(spec.tokens['a'], spec.tokens['b']);
  std::ofstream(folder_ / "other/tokenizer.json") << ToTokenizerJson(Tokenizer(spec));
  for (const char* data : {"other", "other/val-00000.bin"}) {
    EXPECT_THAT(ErrorOf({"eval", "run", "--data", data}),
                HasSubstr("its ids are of another tokenizer"));
  }
  // A checkpoint alone remembers.
  fs::copy(folder_ / "run/checkpoints/step-20", folder_ / "alone");
  EXPECT_THAT(ErrorOf({"eval", "alone", "--data", "other"}),
              HasSubstr("its ids are of another tokenizer"));
  fs::remove(folder_ / "other/tokenizer.json");
  const ProgramResult unknown = Run({"eval", "run", "--data", "other"});
  EXPECT_EQ(unknown.exit_code, 0);
  EXPECT_THAT(unknown.errors, HasSubstr("comes without a tokenizer"));
  EXPECT_EQ(unknown.output.substr(unknown.output.find('\n')),
            same.output.substr(same.output.find('\n')));
}

// Names from before UTF-8, which TOML cannot hold.
TEST_F(TrainCommandTest, FoldersNeedNotBeNamedInUtf8) {
  const fs::path latin = folder_ /
                         "donn\xe9"
                         "es";
  fs::create_directory(latin);
  fs::copy(*shared_ / "corpus", latin / "corpus", fs::copy_options::recursive);
  const auto run_there = [&](const std::vector<std::string>& arguments) {
    Program::Options options = Options();
    options.folder = latin;
    return Program(Arguments(arguments), options).Wait();
  };
  EXPECT_EQ(run_there({"train", Config(), "-o", "run", "--set", "data.folder=corpus"}).exit_code,
            0);
  EXPECT_EQ(run_there({"eval", "run"}).exit_code, 0);
  EXPECT_EQ(run_there({"train", "--resume", "-o", "run", "--set", "training.steps=21"}).exit_code,
            0);
  EXPECT_THAT(ErrorOf({"train", Config(), "-o", "run", "--set",
                       "data.folder=" + (latin / "corpus").string()}),
              HasSubstr("data.folder = "));
  EXPECT_FALSE(fs::exists(folder_ / "run"));
}

TEST_F(TrainCommandTest, DamageBesideTheTensorsIsNamedOrKept) {
  ASSERT_EQ(Run({"train", Config(), "-o", "run"}).exit_code, 0);
  std::string metrics = ReadFile(folder_ / "run/metrics.jsonl");
  metrics.replace(metrics.find("\"step\":5,"), 6, "\"stop\"");
  std::ofstream(folder_ / "run/metrics.jsonl") << metrics;
  EXPECT_EQ(Run({"train", "-o", "run", "--resume", "--set", "training.steps=21"}).exit_code, 0);
  EXPECT_THAT(ReadFile(folder_ / "run/metrics.jsonl"), StartsWith(metrics));

  const fs::path state = folder_ / "run/checkpoints/step-21/state.json";
  const std::string text = ReadFile(state);
  std::ofstream(state) << text.substr(0, text.rfind('}'))
                       << ", \"z\": " << std::string(1'000'000, '[') << std::string(1'000'000, ']')
                       << "}";
  EXPECT_THAT(LateErrorOf({"train", "-o", "run", "--resume", "--set", "training.steps=30"}),
              HasSubstr("state.json: is damaged"));
  // The run's configuration says one thing, the checkpoint's another.
  std::string config = ReadFile(folder_ / "run/config.toml");
  config.replace(config.find("seed = "), 8, "seed = 9");
  std::ofstream(folder_ / "run/config.toml") << config;
  EXPECT_THAT(ErrorOf({"train", "-o", "run", "--resume"}), HasSubstr("training.seed"));
}

TEST_F(TrainCommandTest, AFolderThatCannotBeMadeIsNamed) {
  EXPECT_THAT(ErrorOf({"train", Config(), "-o", "/proc/run"}),
              HasSubstr("/proc/run: cannot create"));
}

}  // namespace
}  // namespace terrace
