#include "optim/policy.h"

#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "core/error.h"
#include "optim/optimizer.h"
#include "optim/rules/rules.h"
#include "support/message_of.h"

namespace terrace {
namespace {

using ::testing::HasSubstr;

PolicyEntry EntryOf(const Policy& policy, Population population) {
  for (const PolicyEntry& entry : policy.entries) {
    if (entry.population == population) return entry;
  }
  return {};
}

Policy PolicyOfText(std::string_view text) {
  return ResolvePolicy("mine.toml", ParsePolicy(text, "mine.toml"));
}

void ExpectSame(const Policy& a, const Policy& b) {
  EXPECT_EQ(a.learning_rate, b.learning_rate);
  ASSERT_EQ(a.entries.size(), b.entries.size());
  for (size_t i = 0; i < a.entries.size(); ++i) {
    SCOPED_TRACE(NameOf(a.entries[i].population));
    EXPECT_EQ(a.entries[i].population, b.entries[i].population);
    EXPECT_EQ(a.entries[i].rule, b.entries[i].rule);
    EXPECT_EQ(a.entries[i].lr_multiplier, b.entries[i].lr_multiplier);
    EXPECT_EQ(a.entries[i].weight_decay, b.entries[i].weight_decay);
    EXPECT_EQ(CompleteSettings(a.entries[i].rule, a.entries[i].settings),
              CompleteSettings(b.entries[i].rule, b.entries[i].settings));
  }
}

enum class Kind { kA, kB };
struct Thing {
  double rate = 0.25;
  int64_t count = 3;
  bool on = false;
  Kind kind = Kind::kA;
  double of_b = 0.5;
};
Fields FieldsOf(Thing& thing) {
  return {{"rate", &thing.rate, "a number", {0, 1}},
          {"count", &thing.count, "", {1, 9}},
          {"on", &thing.on, "a flag"},
          {"kind", Choice(thing.kind, {{"a", Kind::kA}, {"b", Kind::kB}}), "of thing"},
          {"of_b", &thing.of_b, "", {0, 1}, {[&] { return thing.kind == Kind::kB; }, "kind b"}}};
}

TEST(SettingsReaderTest, ReadsEveryKindAndCompletesTheRest) {
  Thing thing;
  const Settings settings = {{"rate", 0.5}, {"kind", "b"}, {"count", 4.0}};
  SettingsReader reader("rule", settings);
  reader.Read(FieldsOf(thing));
  EXPECT_EQ(thing.rate, 0.5);
  EXPECT_EQ(thing.count, 4);
  EXPECT_FALSE(thing.on);
  EXPECT_EQ(thing.kind, Kind::kB);
  EXPECT_EQ(TextOf(reader.complete()),
            "{ count = 4, kind = 'b', of_b = 0.5, on = false, rate = 0.5 }");
  EXPECT_EQ(reader.toml(),
            "rate = 0.5  # a number\ncount = 4  # \non = false  # a flag\n"
            "kind = 'b'  # of thing: a, b\nof_b = 0.5  # \n");
  EXPECT_EQ(TextOf(Settings{}), "{}");
}

TEST(SettingsReaderTest, SettingsWithoutEffectAreTold) {
  Thing thing;
  const Settings settings = {{"of_b", 0.25}};
  SettingsReader reader("rule", settings);
  reader.Read(FieldsOf(thing));
  EXPECT_EQ(reader.idle(), (std::map<std::string, std::string>{{"of_b", "kind b"}}));
  EXPECT_FALSE(reader.complete().contains("of_b"));
  EXPECT_THAT(reader.toml(), HasSubstr("\n# of_b = 0.25  # ; no effect without kind b\n"));
}

TEST(SettingsReaderTest, ErrorsNameKeyAndValue) {
  const auto message = [](const char* key, const SettingValue& value) {
    return MessageOf([&] {
      Thing thing;
      const Settings settings = {{key, value}};
      SettingsReader("rule", settings, {"elsewhere"}).Read(FieldsOf(thing));
    });
  };
  EXPECT_EQ(message("rate", 1.0), "");
  EXPECT_EQ(message("rate", 1.5), "rule: rate = 1.5 is not within 0 .. 1");
  EXPECT_EQ(message("rate", "1"), "rule: rate = '1' has to be a number");
  EXPECT_EQ(message("rate", NAN), "rule: rate = nan has to be a number");
  EXPECT_EQ(message("count", 1.5), "rule: count = 1.5 has to be a whole number");
  EXPECT_EQ(message("count", 10.0), "rule: count = 10 is not within 1 .. 9");
  EXPECT_EQ(message("on", 1.0), "rule: on = 1 has to be true or false");
  EXPECT_EQ(message("kind", "c"), "rule: kind = 'c' has to be one of a, b");
  EXPECT_EQ(message("kind", true), "rule: kind = true has to be one of a, b");
  EXPECT_EQ(message("knd", "a"), "rule: unknown setting knd, did you mean kind?");
  EXPECT_EQ(message("elsewhre", 1.0), "rule: unknown setting elsewhre, did you mean elsewhere?");
}

TEST(PolicyTest, SkewAdamHasThePublishedSettings) {
  const Policy policy = PolicyNamed("skewadam");
  EXPECT_EQ(policy.learning_rate, 3e-4f);
  for (const PolicyEntry& entry : policy.entries) {
    const bool router = entry.population == Population::kRouter;
    const bool momentum = !router && entry.population != Population::kExpert;
    EXPECT_EQ(entry.rule, "skewadam");
    EXPECT_EQ(entry.lr_multiplier, 1);
    EXPECT_EQ(entry.weight_decay, router ? 0 : 0.05f);
    Settings expected = {{"beta1", 0.9},
                         {"beta2", 0.999},
                         {"eps", 1e-8},
                         {"eps_mode", "absolute"},
                         {"momentum", momentum ? "f32" : "none"},
                         {"rms_clip", 1.0},
                         {"second_moment", router ? "exact" : "factored"}};
    if (!momentum) expected.erase("beta1");
    EXPECT_EQ(CompleteSettings(entry.rule, entry.settings), expected) << NameOf(entry.population);
  }
}

TEST(PolicyTest, AdamWDecaysAllButNorms) {
  const Policy policy = PolicyNamed("adamw");
  EXPECT_EQ(policy.learning_rate, 3e-4f);
  for (const PolicyEntry& entry : policy.entries) {
    EXPECT_EQ(entry.rule, "adamw");
    EXPECT_EQ(entry.weight_decay, entry.population == Population::kNorm ? 0 : 0.1f);
    const Settings expected = {{"beta1", 0.9}, {"beta2", 0.95}, {"eps", 1e-8}};
    EXPECT_EQ(CompleteSettings(entry.rule, entry.settings), expected);
  }
}

TEST(PolicyTest, ReadyPoliciesCoverEveryPopulationAndReadBackAsWritten) {
  for (const ReadyPolicy& ready : ReadyPolicies()) {
    SCOPED_TRACE(ready.name);
    EXPECT_FALSE(ready.summary.empty());
    const Policy policy = PolicyNamed(ready.name);
    EXPECT_EQ(policy.name, ready.name);
    EXPECT_EQ(policy.entries.size(), static_cast<size_t>(kPopulations));
    ExpectSame(policy, PolicyOfText(ToToml(policy)));
  }
  const std::string text = ToToml(PolicyNamed("skewadam"));
  EXPECT_THAT(text, HasSubstr("\n[expert]  # state of a matrix: row_second_moment f32, "
                              "column_second_moment f32\nrule = 'skewadam'  # of the update: "));
  EXPECT_THAT(text, HasSubstr("\nweight_decay = 0.05  # decoupled, times the learning rate\n"
                              "# beta1 = 0.9  # decay of the first moment; no effect without a "
                              "momentum\n"));
}

TEST(PolicyTest, TablesLieOverTheDefaultAndTheDefaultOverTheBase) {
  const Policy policy = PolicyOfText(R"(
base = "skewadam"
[default]
weight_decay = 0.2
lr_multiplier = 3
beta2 = 0.99
[expert]
momentum = "bf16"
beta2 = 0.95
[router]
lr_multiplier = 0.5
)");
  EXPECT_EQ(policy.name, "mine.toml");
  EXPECT_EQ(policy.learning_rate, 3e-4f);  // of the base
  ASSERT_EQ(policy.entries.size(), static_cast<size_t>(kPopulations));
  const PolicyEntry norm = EntryOf(policy, Population::kNorm);
  EXPECT_EQ(norm.lr_multiplier, 3);
  EXPECT_EQ(norm.settings, (Settings{{"beta2", 0.99}}));
  const PolicyEntry expert = EntryOf(policy, Population::kExpert);
  EXPECT_EQ(expert.weight_decay, 0.2f);
  EXPECT_EQ(expert.lr_multiplier, 3);
  EXPECT_EQ(expert.settings, (Settings{{"beta2", 0.95}, {"momentum", "bf16"}}));
  const PolicyEntry router = EntryOf(policy, Population::kRouter);
  EXPECT_EQ(router.weight_decay, 0.2f);
  EXPECT_EQ(router.lr_multiplier, 0.5f);
  EXPECT_EQ(router.settings,
            (Settings{{"beta2", 0.99}, {"momentum", "none"}, {"second_moment", "exact"}}));
}

// As README shows it: whoever sweeps the rate of such a policy sweeps Muon's, with AdamW's at a
// fixed ratio to it.
TEST(PolicyTest, RatesOfMuonAndOfTheAdamWBesideItAreApart) {
  const Policy muon = PolicyNamed("muon");
  const Policy slower = PolicyOfText(R"(
base = "muon"
embedding.lr_multiplier = 0.3
head.lr_multiplier = 0.3
router.lr_multiplier = 0.3
norm.lr_multiplier = 0.3
)");
  EXPECT_EQ(slower.learning_rate, muon.learning_rate);
  for (const PolicyEntry& entry : slower.entries) {
    const PolicyEntry before = EntryOf(muon, entry.population);
    EXPECT_EQ(before.lr_multiplier, 1);
    EXPECT_EQ(entry.rule, before.rule);
    EXPECT_EQ(entry.settings, before.settings);
    EXPECT_EQ(entry.weight_decay, before.weight_decay);
    EXPECT_EQ(entry.lr_multiplier, entry.rule == "muon" ? 1 : 0.3f) << NameOf(entry.population);
  }
}

TEST(PolicyTest, AnotherRuleDropsTheSettingsOfTheOneBefore) {
  const Policy policy = PolicyOfText(R"(
learning_rate = 1e-2
[default]
rule = "skewadam"
weight_decay = 0.2
beta2 = 0.99
[embedding]
rule = "adamw"
[head]
rule = "adamw"
weight_decay = 0
beta1 = 0.8
[norm]
rule = "skewadam"
)");
  EXPECT_EQ(policy.learning_rate, 1e-2f);
  const PolicyEntry embedding = EntryOf(policy, Population::kEmbedding);
  EXPECT_EQ(embedding.rule, "adamw");
  EXPECT_EQ(embedding.weight_decay, 0.2f);  // not the rule's own
  EXPECT_TRUE(embedding.settings.empty());
  const PolicyEntry head = EntryOf(policy, Population::kHead);
  EXPECT_EQ(head.weight_decay, 0);
  EXPECT_EQ(head.settings, (Settings{{"beta1", 0.8}}));
  // The same rule named again is no other rule.
  EXPECT_EQ(EntryOf(policy, Population::kNorm).settings, (Settings{{"beta2", 0.99}}));
}

TEST(PolicyTest, ADefaultWithoutARuleAndPopulationsWithoutOne) {
  const Policy policy = PolicyOfText(R"(
learning_rate = 1
[default]
beta2 = 0.9
[expert]
rule = "adamw"
[router]
rule = "skewadam"
)");
  ASSERT_EQ(policy.entries.size(), 2u);  // a model without the others can be trained
  for (const PolicyEntry& entry : policy.entries) {
    EXPECT_EQ(entry.settings, (Settings{{"beta2", 0.9}}));
  }
}

TEST(PolicyTest, OverridesArePartOfThePolicy) {
  Policy policy = PolicyNamed("skewadam");
  Override(policy, Population::kExpert, {{"weight_decay", 0.5}, {"momentum", "bf16"}});
  const PolicyEntry expert = EntryOf(policy, Population::kExpert);
  EXPECT_EQ(expert.weight_decay, 0.5f);
  EXPECT_EQ(expert.settings, (Settings{{"momentum", "bf16"}}));
  Override(policy, Population::kExpert, {{"rule", "adamw"}});
  EXPECT_TRUE(EntryOf(policy, Population::kExpert).settings.empty());
  EXPECT_EQ(policy.entries.size(), static_cast<size_t>(kPopulations));

  Policy empty;
  Override(empty, Population::kNorm, {{"rule", "adamw"}});
  EXPECT_EQ(EntryOf(empty, Population::kNorm).rule, "adamw");
  EXPECT_EQ(MessageOf([&] {
              Override(policy, Population::kExpert, {{"beta9", 1.0}});
            }),
            "adamw: unknown setting beta9, did you mean beta1?");
  EXPECT_EQ(MessageOf([&] {
              Override(policy, Population::kExpert, {{"weight_decay", -1.0}});
            }),
            "weight_decay = -1 is not within 0 .. 1000");
}

// A setting for all populations may be without effect in one of them, but not in each; one that is
// written for a population may not.
TEST(PolicyTest, SettingsWithoutEffectAreDroppedOrRefused) {
  constexpr std::string_view kShared =
      "base = \"sgd\"\n[default]\nbeta = 0.5\n[expert]\nmomentum = \"none\"\n";
  const Policy policy = PolicyOfText(kShared);
  EXPECT_EQ(EntryOf(policy, Population::kNorm).settings, (Settings{{"beta", 0.5}}));
  EXPECT_EQ(EntryOf(policy, Population::kExpert).settings, (Settings{{"momentum", "none"}}));
  EXPECT_EQ(MessageOf([&] { PolicyOfText(fmt::format("{}beta = 0.25\n", kShared)); }),
            "policy mine.toml: population expert: sgd: beta has no effect without a momentum");
  EXPECT_EQ(MessageOf([] {
              PolicyOfText("base = \"sgd\"\n[default]\nbeta = 0.5\nmomentum = \"none\"\n");
            }),
            "policy mine.toml: default: beta = 0.5 has no effect in any population");

  Policy changed = policy;
  Override(changed, Population::kNorm, {{"momentum", "none"}});
  EXPECT_EQ(EntryOf(changed, Population::kNorm).settings, (Settings{{"momentum", "none"}}));
  EXPECT_EQ(MessageOf([&] {
              Override(changed, Population::kNorm, {{"beta", 0.5}});
            }),
            "sgd: beta has no effect without a momentum");
  EXPECT_EQ(MessageOf([] {
              MakeRule("skewadam", {{"momentum", "none"}, {"beta1", 0.8}});
            }),
            "skewadam: beta1 has no effect without a momentum");
  // As a run may have been started before this was refused.
  const std::string old_text = fmt::format("{}beta = 0.25\n", kShared);
  const Policy old_policy = ResolvePolicy("own", ParsePolicy(old_text, "own"), IdleSettings::kDrop);
  EXPECT_EQ(EntryOf(old_policy, Population::kExpert).settings, (Settings{{"momentum", "none"}}));
}

TEST(PolicyTest, MistakesAreNamed) {
  const std::pair<std::string_view, std::string_view> kCases[] = {
      {"learning_rate = 1\n[expret]\nrule = \"adamw\"",
       "mine.toml:2: unknown key expret, did you mean expert?"},
      {"learning_rat = 1", "mine.toml:1: unknown key learning_rat, did you mean learning_rate?"},
      {"\nrule = \"adamw\"", "mine.toml:2: unknown key rule, did you mean "},
      {"learning_rate = \"1\"", "mine.toml:1: learning_rate = '1' has to be a number"},
      {"learning_rate = -1", "mine.toml:1: learning_rate = -1 is not within 1e-30 .. 1000"},
      {"base = \"skewadamw\"",
       "mine.toml:1: base = 'skewadamw' has to be one of skewadam, skewadam-expert-momentum, "},
      {"base = 1", "mine.toml:1: base = 1 has to be one of skewadam, "},
      {"learning_rate = 1\nexpert = \"adamw\"", "mine.toml:2: expert = 'adamw' has to be a table"},
      {"learning_rate = 1\n[expert]\nrule = [\"adamw\"]",
       "expert.rule = [ 'adamw' ] has to be a number, text in quotes, true or false"},
      {"learning_rate = 1\n[expert]\nrule = {}", "expert.rule = {} has to be a number, text"},
      {"learning_rate = 1\n[expert\n", "mine.toml:2: "},
      {"learning_rate = 1\n[expert]\n[expert]\n", "mine.toml:3: "},
      {"[expert]\nrule = \"adamw\"", "policy mine.toml: learning_rate is missing"},
      {"learning_rate = 1\n[expert]\nbeta1 = 0",
       "policy mine.toml: population expert: rule is missing"},
      {"base = \"adamw\"\n[expert]\nrule = \"adamv\"",
       "policy mine.toml: population expert: rule = 'adamv' has to be one of skewadam, "},
      {"base = \"adamw\"\n[expert]\nrule = 5",
       "policy mine.toml: population expert: rule = 5 has to be one of skewadam, "},
      {"base = \"adamw\"\n[expert]\nweight_decay = -1",
       "policy mine.toml: population expert: weight_decay = -1 is not within 0 .. 1000"},
      {"base = \"adamw\"\n[expert]\nlr_multiplier = inf",
       "policy mine.toml: population expert: lr_multiplier = inf has to be a number"},
      {"base = \"adamw\"\n[expert]\nmomentum = \"f32\"",
       "policy mine.toml: population expert: adamw: unknown setting momentum, did you mean "},
      {"base = \"skewadam\"\n[expert]\nmomentum = \"int4\"",
       "policy mine.toml: population expert: skewadam: momentum = 'int4' has to be one of none, "
       "f32, bf16, int8"},
      {"base = \"skewadam\"\n[expert]\nbeta2 = nan",
       "policy mine.toml: population expert: skewadam: beta2 = nan has to be a number"},
  };
  for (const auto& [text, message] : kCases) {
    EXPECT_THAT(MessageOf([&] { PolicyOfText(text); }), HasSubstr(message)) << text;
  }
  EXPECT_EQ(MessageOf([] { PolicyNamed("skewadamw"); }),
            "no policy is called \"skewadamw\", did you mean skewadam? (`terrace policies` lists "
            "them; the name of a file ends in .toml)");
  EXPECT_THAT(MessageOf([] { ReadPolicyFile("absent.toml"); }),
              HasSubstr("absent.toml: cannot read"));
}

}  // namespace
}  // namespace terrace
