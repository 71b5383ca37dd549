#include "train/config.h"

#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cctype>
#include <fstream>
#include <sstream>
#include <tuple>

#include "core/error.h"
#include "model/presets.h"
#include "support/message_of.h"
#include "support/temporary_folder.h"

namespace terrace {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr std::string_view kGood = R"([model]
vocab_size = 256
max_positions = 64
width = 32
layers = 2
heads = 4
kv_heads = 2
ffn = ["dense", "moe"]
ffn_width = 48
experts = 4
norm = "layernorm"
[model.router]
top_k = 2
[data]
folder = "shards"
[training]
sequence_length = 16
precision = "bf16"
[optimizer]
policy = "adamw"
learning_rate = 1e-3
[optimizer.populations.router]
weight_decay = 0
)";

class ConfigTest : public ::testing::Test {
 protected:
  RunConfig Load(std::string_view text, const std::vector<std::string>& assignments = {}) {
    path_ = folder_ / "run.toml";
    std::ofstream(path_) << text;
    return LoadConfig(path_, assignments);
  }
  std::string MessageOf(std::string_view text, const std::vector<std::string>& assignments = {}) {
    try {
      Load(text, assignments);
    } catch (const Error& error) {
      // An assignment is shown as it was given.
      std::string told = error.what();
      for (const std::string& assignment : assignments) {
        if (const size_t at = told.find(assignment); at != std::string::npos) {
          told.replace(at, assignment.size(), "...");
        }
      }
      EXPECT_EQ(told.find('\n'), std::string::npos) << told;
      return error.what();
    }
    return "";
  }
  // What LoadSavedConfig makes of a text, and what it has against it.
  RunConfig LoadSaved(std::string_view text, const std::vector<std::string>& assignments = {}) {
    path_ = folder_ / "config.toml";
    std::ofstream(path_) << text;
    return LoadSavedConfig(path_, assignments);
  }
  std::string MessageOfSaved(std::string_view text) {
    return terrace::MessageOf([&] { LoadSaved(text); });
  }

  TemporaryFolder folder_;
  std::filesystem::path path_;
};

TEST_F(ConfigTest, ReadsEveryKindOfValue) {
  const RunConfig config = Load(kGood);
  EXPECT_EQ(config.model.width, 32);
  EXPECT_EQ(config.model.ffn,
            (std::vector<FeedForwardKind>{FeedForwardKind::kDense, FeedForwardKind::kMoe}));
  EXPECT_EQ(config.model.norm, NormKind::kLayerNorm);
  EXPECT_EQ(config.model.weight_dtype, DType::kBF16);
  EXPECT_EQ(config.model.router.top_k, 2);
  EXPECT_EQ(config.optimizer.policy, "adamw");
  EXPECT_EQ(config.optimizer.learning_rate, 1e-3f);
  EXPECT_FALSE(config.optimizer.weight_decay.has_value());
  EXPECT_EQ(config.optimizer.populations[static_cast<size_t>(Population::kRouter)],
            (Settings{{"weight_decay", 0.0}}));
  EXPECT_EQ(config.training.seed, 1);
  EXPECT_TRUE(std::filesystem::path(config.data.folder).is_absolute());
}

TEST_F(ConfigTest, AssignmentsComeLastAndNeedNoQuotes) {
  const RunConfig config =
      Load(kGood, {"model.width=64", "optimizer.policy=skewadam", "optimizer.schedule=\"wsd\"",
                   "model.ffn=[\"moe\"]", "training.activation_checkpointing=true",
                   "optimizer.weight_decay=0.25", "data.tokenizer=bytes", "model.width=128"});
  EXPECT_EQ(config.model.width, 128);
  EXPECT_EQ(config.optimizer.policy, "skewadam");
  EXPECT_EQ(config.optimizer.schedule, ScheduleKind::kWsd);
  EXPECT_EQ(config.model.ffn, std::vector<FeedForwardKind>{FeedForwardKind::kMoe});
  EXPECT_TRUE(config.training.activation_checkpointing);
  EXPECT_EQ(config.optimizer.weight_decay, 0.25f);
  EXPECT_EQ(config.data.tokenizer, "bytes");
}

TEST_F(ConfigTest, APresetIsWhatOtherKeysChange) {
  const RunConfig config = Load(
      "[model]\nwidth = 128\npreset = \"moe-laptop\"\n[data]\nfolder = \"shards\"\n"
      "[training]\nprecision = \"bf16\"\n");
  const ModelConfig preset = PresetNamed("moe-laptop");
  EXPECT_EQ(config.model.width, 128);
  EXPECT_EQ(config.model.weight_dtype, DType::kBF16);
  EXPECT_EQ(config.model.experts, preset.experts);
  EXPECT_EQ(config.model.router.z_coefficient, preset.router.z_coefficient);
}

TEST_F(ConfigTest, WeightDecayAndLearningRateComeFromThePolicyUnlessTold) {
  const auto decay_of = [](const RunConfig& config, Population population) {
    for (const PolicyEntry& entry : ResolvedRun(config).policy.entries) {
      if (entry.population == population) return entry.weight_decay;
    }
    return -1.0f;
  };
  const RunConfig plain = Load(kGood);
  EXPECT_EQ(decay_of(plain, Population::kExpert), 0.1f);
  EXPECT_EQ(decay_of(plain, Population::kRouter), 0.0f);  // populations.router
  EXPECT_EQ(ResolvedRun(plain).schedule.peak, 1e-3f);
  const RunConfig told = Load(kGood, {"optimizer.weight_decay=0.5"});
  EXPECT_EQ(decay_of(told, Population::kExpert), 0.5f);
  EXPECT_EQ(decay_of(told, Population::kRouter), 0.0f);
}

constexpr std::string_view kPolicy = R"(learning_rate = 2e-3
base = "skewadam"
[default]
weight_decay = 0.3
[expert]
momentum = "bf16"
)";

TEST_F(ConfigTest, PopulationsLieOverThePolicy) {
  const auto entry_of = [](const RunConfig& config, Population population) {
    for (const PolicyEntry& entry : ResolvedRun(config).policy.entries) {
      if (entry.population == population) return entry;
    }
    return PolicyEntry{};
  };
  const RunConfig config =
      Load(kGood, {"optimizer.weight_decay=0.5", "optimizer.populations.expert.lr_multiplier=2",
                   "optimizer.populations.expert.beta1=0.8",
                   "optimizer.populations.norm={rule = \"skewadam\", momentum = \"none\"}",
                   "optimizer.populations.head.rule=skewadam", "model.tied_head=false"});
  const PolicyEntry expert = entry_of(config, Population::kExpert);
  EXPECT_EQ(expert.rule, "adamw");
  EXPECT_EQ(expert.weight_decay, 0.5f);
  EXPECT_EQ(expert.lr_multiplier, 2);
  EXPECT_EQ(expert.settings, (Settings{{"beta1", 0.8}, {"beta2", 0.95}}));
  EXPECT_EQ(entry_of(config, Population::kNorm).settings, (Settings{{"momentum", "none"}}));
  EXPECT_EQ(entry_of(config, Population::kHead).rule, "skewadam");
  EXPECT_EQ(entry_of(config, Population::kRouter).weight_decay, 0);
}

TEST_F(ConfigTest, APolicyFileBecomesPartOfTheConfiguration) {
  const std::filesystem::path file = folder_ / "mine.toml";
  const std::vector<std::string> assignments = {"optimizer.policy=" + file.string()};
  const std::string_view good = kGood.substr(0, kGood.find("[optimizer]"));
  std::ofstream(file) << kPolicy;
  RunConfig config = Load(good, assignments);
  EXPECT_EQ(config.optimizer.policy, "own");
  EXPECT_EQ(config.policy, ParsePolicy(kPolicy, "mine.toml"));
  EXPECT_EQ(ResolvedRun(config).schedule.peak, 2e-3f);
  EXPECT_EQ(ResolvedRun(config).policy.entries[0].weight_decay, 0.3f);

  // The file is not needed any more.
  std::filesystem::remove(file);
  const RunConfig again = Load(ToToml(FieldsOf(config)));
  EXPECT_EQ(again.policy, config.policy);
  CheckSameRun(config, again);

  // A run that is resumed by its first configuration is compared with what the file said then.
  std::ofstream(file) << "base = \"skewadam\"\n[expert]\nmomentum = \"bf16\"\n";
  CheckSameRun(config, Load(good, assignments));  // decay and learning rate may change
  std::ofstream(file) << "base = \"skewadam\"\n";
  EXPECT_THROW(CheckSameRun(config, Load(good, assignments)), Error);
}

TEST_F(ConfigTest, ErrorsOfAPolicyFileNameIt) {
  const std::filesystem::path file = folder_ / "mine.toml";
  const auto message = [&](std::string_view policy, std::string_view more = "") {
    std::ofstream(file) << policy;
    std::string text(kGood.substr(0, kGood.find("[optimizer]")));
    return MessageOf(text.append(more), {"optimizer.policy=" + file.string()});
  };
  EXPECT_EQ(message(kPolicy), "");
  EXPECT_THAT(message("base = 3"), HasSubstr("mine.toml:1: base = 3 has to be one of skewadam,"));
  EXPECT_THAT(message("base = \"adamw\"\n[norm]\neps = 2"),
              HasSubstr("mine.toml: population norm: adamw: eps = 2 is not within 1e-30 .. 1"));
  EXPECT_THAT(message(kPolicy, "[policy.norm]\neps = 1e-9"),
              HasSubstr("mine.toml and the tables of [policy] exclude each other"));
}

TEST_F(ConfigTest, TheWrittenConfigReadsBackAsItself) {
  RunConfig config = Load(kGood, {"optimizer.learning_rate=0.00012345679", "optimizer.policy=own",
                                  "policy.base=skewadam", "policy.default.eps=1e-30",
                                  "policy.expert={momentum = \"none\", lr_multiplier = 0.1}",
                                  "optimizer.populations.norm.eps_mode=relative"});
  const std::string text = ToToml(FieldsOf(config));
  RunConfig again = Load(text);
  EXPECT_EQ(ToToml(FieldsOf(again)), text);
  EXPECT_EQ(again.optimizer.learning_rate, config.optimizer.learning_rate);
  EXPECT_EQ(again.model.ffn, config.model.ffn);
  EXPECT_EQ(again.policy, config.policy);
  EXPECT_EQ(again.optimizer.populations, config.optimizer.populations);
  CheckSameRun(config, again);
}

TEST_F(ConfigTest, KeysOfVeryManyPartsAreRefused) {
  std::string key = "a";
  for (int part = 0; part < 100'000; ++part) key += ".a";
  EXPECT_THAT(MessageOf(key + " = 1\n"), HasSubstr("more than 4096 dots"));
}

TEST_F(ConfigTest, FieldsHaveDistinctKeysAndTargets) {
  RunConfig config = Load(kGood);
  const Fields fields = FieldsOf(config);
  for (size_t i = 0; i < fields.size(); ++i) {
    EXPECT_NE(std::string(fields[i].doc), "") << fields[i].key;
    for (size_t j = 0; j < i; ++j) {
      EXPECT_NE(fields[i].key, fields[j].key);
      std::visit(
          [&](const auto& a) {
            using Target = std::decay_t<decltype(a)>;
            if constexpr (std::is_pointer_v<Target>) {
              const Target* b = std::get_if<Target>(&fields[j].target);
              EXPECT_FALSE(b != nullptr && *b == a) << fields[i].key << " and " << fields[j].key;
            }
          },
          fields[i].target);
    }
  }
}

TEST_F(ConfigTest, MistakesInTheFileAreNamedWithTheirLine) {
  struct Case {
    std::string_view old_text, new_text;
    std::string_view message;
  };
  const Case kCases[] = {
      {"width = 32", "widht = 32",
       "run.toml:4: unknown key model.widht, did you mean model.width?"},
      {"top_k = 2", "topk = 2",
       "run.toml:13: unknown key model.router.topk, did you mean model.router.top_k?"},
      {"[data]", "[dta]", "run.toml:14: unknown key dta, did you mean data?"},
      {"[model]\n", "steps = 5\n[model]\n",
       "run.toml:1: unknown key steps, did you mean training.steps?"},
      {"width = 32", "width = \"32\"", "run.toml:4: model.width = '32' has to be a whole number"},
      {"width = 32", "width = 3.5", "run.toml:4: model.width = 3.5 has to be a whole number"},
      {"width = 32", "width = 0", "run.toml:4: model.width = 0 is not within 1 .. 2147483647"},
      {"width = 32", "width = -7", "run.toml:4: model.width = -7 is not within"},
      {"width = 32", "width = 99999999999999999999", "run.toml:4: "},
      {"width = 32", "width = {a = 1}", "run.toml:4: model.width = "},
      {"width = 32", "width = 32\nwidth = 33", "run.toml:5: "},
      {"width = 32", "width = ", "run.toml:4: "},
      {"\"layernorm\"", "\"batchnorm\"",
       "run.toml:11: model.norm = 'batchnorm' has to be one of layernorm, rmsnorm"},
      {"\"layernorm\"", "3", "run.toml:11: model.norm = 3 has to be one of layernorm, rmsnorm"},
      {"[\"dense\", \"moe\"]", "[]", "model.ffn = [] has to be a list of at least one name"},
      {"[\"dense\", \"moe\"]", "[\"dense\", 1]", "model.ffn = 1 has to be one of dense, moe"},
      {"learning_rate = 1e-3", "learning_rate = nan",
       "run.toml:21: optimizer.learning_rate = nan has to be a number"},
      {"learning_rate = 1e-3", "learning_rate = inf", "optimizer.learning_rate = inf has to be"},
      {"learning_rate = 1e-3", "learning_rate = -1", "optimizer.learning_rate = -1 is not within"},
      {"learning_rate = 1e-3", "max_norm = 0",
       "optimizer.max_norm = 0 is not a finite number of at least 1e-12"},
      {"learning_rate = 1e-3", "policy = true", "run.toml:21: "},
      {"policy = \"adamw\"", "policy = true", "optimizer.policy = true has to be text in quotes"},
      {"policy = \"adamw\"", "policy = \"adamv\"", "run.toml: no policy is called \"adamv\""},
      {"learning_rate = 1e-3", "schedule = \"wsd\"\nwarmup_fraction = 0.5\ndecay_fraction = 0.6",
       "run.toml: optimizer.warmup_fraction = 0.5 and optimizer.decay_fraction = 0.6 are more than "
       "1 "
       "together"},
      {"learning_rate = 1e-3", "learning_rate = 0",
       "run.toml:21: optimizer.learning_rate = 0 is not within 1e-30 .. 1000"},
      {"learning_rate = 1e-3", "learning_rate = 1e-50",
       "run.toml:21: optimizer.learning_rate = 0 is not within 1e-30 .. 1000"},
      {"[model]\n", "[model]\npreset = \"moe-labtop\"\n", "the nearest is \"moe-laptop\""},
      {"folder = \"shards\"", "", "run.toml: data.folder is missing"},
      {"sequence_length = 16", "sequence_length = 65",
       "run.toml: training.sequence_length = 65 exceeds model.max_positions = 64"},
      {"sequence_length = 16",
       "sequence_length = 16\nmicro_batch_size = 1_000_000\ngradient_accumulation_steps = 10_000",
       "training.micro_batch_size x sequence_length x gradient_accumulation_steps"},
      {"populations.router", "populations.routre",
       "run.toml:22: unknown key optimizer.populations.routre, did you mean "
       "optimizer.populations.router?"},
      {"weight_decay = 0", "weight_decya = 0",
       "run.toml: optimizer.populations.router: adamw: unknown setting weight_decya, did you mean "
       "weight_decay?"},
      {"weight_decay = 0", "weight_decay = [0]",
       "run.toml:23: optimizer.populations.router.weight_decay = [ 0 ] has to be a number, text"},
      {"weight_decay = 0", "beta1 = 1",
       "run.toml: optimizer.populations.router: adamw: beta1 = 1 is not within 0 .. 0.9999999 "
       "(population of layers.1.ff.router.weight)"},
      {"[optimizer.populations.router]\nweight_decay = 0", "[optimizer.populations]\nrouter = 5",
       "run.toml:23: optimizer.populations.router = 5 has to be a table"},
      {"policy = \"adamw\"", "policy = \"absent.toml\"", "run.toml: absent.toml: cannot read"},
      {"policy = \"adamw\"", "policy = \"own\"", "run.toml: policy own: learning_rate is missing"},
      {"[data]", "[policy]\nbase = \"adamw\"\n[data]",
       "run.toml:15: policy.base has no effect without optimizer.policy = \"own\""},
  };
  for (const Case& c : kCases) {
    std::string text(kGood);
    ASSERT_NE(text.find(c.old_text), std::string::npos) << c.old_text;
    text.replace(text.find(c.old_text), c.old_text.size(), c.new_text);
    const std::string message = MessageOf(text);
    EXPECT_THAT(message, HasSubstr(c.message));
    EXPECT_THAT(message, StartsWith((folder_ / "run.toml").string()));
  }
}

TEST_F(ConfigTest, MistakesInAssignmentsAreNamed) {
  const std::pair<std::string, std::string> kCases[] = {
      {"width=3", "--set width=3: unknown key width, did you mean model.width?"},
      {"model.width", "--set model.width: write key=value"},
      {"model.width=wide", "model.width = 'wide' has to be a whole number"},
      {"model.width=", "model.width = '' has to be a whole number"},
      {"model.width=0", "model.width = 0 is not within"},
      {"training.activation_checkpointing=yes", "has to be true or false"},
      {"training.precision=f16", "has to be one of f32, bf16"},
      {"=3", "--set =3: the key is empty"},
      {"model.width=64\nlayers=3", "one setting at a time"},
      {"model.width=64\n[model]\nlayers=3", "one setting at a time"},
      {"model.width=64\n[[policy]]\nx=3", "one setting at a time"},
      {"model.router=3", "model.router is a table of settings, not a setting"},
      {"optimizer.populations.expert=adamw",
       "optimizer.populations.expert = 'adamw' has to be a table"},
      {"optimizer.populations.expert.beta1=[1]", "optimizer.populations.expert.beta1 = [ 1 ] has"},
  };
  for (const auto& [assignment, message] : kCases) {
    EXPECT_THAT(MessageOf(kGood, {assignment}), HasSubstr(message)) << assignment;
  }
}

TEST_F(ConfigTest, ARunGoesOnOnlyAsItself) {
  const RunConfig config = Load(kGood);
  CheckSameRun(config, Load(kGood, {"training.steps=5", "training.threads=1", "training.keep=9"}));
  CheckSameRun(config, Load(kGood, {"optimizer.weight_decay=1",
                                    "optimizer.populations.expert.lr_multiplier=2",
                                    "optimizer.populations.expert.eps=1e-8"}));  // is the default
  for (const std::string assignment :
       {"model.width=64", "training.seed=2", "training.gradient_accumulation_steps=2",
        "optimizer.policy=skewadam"}) {
    try {
      CheckSameRun(config, Load(kGood, {assignment}));
      FAIL() << assignment;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(assignment.substr(0, assignment.find('='))));
    }
  }
}

TEST_F(ConfigTest, ARunGoesOnOnlyUnderItsRules) {
  try {
    CheckSameRun(Load(kGood), Load(kGood, {"optimizer.populations.expert.beta1=0.8"}));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()),
              "cannot resume with population expert under adamw { beta1 = 0.8, beta2 = 0.95, eps = "
              "1e-08 }: the run has adamw { beta1 = 0.9, beta2 = 0.95, eps = 1e-08 }");
  }
}

// What a run keeps, as text that leaves nothing out that has an effect.
void ExpectSame(RunConfig a, RunConfig b) {
  const Fields fields = FieldsOf(a), others = FieldsOf(b);
  for (size_t i = 0; i < fields.size(); ++i) {
    EXPECT_EQ(ValueText(fields[i]), ValueText(others[i])) << fields[i].key;
  }
  CheckSameRun(a, b);
  const ResolvedRun run(a), other(b);
  EXPECT_EQ(ToToml(run.policy), ToToml(other.policy));
  for (int64_t step = 1; step <= a.training.steps; ++step) {
    EXPECT_EQ(run.schedule.LearningRate(step), other.schedule.LearningRate(step));
  }
}

TEST_F(ConfigTest, WhateverTrainsIsReadBack) {
  std::vector<std::string> bases;
  for (const Preset& preset : Presets()) {
    bases.push_back(
        fmt::format("[model]\npreset = \"{}\"\n[data]\nfolder = \"shards\"\n"
                    "[training]\nsteps = 40\nsequence_length = 24\n",
                    preset.name));
  }
  const size_t presets = bases.size();
  std::string text(kGood);
  text.replace(text.find("sequence_length"), 0, "steps = 40\n");
  bases.push_back(text);
  const auto replaced = [&](const std::string& from, const std::string& to) {
    std::string other = text;
    other.replace(other.find(from), from.size(), to);
    return other;
  };
  // Only MoE layers, whose width is given or is that of dense ones; only dense ones.
  bases.push_back(
      replaced("ffn = [\"dense\", \"moe\"]\nffn_width = 48", "ffn = \"moe\"\nexpert_width = 40"));
  bases.push_back(replaced("ffn = [\"dense\", \"moe\"]", "ffn = \"moe\""));
  const size_t router = text.find("[model.router]");
  std::string dense = text.substr(0, router) + text.substr(text.find("[data]"));
  dense.replace(dense.find("ffn = [\"dense\", \"moe\"]"), 22, "ffn = \"dense\"");
  dense.erase(dense.find("experts = 4\n"), 12);
  dense.erase(dense.find("[optimizer.populations.router]"));
  bases.push_back(dense);
  std::vector<std::vector<std::string>> variants = {
      {},
      {"optimizer.schedule=constant", "optimizer.clipping=none"},
      {"optimizer.schedule=wsd", "optimizer.decay_fraction=0.97"},
      {"optimizer.schedule=linear", "optimizer.min_ratio=0.1", "training.eval_interval=0"},
      {"model.positions=learned", "training.precision=f32", "model.tied_head=false"},
      {"model.norm_epsilon=1e-30", "model.init_std=0", "optimizer.learning_rate=1e-30",
       "optimizer.max_norm=1e-12", "optimizer.weight_decay=1000"},
      {"optimizer.policy=own", "policy.base=skewadam", "policy.default.eps=1e-30",
       "policy.attention={momentum = \"none\", lr_multiplier = 0.1}"},
  };
  for (const std::string& base : bases) {
    for (const auto& assignments : variants) {
      SCOPED_TRACE(base + fmt::format("{}", fmt::join(assignments, " ")));
      const RunConfig config = Load(base, assignments);
      ExpectSame(config, LoadSaved(SavedConfigText(config)));
      // It is a configuration as any other, too.
      ExpectSame(config, Load(SavedConfigText(config)));
    }
  }
  for (const ReadyPolicy& ready : ReadyPolicies()) {
    SCOPED_TRACE(ready.name);
    const RunConfig config = Load(bases[presets], {fmt::format("optimizer.policy={}", ready.name)});
    ExpectSame(config, LoadSaved(SavedConfigText(config)));
  }
}

TEST_F(ConfigTest, ASavedConfigThatWasCutIsRecognised) {
  const std::string text = SavedConfigText(Load(kGood));
  EXPECT_EQ(MessageOfSaved(text), "");
  for (size_t end = 0; end < text.size(); ++end) {
    const bool at_line_end = end > 0 && text[end - 1] == '\n';
    if (!at_line_end && end % 7 != 0) continue;
    EXPECT_NE(MessageOfSaved(text.substr(0, end)), "") << text.substr(0, end);
  }
  EXPECT_THAT(MessageOfSaved(text.substr(0, text.find("[training]"))),
              HasSubstr("config.toml: is cut off: its last line is missing"));
}

// Every schedule with every share of warm-up, as a study of stability sweeps them.
TEST_F(ConfigTest, SchedulesAndWarmUpAreSettings) {
  const int64_t steps = Load(kGood, {"training.steps=1000"}).training.steps;
  for (const char* name : {"constant", "linear", "cosine", "wsd"}) {
    for (const double warmup : {0.0, 0.03, 0.1}) {
      const std::vector<std::string> sweep = {"training.steps=1000",
                                              fmt::format("optimizer.schedule={}", name),
                                              fmt::format("optimizer.warmup_fraction={}", warmup)};
      const ResolvedRun run(
          Load("[data]\nfolder = \"x\"\n[model]\npreset = \"moe-laptop\"\n", sweep));
      EXPECT_EQ(NameOf(run.schedule.kind), name);
      EXPECT_EQ(run.schedule.warmup_steps, std::llround(warmup * static_cast<double>(steps)));
      const double peak = run.schedule.peak;
      if (warmup == 0) {
        EXPECT_EQ(run.schedule.LearningRate(1), peak);
      } else {
        EXPECT_LT(run.schedule.LearningRate(1), peak / 10);
      }
      EXPECT_EQ(run.schedule.LearningRate(run.schedule.warmup_steps + 1), peak);
      // It comes back from what the run keeps.
      const ResolvedRun kept(LoadSaved(SavedConfigText(run.config)));
      EXPECT_EQ(kept.schedule.warmup_steps, run.schedule.warmup_steps);
      EXPECT_EQ(kept.schedule.LearningRate(700), run.schedule.LearningRate(700));
    }
  }
  // What others call it.
  for (const char* theirs : {"warmup_ratio", "warmup_steps", "warmup"}) {
    EXPECT_THAT(MessageOf(kGood, {fmt::format("optimizer.{}=0.1", theirs)}),
                HasSubstr("optimizer.warmup_fraction"))
        << theirs;
  }
}

// A config.toml as the first release left it, of a model of MoE layers only.
constexpr std::string_view kOldSaved = R"([model]
preset = ''  # a model by name, which the other keys change
vocab_size = 257  # tokens
max_positions = 64  # longest sequence
width = 32  # of the residual stream
layers = 2  # blocks
heads = 2  # query heads
kv_heads = 2  # key/value heads
head_width = 0  # 0: width / heads
attention = 'gqa'  # gqa
positions = 'rope'  # learned or rope
rope_theta = 10000  # base of the rotation angles
norm = 'rmsnorm'  # layernorm or rmsnorm
norm_epsilon = 1e-05  # added to the mean square
ffn = ['moe']  # dense or moe, repeated over layers
ffn_width = 0  # of dense layers
experts = 4  # per MoE layer
expert_width = 32  # 0: ffn_width
tied_head = true  # the head is the embedding
init_deviation = 0.03  # of matrices at the start

[model.router]
score = 'softmax'  # softmax
top_k = 1  # experts per token
normalize_weights = true  # combine weights divided by their sum
aux_coefficient = 0.01  # of the load-balancing loss
z_coefficient = 0  # of the router z-loss
noise_scale = 0  # of N(0, 1) on logits in training

[data]
folder = '/corpus'  # token shards
tokenizer = ''  # empty: the one in the data folder

[training]
steps = 20  # optimizer steps
micro_batch = 4  # sequences at once
sequence_length = 32  # tokens per sequence
micro_batches = 3  # accumulated per step
seed = 1  # of weights, batches, noise and rounding
precision = 'f32'  # of weights: f32 or bf16
sink = 'accumulate'  # accumulate: gradients of a whole step; release: one tensor's at a time
gradient_dtype = 'bf16'  # of accumulated gradients: f32 or bf16
activation_checkpointing = false  # keep block inputs only and recompute the rest
eval_interval = 0  # steps; 0: never
eval_batches = 8  # of micro_batch sequences
checkpoint_interval = 0  # steps; 0: at the end only
keep = 2  # checkpoints kept
threads = 0  # 0: as many as run at once

[optimizer]
policy = 'own'  # which rule and state each population gets
learning_rate = 0.003  # peak; the policy's own if left out
schedule = 'cosine'  # constant, linear, cosine or wsd
warmup_fraction = 0.03  # of all steps
decay_fraction = 0.2  # of all steps, at the end (wsd)
min_ratio = 0  # of learning_rate, at the end
clipping = 'none'  # none, global_norm or per_tensor
max_norm = 1  # of gradients, where clipping is on
# weight_decay =   # over the policy's own

[optimizer.populations]
# embedding =   # over the policy, e.g. { weight_decay = 0 }
dense_ffn = { weight_decay = 0 }  # over the policy, e.g. { weight_decay = 0 }
# norm =   # over the policy, e.g. { weight_decay = 0 }

[policy]
base = 'skewadam'  # of optimizer.policy = own: a ready-made policy to start from
# learning_rate =   # peak, unless optimizer.learning_rate is set
# default =   # rule and settings of all populations
expert = { beta1 = 0.5, momentum = 'none' }  # over policy.default
# norm =   # over policy.default
)";

TEST_F(ConfigTest, RunsOfTheReleaseBeforeAreRead) {
  const RunConfig config = LoadSaved(kOldSaved);
  EXPECT_TRUE(config.notices.empty());  // nobody wrote it
  EXPECT_EQ(config.training.micro_batch_size, 4);
  EXPECT_EQ(config.training.gradient_accumulation_steps, 3);
  EXPECT_EQ(config.model.init_std, 0.03f);
  EXPECT_EQ(config.model.expert_width, 32);
  ExpectSame(config, LoadSaved(SavedConfigText(config)));
  // By its path, as for a plan, and with other settings, as for a resumption.
  ExpectSame(config, Load(kOldSaved));
  EXPECT_EQ(LoadSaved(kOldSaved, {"training.steps=30"}).training.steps, 30);
  EXPECT_THROW(LoadSaved(kOldSaved, {"optimizer.max_norm=2"}), Error);
  EXPECT_TRUE(config.saved_earlier);
  EXPECT_FALSE(LoadSaved(SavedConfigText(config)).saved_earlier);

  // Cut at the end of any line, but for comments at the end of nothing that was set.
  for (size_t end = kOldSaved.find('\n') + 1; end < kOldSaved.size();
       end = kOldSaved.find('\n', end) + 1) {
    EXPECT_NE(MessageOfSaved(kOldSaved.substr(0, end)), "") << end;
  }
}

TEST_F(ConfigTest, OldNamesAreTakenWithANotice) {
  std::string text(kGood);
  text.replace(text.find("sequence_length"), 0, "micro_batch = 2\nmicro_batches = 5\n");
  RunConfig config = Load(text, {"model.init_deviation=0.5"});
  EXPECT_EQ(config.training.micro_batch_size, 2);
  EXPECT_EQ(config.training.gradient_accumulation_steps, 5);
  EXPECT_EQ(config.model.init_std, 0.5f);
  const std::string path = path_.string();
  EXPECT_THAT(
      config.notices,
      ::testing::UnorderedElementsAre(
          path + ":17: training.micro_batch is called training.micro_batch_size now; the next "
                 "release will refuse the old name",
          path + ":18: training.micro_batches is called training.gradient_accumulation_steps now; "
                 "the next release will refuse the old name",
          "--set: model.init_deviation is called model.init_std now; the next release will refuse "
          "the old name"));
  const std::string written = ToToml(FieldsOf(config));
  EXPECT_THAT(written, HasSubstr("\nmicro_batch_size = 2  #"));
  EXPECT_THAT(written, HasSubstr("\ngradient_accumulation_steps = 5  #"));
  EXPECT_THAT(written, HasSubstr("\ninit_std = 0.5  #"));
  text.replace(text.find("micro_batch ="), 0, "micro_batch_size = 2\n");
  EXPECT_THAT(MessageOf(text), HasSubstr("is given under its old name too"));
}

TEST_F(ConfigTest, SettingsWithoutEffectAreRefused) {
  const std::string dense =
      "[model]\nvocab_size = 256\nmax_positions = 64\nwidth = 32\n"
      "layers = 2\nheads = 4\nkv_heads = 2\nffn_width = 48\n"
      "[data]\nfolder = \"shards\"\n[training]\nsequence_length = 16\n";
  // What makes the setting idle, the setting, and what it needs.
  const std::tuple<std::vector<std::string>, std::string, std::string> kCases[] = {
      {{}, "training.gradient_dtype=bf16", "training.precision = \"bf16\""},
      {{}, "optimizer.decay_fraction=0.2", "optimizer.schedule = \"wsd\""},
      {{"optimizer.schedule=constant"}, "optimizer.min_ratio=0", "a schedule that decays"},
      {{"optimizer.schedule=wsd", "optimizer.decay_fraction=0"},
       "optimizer.min_ratio=0.1",
       "a schedule that decays"},
      {{"optimizer.clipping=none"}, "optimizer.max_norm=1", "optimizer.clipping = \"global_norm\""},
      {{"model.positions=learned"}, "model.rope_theta=1e4", "model.positions = \"rope\""},
      {{}, "model.experts=4", "\"moe\" in model.ffn"},
      {{}, "model.expert_width=4", "\"moe\" in model.ffn"},
      {{}, "model.router.top_k=2", "\"moe\" in model.ffn"},
      {{}, "model.router.normalize_weights=false", "\"moe\" in model.ffn"},
      {{}, "model.router.aux_coefficient=0", "\"moe\" in model.ffn"},
      {{}, "model.router.z_coefficient=0", "\"moe\" in model.ffn"},
      {{}, "model.router.noise_scale=0", "\"moe\" in model.ffn"},
      {{"model.ffn=moe", "model.experts=2", "model.expert_width=8", "model.router.top_k=2"},
       "model.ffn_width=8",
       "\"dense\" in model.ffn"},
      {{}, "optimizer.populations.expert.weight_decay=0", "parameters of this population"},
      {{}, "optimizer.populations.head.weight_decay=0", "parameters of this population"},
      {{}, "optimizer.populations.shared_expert.weight_decay=0", "parameters of this population"},
      {{"training.eval_interval=0"}, "training.eval_batches=8", "training.eval_interval above 0"},
      {{}, "policy.base=skewadam", "optimizer.policy = \"own\""},
      {{}, "policy.norm.eps=1e-8", "optimizer.policy = \"own\""},
  };
  ASSERT_EQ(MessageOf(dense), "");
  for (const auto& [assignments, idle, needed] : kCases) {
    const size_t equals = idle.find('=');
    std::string key = idle.substr(0, equals);
    std::vector<std::string> all = assignments;
    if (key == "model.ffn_width") {
      // It is in the file, where it has an effect that --set takes away: the later word counts.
      EXPECT_EQ(MessageOf(dense, assignments), "");
    }
    all.push_back(idle);
    const std::string message = MessageOf(dense, all);
    EXPECT_THAT(message, HasSubstr(" has no effect without " + needed)) << idle;
    EXPECT_THAT(message, StartsWith("--set " + idle + ": ")) << idle;

    // In a file, with its line.
    std::string text;
    for (const std::string& assignment : all) {
      const size_t split = assignment.find('=');
      std::string value = assignment.substr(split + 1);
      const bool bare = std::isalpha(value[0]) != 0 && value != "false";
      text += fmt::format("{} = {}\n", assignment.substr(0, split),
                          bare ? fmt::format("\"{}\"", value) : value);
    }
    std::string rest = dense;
    if (key == "model.ffn_width") rest.erase(rest.find("ffn_width = 48\n"), 15);
    std::string flat;  // as dotted keys, which a table could not follow
    std::string table;
    std::istringstream lines(rest);
    for (std::string line; std::getline(lines, line);) {
      if (line.starts_with('[')) {
        table = line.substr(1, line.size() - 2);
      } else {
        flat += table + "." + line + "\n";
      }
    }
    const std::string in_file = MessageOf(text + flat);
    EXPECT_THAT(in_file, HasSubstr(" has no effect without " + needed)) << idle;
    EXPECT_THAT(in_file, HasSubstr(fmt::format("run.toml:{}: ", all.size()))) << idle;
  }
  // A file that needs a --set to make sense is made sense of.
  EXPECT_EQ(MessageOf(dense + "gradient_dtype = \"bf16\"\n", {"training.precision=bf16"}), "");
  EXPECT_THAT(MessageOf(dense + "gradient_dtype = \"bf16\"\n", {"training.seed=3"}),
              HasSubstr("run.toml:13: training.gradient_dtype has no effect without"));
}

TEST_F(ConfigTest, ARouterThatCannotLearnIsRefused) {
  EXPECT_THAT(MessageOf(kGood, {"model.router.top_k=1"}),
              HasSubstr("set model.router.normalize_weights = false"));
  EXPECT_EQ(MessageOf(kGood, {"model.router.top_k=1", "model.router.normalize_weights=false"}), "");
  EXPECT_EQ(MessageOf(kGood, {"model.router.top_k=1", "model.experts=1"}), "");
}

// Two fractions that make a whole, of a number of steps by which both are rounded up.
TEST_F(ConfigTest, WarmUpAndDecayMayShareAllSteps) {
  for (const char* steps : {"5", "6", "7", "31"}) {
    EXPECT_EQ(
        MessageOf(kGood, {"optimizer.schedule=wsd", "optimizer.warmup_fraction=0.5",
                          "optimizer.decay_fraction=0.5", fmt::format("training.steps={}", steps)}),
        "");
  }
}

TEST_F(ConfigTest, UnreadableFilesAreNamed) {
  EXPECT_THROW(LoadConfig(folder_ / "absent.toml", {}), Error);
  EXPECT_THAT(MessageOf(""), HasSubstr("run.toml: "));
  EXPECT_THAT(MessageOf("\xff\xfe"), HasSubstr("run.toml:1: "));
}

}  // namespace
}  // namespace terrace
