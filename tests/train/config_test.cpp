#include "train/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "core/error.h"
#include "model/presets.h"
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
      EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
      return error.what();
    }
    return "";
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
    for (const PolicyEntry& entry : PolicyOf(config).entries) {
      if (entry.population == population) return entry.weight_decay;
    }
    return -1.0f;
  };
  const RunConfig plain = Load(kGood);
  EXPECT_EQ(decay_of(plain, Population::kExpert), 0.1f);
  EXPECT_EQ(decay_of(plain, Population::kRouter), 0.0f);  // populations.router
  EXPECT_EQ(ScheduleOf(plain).peak, 1e-3f);
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
    for (const PolicyEntry& entry : PolicyOf(config).entries) {
      if (entry.population == population) return entry;
    }
    return PolicyEntry{};
  };
  const RunConfig config =
      Load(kGood, {"optimizer.weight_decay=0.5", "optimizer.populations.expert.lr_multiplier=2",
                   "optimizer.populations.expert.beta1=0.8",
                   "optimizer.populations.norm={rule = \"skewadam\", momentum = \"none\"}",
                   "optimizer.populations.head.rule=skewadam"});
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
  EXPECT_EQ(ScheduleOf(config).peak, 2e-3f);
  EXPECT_EQ(PolicyOf(config).entries[0].weight_decay, 0.3f);

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

// Every field can be written, and what was written is what is read: a field missing from one of
// the two directions would show here.
TEST_F(ConfigTest, KeysOfVeryManyPartsAreRefused) {
  std::string key = "a";
  for (int part = 0; part < 100'000; ++part) key += ".a";
  EXPECT_THAT(MessageOf(key + " = 1\n"), HasSubstr("more than 4096 dots"));
}

TEST_F(ConfigTest, FieldsHaveDistinctKeysAndTargets) {
  RunConfig config = Load(kGood);
  const std::vector<Field> fields = FieldsOf(config);
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
      {"learning_rate = 1e-3", "max_norm = 0", "optimizer.max_norm = 0 is below"},
      {"learning_rate = 1e-3", "policy = true", "run.toml:21: "},
      {"policy = \"adamw\"", "policy = true", "optimizer.policy = true has to be text in quotes"},
      {"policy = \"adamw\"", "policy = \"adamv\"", "run.toml: no policy is called \"adamv\""},
      {"learning_rate = 1e-3", "schedule = \"wsd\"\nwarmup_fraction = 0.5\ndecay_fraction = 0.6",
       "exceeds the"},
      {"[model]\n", "[model]\npreset = \"moe-labtop\"\n", "the nearest is \"moe-laptop\""},
      {"folder = \"shards\"", "", "run.toml: data.folder is missing"},
      {"sequence_length = 16", "sequence_length = 65",
       "run.toml: training.sequence_length = 65 exceeds model.max_positions = 64"},
      {"sequence_length = 16",
       "sequence_length = 16\nmicro_batch = 1_000_000\nmicro_batches = 10_000",
       "training.micro_batch x sequence_length x micro_batches"},
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
       "run.toml: [policy] is not used by optimizer.policy = \"adamw\" (but by \"own\")"},
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
  for (const std::string assignment : {"model.width=64", "training.seed=2",
                                       "training.micro_batches=2", "optimizer.policy=skewadam"}) {
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

TEST_F(ConfigTest, UnreadableFilesAreNamed) {
  EXPECT_THROW(LoadConfig(folder_ / "absent.toml", {}), Error);
  EXPECT_THAT(MessageOf(""), HasSubstr("run.toml: "));
  EXPECT_THAT(MessageOf("\xff\xfe"), HasSubstr("run.toml:1: "));
}

}  // namespace
}  // namespace terrace
