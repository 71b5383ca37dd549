#include "compare/study.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "compare/study_testing.h"
#include "core/error.h"
#include "support/message_of.h"
#include "support/temporary_folder.h"

namespace terrace {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string ErrorOf(const StudyRequest& request) {
  return MessageOf([&] { StudyOf(request); });
}

std::vector<std::string> NamesOf(const std::vector<RunSpec>& runs) {
  std::vector<std::string> names;
  for (const RunSpec& run : runs) names.push_back(NameOf(run));
  return names;
}

TEST(StudyTest, RatesAreAbsoluteOrMultiplesOfThePolicysOwn) {
  const auto rates_of = [](const std::vector<std::string>& rates) {
    return StudyOf({.policies = {"skewadam"}, .learning_rates = rates}).policies.at(0).rates;
  };
  // SkewAdam's own is 3e-4. The same rate twice is one run; none is the policy's own.
  EXPECT_THAT(rates_of({}), ElementsAre(3e-4));
  EXPECT_THAT(rates_of({"3x", "0.3x", "1x"}), ElementsAre(9e-5, 3e-4, 9e-4));
  EXPECT_THAT(rates_of({"1e-2", "3e-4", "1x"}), ElementsAre(3e-4, 1e-2));
}

TEST(StudyTest, MistakesAreNamed) {
  EXPECT_THAT(ErrorOf({}), HasSubstr("--policies"));
  EXPECT_THAT(ErrorOf({.policies = {"adam"}}), HasSubstr("no policy is called \"adam\""));
  EXPECT_THAT(ErrorOf({.policies = {"absent.toml"}}), HasSubstr("absent.toml: cannot read"));
  EXPECT_THAT(ErrorOf({.policies = {"adamw", "adamw"}}),
              HasSubstr("two policies are called adamw"));
  EXPECT_THAT(ErrorOf({.policies = {"adamw"}, .ablations = {"skewadam-uniform"}}),
              HasSubstr("--ablations skewadam-uniform: its base skewadam has to be among"));
  EXPECT_THAT(ErrorOf({.policies = {"adamw"}, .ablations = {"skewadam"}}),
              HasSubstr("--ablations skewadam: has no base"));
  for (const std::string rate : {"", "x", "3y", "0", "-1", "1e9", "nan", "inf", "1e-300", "3 x"}) {
    EXPECT_THAT(ErrorOf({.policies = {"adamw"}, .learning_rates = {rate}}),
                HasSubstr("--lr " + rate));
  }
  RunConfig base = SmallRun("corpus");
  base.training.eval_interval = 0;
  EXPECT_THROW(MakeStudy(base, {.policies = {"adamw"}}), Error);
}

TEST(StudyTest, APolicyFileIsNamedAfterItselfAndIsInTheConfiguration) {
  const TemporaryFolder folder;
  std::ofstream(folder / "mine.toml") << "base = \"skewadam\"\nlearning_rate = 0.5\n"
                                         "[expert]\nmomentum = \"f32\"\n";
  const std::string file = folder / "mine.toml";
  const Study study = StudyOf({.policies = {"skewadam", file}});
  EXPECT_EQ(NameOf(KnownRuns(study, {}).at(1)), "mine-lr0.5-seed5");
  const RunConfig config = ResolvedOf(study, {"mine", 0.25, 6}).config;
  EXPECT_EQ(config.optimizer.policy, kOwnPolicy);
  EXPECT_EQ(config.policy.base, "skewadam");
  EXPECT_EQ(config.optimizer.learning_rate, 0.25f);
  EXPECT_EQ(config.training.seed, 6);
  // As an ablation it takes the learning rate of its base.
  const Study ablated = StudyOf({.policies = {"skewadam"}, .ablations = {file}});
  EXPECT_EQ(ablated.Named("mine").base, "skewadam");
  EXPECT_THAT(ablated.Named("mine").rates, IsEmpty());

  std::ofstream(folder / "adamw.toml") << "base = \"skewadam\"\n";
  EXPECT_THAT(ErrorOf({.policies = {"skewadam", folder / "adamw.toml"}}),
              HasSubstr("adamw.toml: adamw is a ready-made policy; the file needs another name"));
  std::ofstream(folder / "wrong.toml") << "base = \"skewadam\"\n[expert]\nrule = \"adamww\"\n";
  EXPECT_THAT(ErrorOf({.policies = {folder / "wrong.toml"}}),
              HasSubstr("policy wrong: population expert: rule = 'adamww'"));
  EXPECT_THAT(ErrorOf({.policies = {folder / "wrong.toml"}}), HasSubstr("(population of layers."));
  EXPECT_THAT(ErrorOf({.policies = {file, file}}), HasSubstr("two policies are called mine"));
  for (const std::string& name : {std::string(101, 'a'), std::string("a\tb")}) {
    std::ofstream(folder / (name + ".toml")) << "base = \"skewadam\"\n";
    EXPECT_THAT(ErrorOf({.policies = {folder / (name + ".toml")}}),
                HasSubstr("cannot name folders"));
  }
}

TEST(StudyTest, TheBasesOwnPolicyIsReplacedAndItsOverridesAreChecked) {
  RunConfig base = SmallRun("corpus");
  base.optimizer.policy = kOwnPolicy;
  base.policy.base = "skewadam";
  Study study = MakeStudy(base, {.policies = {"adamw"}});
  const RunConfig config = ResolvedOf(study, {"adamw", 1e-3, 1}).config;
  EXPECT_EQ(config.optimizer.policy, "adamw");
  EXPECT_EQ(config.policy, PolicyTables{});

  study.base.optimizer.populations[static_cast<size_t>(Population::kExpert)] = {
      {"momentum", std::string("f32")}};
  try {
    ResolvedOf(study, {"adamw", 1e-3, 1});
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("policy adamw: "));
    EXPECT_THAT(error.what(), HasSubstr("optimizer.populations.expert"));
  }
}

TEST(StudyTest, TheSweepComesFirstAndOnlyTheBestGoesOn) {
  const Study study = StudyOf({.policies = {"adamw", "skewadam"},
                               .ablations = {"skewadam-uniform"},
                               .learning_rates = {"0.1", "0.01"},
                               .seeds = 3});
  RunResults results;
  const std::vector<std::string> sweep = {"adamw-lr0.01-seed5", "adamw-lr0.1-seed5",
                                          "skewadam-lr0.01-seed5", "skewadam-lr0.1-seed5"};
  EXPECT_EQ(NamesOf(KnownRuns(study, results)), sweep);
  EXPECT_EQ(UndecidedRuns(study, results), 2 + 2 + 3);

  AddResult(results, {"adamw", 0.01, 5}, 4);
  AddResult(results, {"adamw", 0.1, 5}, 3);
  AddResult(results, {"skewadam", 0.01, 5}, 2);
  // Two more runs of AdamW are known, those of SkewAdam are not.
  EXPECT_EQ(KnownRuns(study, results).size(), 6u);
  EXPECT_EQ(UndecidedRuns(study, results), 2 + 3);

  AddResult(results, {"skewadam", 0.1, 5}, 2.5);
  std::vector<std::string> all = sweep;
  for (const char* name :
       {"skewadam-uniform-lr0.01-seed5",  //
        "adamw-lr0.1-seed6", "skewadam-lr0.01-seed6", "skewadam-uniform-lr0.01-seed6",
        "adamw-lr0.1-seed7", "skewadam-lr0.01-seed7", "skewadam-uniform-lr0.01-seed7"}) {
    all.push_back(name);
  }
  EXPECT_EQ(NamesOf(KnownRuns(study, results)), all);
  EXPECT_EQ(UndecidedRuns(study, results), 0);
}

TEST(StudyTest, TheLowestLossIsChosenAndEdgesAreKnown) {
  const Study study = StudyOf({.policies = {"adamw"}, .learning_rates = {"1", "2", "3"}});
  const StudyPolicy& policy = study.policies.at(0);
  const auto choose = [&](const RunResults& results) { return ChooseRate(study, policy, results); };
  RunResults results;
  EXPECT_FALSE(choose(results).rate);
  EXPECT_FALSE(choose(results).complete);
  AddResult(results, {"adamw", 1, 5}, 4);
  EXPECT_EQ(choose(results).rate, 1);  // so far
  EXPECT_FALSE(choose(results).complete);
  EXPECT_TRUE(choose(results).at_edge);
  AddResult(results, {"adamw", 2, 5}, 3);
  AddResult(results, {"adamw", 3, 5}, 3);
  EXPECT_EQ(choose(results).rate, 2);
  EXPECT_TRUE(choose(results).complete);
  EXPECT_FALSE(choose(results).at_edge);
  AddResult(results, {"adamw", 3, 5}, 2.9);
  EXPECT_EQ(choose(results).rate, 3);
  EXPECT_TRUE(choose(results).at_edge);
  // What diverged is never chosen, but it is tried: the rate below it is not at the edge.
  AddDiverged(results, {"adamw", 3, 5});
  EXPECT_EQ(choose(results).rate, 2);
  EXPECT_FALSE(choose(results).at_edge);
  AddDiverged(results, {"adamw", 2, 5});
  AddDiverged(results, {"adamw", 1, 5});
  EXPECT_FALSE(choose(results).rate);
  EXPECT_TRUE(choose(results).complete);

  const Study single = StudyOf({.policies = {"adamw"}, .learning_rates = {"1"}});
  RunResults one;
  AddResult(one, {"adamw", 1, 5}, 4);
  EXPECT_FALSE(ChooseRate(single, single.policies.at(0), one).at_edge);
}

TEST(StudyTest, WithoutAWorkingRateThereAreNoMoreRuns) {
  const Study study = StudyOf({.policies = {"skewadam"},
                               .ablations = {"skewadam-uniform"},
                               .learning_rates = {"1"},
                               .seeds = 2});
  RunResults results;
  AddDiverged(results, {"skewadam", 1, 5});
  EXPECT_EQ(KnownRuns(study, results).size(), 1u);
  EXPECT_EQ(UndecidedRuns(study, results), 0);
}

}  // namespace
}  // namespace terrace
