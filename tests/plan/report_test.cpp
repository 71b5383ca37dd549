// Verdicts that hold, and the same figures in every form.
#include "plan/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <regex.h>

#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "core/atomic_file.h"
#include "core/settings.h"
#include "model/presets.h"
#include "plan/bytes.h"
#include "support/small_run.h"
#include "support/temporary_folder.h"
#include "train/trainer.h"

namespace terrace {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

Subject Preset110m(std::vector<std::string> assignments = {}) {
  assignments.push_back("training.sequence_length=32");
  return LoadSubject("moe-110m", "", std::move(assignments));
}

std::string HuggingFacePath(const std::string& name) {
  return (TestData() / "hugging_face" / (name + ".json")).string();
}

TEST(AdviceTest, SuggestionsFitWhenPlanned) {
  std::set<std::string> seen;  // settings
  for (const char* precision : {"f32", "bf16"}) {
    const std::vector<std::string> start = {"optimizer.policy=lion", "training.micro_batch_size=4",
                                            std::string("training.precision=") + precision};
    const Subject subject = Preset110m(start);
    const int64_t peak = PlanTraining(subject.config).total_peak_bytes;
    for (const double share : {0.995, 0.9, 0.6, 0.3}) {
      const auto budget = static_cast<int64_t>(share * static_cast<double>(peak));
      const PlanReport report = MakeReport(subject, budget);
      ASSERT_TRUE(report.advice);
      ASSERT_FALSE(report.advice->fitting.empty()) << share;
      for (const Suggestion& suggestion : report.advice->fitting) {
        // As a user takes it up.
        std::vector<std::string> assignments = start;
        for (const std::string& setting : suggestion.settings) {
          assignments.push_back(setting);
          seen.insert(setting.substr(0, setting.find('=')));
        }
        const Subject changed = Preset110m(assignments);
        EXPECT_EQ(PlanTraining(changed.config).total_peak_bytes, suggestion.peak_bytes);
        EXPECT_LE(suggestion.peak_bytes, budget);
        EXPECT_EQ(changed.config.training.StepTokens(), subject.config.training.StepTokens());
        EXPECT_EQ(RelativeCompute(changed.config), suggestion.relative_compute);
      }
    }
  }
  // Every kind of change was put to the test.
  for (const char* key :
       {"training.activation_checkpointing", "training.sink", "training.micro_batch_size",
        "training.gradient_dtype", "training.precision", "optimizer.policy",
        "optimizer.populations.expert", "optimizer.clipping"}) {
    EXPECT_TRUE(seen.contains(key)) << key;
  }
}

TEST(AdviceTest, CombinesWhatDoesNotSufficeAlone) {
  const Subject subject = Preset110m({"optimizer.policy=adamw"});
  // As little as single changes reach, and a little less.
  int64_t least = INT64_MAX;
  const Planner planner = [&](const ResolvedRun& config) {
    return PlanTraining(config).total_peak_bytes;
  };
  for (const char* single :
       {"training.sink=release", "training.gradient_dtype=bf16", "optimizer.policy=skewadam",
        "optimizer.policy=adafactor", "training.activation_checkpointing=true"}) {
    least = std::min(least, planner(Preset110m({"optimizer.policy=adamw", single}).config));
  }
  const Advice advice = Advise(subject.config, least - 1, planner);
  ASSERT_FALSE(advice.fitting.empty());
  for (const Suggestion& suggestion : advice.fitting) EXPECT_GE(suggestion.settings.size(), 2u);
}

TEST(AdviceTest, LeavesOutWhatContainsAnEarlierSuggestion) {
  const Advice advice =
      Advise(Preset110m().config, INT64_MAX, [](const ResolvedRun&) { return 1; });
  ASSERT_FALSE(advice.fitting.empty());
  // Any one change fits: no combination is offered.
  for (const Suggestion& suggestion : advice.fitting) {
    EXPECT_TRUE(suggestion.settings.size() == 1 ||
                suggestion.settings[0].starts_with("training.micro_batch_size=") ||
                suggestion.settings[0].starts_with("training.sink=release") ||
                suggestion.settings[0].starts_with("optimizer.populations"));
  }
  EXPECT_EQ(advice.fitting[0].relative_compute, 1);
  // Routers are balanced over each micro-batch, if at all, and so is their noise drawn.
  EXPECT_TRUE(advice.fitting[0].changes_numbers);
  const Subject unbalanced =
      Preset110m({"model.router.aux_coefficient=0", "model.router.noise_scale=0"});
  EXPECT_FALSE(Advise(unbalanced.config, INT64_MAX, [](const ResolvedRun&) { return 1; })
                   .fitting[0]
                   .changes_numbers);
}

// The best that fits is the first of the table that does, for every budget between two of them.
TEST(BestPolicyTest, IsTheFirstThatFits) {
  struct Planned {
    std::string policy;
    SinkKind sink;
    int64_t peak_bytes;
  };
  std::vector<Planned> in_order;
  for (const std::string_view policy : PoliciesByLoss()) {
    for (const SinkKind sink : {SinkKind::kAccumulate, SinkKind::kRelease}) {
      const Subject subject = Preset110m({fmt::format("optimizer.policy={}", policy),
                                          fmt::format("training.sink={}", NameOf(sink))});
      in_order.push_back(
          {std::string(policy), sink, PlanTraining(subject.config).total_peak_bytes});
    }
  }
  const Subject subject = Preset110m({"optimizer.policy=lion"});
  const Planner planner = [](const ResolvedRun& run) { return PlanTraining(run).total_peak_bytes; };
  std::set<std::string> named;
  for (const Planned& exact : in_order) {
    for (const int64_t budget : {exact.peak_bytes, exact.peak_bytes - 1}) {
      const auto expected = std::find_if(in_order.begin(), in_order.end(),
                                         [&](const Planned& p) { return p.peak_bytes <= budget; });
      const std::optional<BestPolicy> best = FindBestPolicy(subject.config, budget, planner);
      ASSERT_EQ(best.has_value(), expected != in_order.end()) << budget;
      if (!best) continue;
      EXPECT_EQ(best->name, expected->policy);
      EXPECT_EQ(best->sink, expected->sink);
      EXPECT_EQ(best->peak_bytes, expected->peak_bytes);
      named.insert(expected->policy);
    }
  }
  EXPECT_GT(named.size(), 1u);  // else the table could be one policy
}

TEST(BestPolicyTest, IsReadyMadeAndTakesLessThanThoseBefore) {
  int64_t before = INT64_MAX;
  for (const std::string_view policy : PoliciesByLoss()) {
    const int64_t peak =
        PlanTraining(Preset110m({fmt::format("optimizer.policy={}", policy)}).config)
            .total_peak_bytes;
    EXPECT_LT(peak, before) << policy;
    before = peak;
  }
}

TEST(BestPolicyTest, PassesOverWhatTheRunDoesNotAllow) {
  // Only a rule with this setting can serve; of the table that is skewadam's.
  const Subject subject = Preset110m({"optimizer.populations.expert={eps_mode=\"relative\"}"});
  const std::optional<BestPolicy> best =
      FindBestPolicy(subject.config, INT64_MAX, [](const ResolvedRun&) { return 1; });
  ASSERT_TRUE(best);
  EXPECT_EQ(best->name, "skewadam-relative-eps");
}

TEST(BestPolicyTest, IsSaidInTextAndJson) {
  const auto best_of = [](const PlanReport& report) {
    return nlohmann::json::parse(ToJson(report))["verdict"]["best_policy"];
  };
  const Subject muon = Preset110m({"optimizer.policy=muon"});
  const PlanReport roomy = MakeReport(muon, int64_t{1} << 40);
  EXPECT_THAT(ToText(roomy), HasSubstr("\nbest policy that fits: muon, as planned\n"));
  EXPECT_EQ(best_of(roomy)["policy"], "muon");
  EXPECT_EQ(best_of(roomy)["sink"], "accumulate");
  EXPECT_EQ(best_of(roomy)["peak_bytes"], roomy.memory.ledger.total_peak_bytes);

  const PlanReport tight = MakeReport(muon, roomy.memory.ledger.total_peak_bytes - 1);
  EXPECT_THAT(
      ToText(tight),
      ContainsRegex("\nbest policy that fits: --policy muon --sink release, [0-9.]+ MiB\n"));
  EXPECT_EQ(best_of(tight)["sink"], "release");

  const PlanReport hopeless = MakeReport(muon, 1 << 20);
  EXPECT_THAT(ToText(hopeless),
              HasSubstr("best policy: none of muon, skewadam-relative-eps, adafactor fits"));
  EXPECT_TRUE(best_of(hopeless).is_null());

  const PlanReport unknown = MakeReport(muon, std::nullopt);
  EXPECT_THAT(ToText(unknown), Not(HasSubstr("best policy")));
}

// Trains with what is said to give the same results, and with what is said to give others.
TEST(AdviceTest, SameResultsAreTheSame) {
  const TemporaryFolder folder;
  PrepareSmallCorpus(folder / "corpus");
  int64_t number = 0;
  const auto losses = [&](const RunConfig& config) {
    std::vector<double> all;
    const TrainResult result =
        Train(config, folder / fmt::format("run-{}", number++), {},
              {.begin = {},
               .step = [&](const StepMetrics& metrics) { all.push_back(metrics.loss); },
               .warning = {},
               .saved = {},
               .stop = {}});
    all.push_back(result.evaluation->loss);
    all.push_back(static_cast<double>(result.evaluation->tokens));
    return all;
  };
  struct Case {
    float noise;
    float aux;
    bool splitting_changes;
  };
  for (const Case& c : {Case{0, 0, false}, Case{0.5f, 0, true}, Case{0, 0.05f, true}}) {
    RunConfig config = SmallRun(folder / "corpus");
    config.training.steps = 6;
    config.training.eval_interval = 6;
    config.model.router.noise_scale = c.noise;
    config.model.router.aux_coefficient = c.aux;
    const std::vector<double> whole = losses(config);
    bool split = false;
    for (const Suggestion& suggestion :
         Advise(config, INT64_MAX, [](const ResolvedRun&) { return 1; }).fitting) {
      const bool splits = suggestion.settings[0].starts_with("training.micro_batch_size=");
      if (splits) {
        EXPECT_EQ(suggestion.changes_numbers, c.splitting_changes);
      }
      if (suggestion.changes_numbers && (!splits || split)) continue;
      split |= splits;
      SCOPED_TRACE(
          fmt::format("noise {}, aux {}: {}", c.noise, c.aux, fmt::join(suggestion.settings, " ")));
      RunConfig changed = config;
      WrittenSettings written;
      for (const std::string& setting : suggestion.settings) {
        ApplyAssignment(FieldsOf(changed), setting, written);
      }
      const std::vector<double> other = losses(changed);
      ASSERT_EQ(other.size(), whole.size());
      EXPECT_EQ(other.back(), whole.back());
      double difference = 0;
      for (size_t i = 0; i < whole.size(); ++i) {
        difference = std::max(difference, std::abs(whole[i] - other[i]));
      }
      if (!suggestion.changes_numbers) {
        EXPECT_LT(difference, 1e-5);
      } else if (c.noise > 0) {  // balance does little in so few steps
        EXPECT_GT(difference, 1e-4);
      }
    }
    EXPECT_TRUE(split);
  }
}

TEST(AdviceTest, KnowsWhatDependsOnTheMicroBatch) {
  const auto changes = [](const std::vector<std::string>& assignments, std::string_view setting) {
    const Subject subject = Preset110m(assignments);
    const Advice advice = Advise(subject.config, INT64_MAX, [](const ResolvedRun&) { return 1; });
    for (const Suggestion& suggestion : advice.fitting) {
      if (suggestion.settings[0].starts_with(setting)) return suggestion.changes_numbers;
    }
    ADD_FAILURE() << "no suggestion of " << setting;
    return false;
  };
  const std::string unbalanced = "model.router.aux_coefficient=0";
  const std::string quiet = "model.router.noise_scale=0";
  const std::string unclipped = "optimizer.clipping=none";
  const std::string bf16 = "training.gradient_dtype=bf16";
  const std::string halves = "training.micro_batch_size=", release = "training.sink=release";
  EXPECT_FALSE(changes({unbalanced, quiet}, halves));
  EXPECT_TRUE(changes({unbalanced, "model.router.noise_scale=0.1"}, halves));
  EXPECT_TRUE(changes({unbalanced, quiet, bf16}, halves));
  EXPECT_FALSE(changes({unclipped}, release));
  EXPECT_TRUE(changes({unclipped, bf16}, release));
}

TEST(AdviceTest, SaysWhenNothingFits) {
  const PlanReport report = MakeReport(Preset110m(), 1 << 20);
  ASSERT_TRUE(report.advice);
  EXPECT_TRUE(report.advice->fitting.empty());
  ASSERT_TRUE(report.advice->smallest);
  EXPECT_LT(report.advice->smallest->peak_bytes, report.memory.ledger.total_peak_bytes);
  EXPECT_THAT(ToText(report), HasSubstr("no setting makes it fit ("));
}

TEST(AdviceTest, KeepsOtherSettingsOfAPopulation) {
  const Subject subject = Preset110m({"optimizer.populations.attention={ weight_decay = 0.5 }"});
  const Advice advice = Advise(subject.config, INT64_MAX, [](const ResolvedRun&) { return 1; });
  bool found = false;
  for (const Suggestion& suggestion : advice.fitting) {
    for (const std::string& setting : suggestion.settings) {
      if (!setting.starts_with("optimizer.populations.attention")) continue;
      found = true;
      EXPECT_THAT(setting, HasSubstr("weight_decay"));
    }
  }
  EXPECT_TRUE(found);
}

TEST(DenseTest, MatchesParameters) {
  for (const Subject& subject : {Preset110m(), LoadSubject(HuggingFacePath("deepseek-v3"), "", {}),
                                 LoadSubject(HuggingFacePath("qwen3-30b-a3b"), "", {})}) {
    const ModelSize size = subject.size();
    const std::vector<DenseModel> models = DenseModelsOf(subject);
    ASSERT_EQ(models.size(), 3u);
    const double active = static_cast<double>(size.active_parameters);
    const double total = static_cast<double>(size.parameters);
    const double targets[] = {active, std::sqrt(active * total), total};
    for (size_t i = 0; i < 3; ++i) {
      // Within half a column of the feed-forwards' matrices.
      EXPECT_NEAR(static_cast<double>(models[i].size.parameters) / targets[i], 1, 2e-3);
      EXPECT_EQ(models[i].size.parameters, models[i].size.active_parameters);
      EXPECT_GT(models[i].peak_bytes, 2 * models[i].size.parameters);
    }
    EXPECT_NEAR(
        models[0].flops_per_token / size.FlopsPerToken(subject.config.training.sequence_length), 1,
        2e-3);
  }
  EXPECT_TRUE(DenseModelsOf(Preset110m({"model.ffn=[\"dense\"]"})).empty());
}

TEST(LargestTest, FitsAndOneMoreLayerDoesNot) {
  const Subject subject = Preset110m();
  const int64_t budget = int64_t{2} << 30;
  const LargestRow row = LargestThatFits(subject, budget);
  ASSERT_TRUE(row.memory);
  EXPECT_LE(row.memory->ledger.total_peak_bytes, budget);
  RunConfig more = row.subject.config;
  EXPECT_EQ(PlanTraining(more).total_peak_bytes, row.memory->ledger.total_peak_bytes);
  ++more.model.layers;
  EXPECT_GT(PlanTraining(more).total_peak_bytes, budget);
  EXPECT_FALSE(LargestThatFits(subject, 1 << 20).memory);
  EXPECT_THROW(LargestThatFits(LoadSubject(HuggingFacePath("olmoe-1b-7b"), "", {}), budget), Error);
}

TEST(ReportTest, TextFitsAHundredColumns) {
  for (const Subject& subject :
       {Preset110m({"optimizer.policy=adamw"}), LoadSubject("skewadam-6.78b", "lion", {}),
        LoadSubject(HuggingFacePath("deepseek-v3"), "", {}),
        LoadSubject(HuggingFacePath("mixtral-8x7b"), "", {"model.layers=2"})}) {
    std::istringstream text(ToText(MakeReport(subject, int64_t{1} << 30)));
    for (std::string line; std::getline(text, line);) {
      if (line.find("--set") != std::string::npos) continue;  // one long flag is not split
      EXPECT_LE(line.size(), 100u) << line;
    }
  }
}

// The last word of the table's last line, and the like: what a reader takes from it.
TEST(ReportTest, JsonAgreesWithTheTable) {
  const PlanReport report = MakeReport(Preset110m(), int64_t{1} << 40);
  const auto json = nlohmann::json::parse(ToJson(report));
  const std::string text = ToText(report);
  EXPECT_EQ(json["model"]["parameters"], SizeOf(report.subject.config.model).parameters);
  EXPECT_EQ(json["memory"]["peak_bytes"], report.memory.ledger.total_peak_bytes);
  int64_t total = 0;
  for (const auto& [category, bytes] : json["memory"]["at_peak_bytes"].items()) {
    int64_t sum = 0;
    for (const auto& [name, population] : json["memory"]["by_population"].items()) {
      const int64_t held = population["at_peak_bytes"][category];
      sum += held;
      if (held > 0) {
        EXPECT_THAT(text, HasSubstr(fmt::format(" {:.1f}", static_cast<double>(held) / kMiB)))
            << name << category;
      }
    }
    EXPECT_EQ(bytes, sum) << category;
    total += sum;
  }
  EXPECT_EQ(json["memory"]["peak_bytes"], total);
  EXPECT_THAT(text, HasSubstr("fits in 1024.00 GiB"));
  EXPECT_EQ(json["verdict"]["fits"], true);
  EXPECT_THAT(text, HasSubstr("in the " + json["memory"]["peak_phase"].get<std::string>()));
  EXPECT_EQ(json["memory"]["moments"].size(), report.memory.moments.size());
  EXPECT_EQ(json["dense"].size(), 3u);
}

TEST(ReportTest, SaysWhatReleaseKeeps) {
  const std::string tied = ToText(MakeReport(Preset110m({"training.sink=release"}), std::nullopt));
  EXPECT_THAT(tied, HasSubstr("tok_emb.weight (16.0 MiB, f32)"));
  EXPECT_THAT(tied, HasSubstr("(2.00x with "));
  const std::string untied =
      ToText(MakeReport(Preset110m({"training.sink=release", "model.tied_head=false",
                                    "optimizer.clipping=per_tensor"}),
                        std::nullopt));
  EXPECT_THAT(untied, Not(HasSubstr("tok_emb.weight")));
  EXPECT_THAT(untied, Not(HasSubstr("(2.00x with ")));
  EXPECT_THAT(untied, HasSubstr("the machine does not tell what is free"));
}

// Of a model that can be run and of one that cannot, with the same experts.
TEST(ReportTest, CountsHiddenBuffers) {
  const PlanReport own =
      MakeReport(Preset110m({"training.sink=release", "optimizer.policy=mesh"}), std::nullopt);
  int64_t experts_bytes = 0;
  for (const Parameter& parameter : ParametersOf(own.subject.config.model)) {
    if (parameter.population == Population::kExpert) experts_bytes += 4 * parameter.value.size();
  }
  EXPECT_THAT(ToText(own), HasSubstr("beside " + BytesText(experts_bytes) + " of hidden buffers"));
  const auto olmoe = [&](const char* policy, const char* sink) {
    const Subject subject =
        LoadSubject(HuggingFacePath("olmoe-1b-7b"), policy, {std::string("training.sink=") + sink});
    return MakeRow(subject).memory.value().ledger.at_peak_bytes[static_cast<size_t>(
        Memory::kGradients)];
  };
  // 16 layers of 64 experts, three matrices of 2048 x 1024 each, in float32 or as the rule says.
  const int64_t elements = int64_t{16} * 64 * 3 * 2048 * 1024;
  EXPECT_GT(olmoe("mesh", "release"), 4 * elements);
  EXPECT_LT(olmoe("mesh", "release"), 4 * elements + (int64_t{1} << 30));
  EXPECT_GT(olmoe("mesh-bf16-buffer", "release"), 2 * elements);
  EXPECT_LT(olmoe("mesh-bf16-buffer", "accumulate"), 2 * elements + (int64_t{4} << 30));
  EXPECT_THAT(MakeRow(LoadSubject(HuggingFacePath("olmoe-1b-7b"), "mesh-layer-grouping",
                                  {"training.sink=release"}))
                  .refused,
              HasSubstr("updates tensor by tensor"));
}

TEST(ReportTest, SaysWhatAHuggingFacePlanLeavesOut) {
  const PlanReport report =
      MakeReport(LoadSubject(HuggingFacePath("deepseek-v3"), "adamw", {}), int64_t{80} << 30);
  EXPECT_THAT(ToText(report), HasSubstr("activations, scratch and alignment are left out"));
  const auto json = nlohmann::json::parse(ToJson(report));
  EXPECT_EQ(json["memory"]["activations_planned"], false);
  // Two float32 moments of all but the bias that has no gradient.
  EXPECT_EQ(json["memory"]["at_peak_bytes"]["optimizer"],
            8 * (int64_t{671'026'419'200} - 58 * 256));
  EXPECT_EQ(json["verdict"]["fits"], false);
  EXPECT_THAT(ToText(std::vector{MakeRow(report.subject), MakeRow(report.subject)}, std::nullopt),
              HasSubstr("\n\nThis engine cannot run deepseek_v3: "));
  EXPECT_THAT(ToText(MakeReport(report.subject, int64_t{80} << 40)),
              HasSubstr(" to spare for activations and scratch\n"));
  EXPECT_THROW(LoadSubject(HuggingFacePath("deepseek-v3"), "", {"model.layers=3"}), Error);
  EXPECT_THROW(LoadSubject("no-such-preset", "", {}), Error);
}

// Only an error of the settings means that they do not fit.
TEST(AdviceTest, ABrokenContractIsNotAdvice) {
  const RunConfig config = Preset110m().config;
  const Planner refusing = [](const ResolvedRun&) -> int64_t { Fail("policy: refused"); };
  EXPECT_EQ(Advise(config, 1, refusing).planned, 0);
  const Planner broken = [](const ResolvedRun&) -> int64_t { throw InternalError("scratch"); };
  EXPECT_THROW(Advise(config, 1, broken), InternalError);
}

// A POSIX extended regular expression: GCC 12 warns inside std::regex.
class Pattern {
 public:
  explicit Pattern(const char* text) { EXPECT_EQ(regcomp(&compiled_, text, REG_EXTENDED), 0); }
  ~Pattern() { regfree(&compiled_); }
  Pattern(const Pattern&) = delete;
  Pattern& operator=(const Pattern&) = delete;

  // The match and its groups; empty without a match.
  std::vector<std::string> Match(const std::string& text) const {
    std::vector<regmatch_t> places(compiled_.re_nsub + 1);
    if (regexec(&compiled_, text.c_str(), places.size(), places.data(), 0) != 0) return {};
    std::vector<std::string> groups;
    for (const regmatch_t& place : places) {
      const bool taken = place.rm_so >= 0;
      groups.push_back(taken ? text.substr(static_cast<size_t>(place.rm_so),
                                           static_cast<size_t>(place.rm_eo - place.rm_so))
                             : "");
    }
    return groups;
  }

 private:
  regex_t compiled_;
};

// Tags that nest and close, attributes in quotes, no bare & or <.
void ExpectWellFormed(const std::string& xml) {
  std::vector<std::string> open;
  const Pattern entity("^&[a-z]+;");
  const Pattern tag(
      R"re(^<(/?)([a-z]+)(( [a-z:A-Z0-9-]+="[^"<&]*(&[a-z]+;[^"<&]*)*")*) ?(/?)>$)re");
  size_t at = 0;
  while (at < xml.size()) {
    const size_t next = xml.find('<', at);
    const std::string text = xml.substr(at, next - at);
    if (open.empty() || open.back() != "style") {
      for (size_t i = text.find('&'); i != std::string::npos; i = text.find('&', i + 1)) {
        EXPECT_FALSE(entity.Match(text.substr(i, 8)).empty()) << text;
      }
    }
    if (next == std::string::npos) break;
    const size_t end = xml.find('>', next);
    ASSERT_NE(end, std::string::npos);
    const std::string element = xml.substr(next, end - next + 1);
    const std::vector<std::string> match = tag.Match(element);
    ASSERT_FALSE(match.empty()) << element.substr(0, 200);
    if (!match[1].empty()) {
      ASSERT_FALSE(open.empty());
      EXPECT_EQ(open.back(), match[2]);
      open.pop_back();
    } else if (match[6].empty()) {
      open.push_back(match[2]);
    }
    at = end + 1;
  }
  EXPECT_TRUE(open.empty());
}

TEST(ChartTest, IsWellFormedAndNamesThePeak) {
  PlanReport report = MakeReport(Preset110m(), int64_t{1} << 40);
  report.subject.name = "a <b> & \"c\"";
  const std::string svg = ToSvg(report);
  ExpectWellFormed(svg);
  EXPECT_THAT(svg, HasSubstr("a &lt;b&gt; &amp; &quot;c&quot;"));
  EXPECT_THAT(svg, HasSubstr("peak " + BytesText(report.memory.ledger.total_peak_bytes)));
  EXPECT_THAT(svg, HasSubstr("memory, "));
  EXPECT_THAT(svg, HasSubstr("prefers-color-scheme: dark"));
  for (int i = 0; i < kMemoryCategories; ++i) {
    EXPECT_THAT(svg, HasSubstr(">" + std::string(NameOf(Memory(i))) + "</text>"));
  }
  EXPECT_THAT(svg, Not(HasSubstr("nan")));
  EXPECT_THAT(svg, Not(HasSubstr("href")));
}

TEST(BytesTest, ReadsAndRefuses) {
  EXPECT_EQ(ParseBytes("24GiB"), int64_t{24} << 30);
  EXPECT_EQ(ParseBytes("1.5 TiB"), int64_t{3} << 39);
  EXPECT_EQ(ParseBytes("500MB"), 500'000'000);
  EXPECT_EQ(ParseBytes("4096B"), 4096);
  for (const char* wrong : {"", "GiB", "-1GiB", "0B", "24", "1e3GiB", "24Gib", "24 GiB x", "nan",
                            "inf", "99999999999999999999TiB"}) {
    EXPECT_THROW(ParseBytes(wrong), Error) << wrong;
  }
  EXPECT_EQ(BytesText(int64_t{24} << 30), "24.00 GiB");
  EXPECT_EQ(BytesText(3 << 20), "3.0 MiB");
  EXPECT_EQ(BytesText(12), "12 bytes");
}

}  // namespace
}  // namespace terrace
