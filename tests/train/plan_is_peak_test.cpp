// What is planned is what a run takes, to the byte and by category. The settings that change memory
// are the sink, activation checkpointing, one micro-batch or several, the types of weights and
// gradients and the kind of clipping: all of their 72 combinations under two policies, a table in
// which every two settings meet under each of the others.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "model/presets.h"
#include "support/small_run.h"
#include "support/temporary_folder.h"
#include "train/trainer.h"

namespace terrace {
namespace {

struct Types {
  DType weights, gradients;
};
constexpr Types kTypes[] = {
    {DType::kF32, DType::kF32}, {DType::kBF16, DType::kF32}, {DType::kBF16, DType::kBF16}};
constexpr ClippingKind kClippings[] = {ClippingKind::kGlobalNorm, ClippingKind::kPerTensor,
                                       ClippingKind::kNone};

// What changes memory, besides model and policy.
struct MemorySettings {
  SinkKind sink;
  bool checkpointing;
  int64_t micro_batches;
  Types types;
  ClippingKind clipping;

  std::string ToString() const {
    return fmt::format("{}, checkpointing {}, {} micro-batches, weights {}, gradients {}, {}",
                       sink == SinkKind::kRelease ? "release" : "accumulate", checkpointing,
                       micro_batches, NameOf(types.weights), NameOf(types.gradients),
                       NameOf(clipping));
  }
};

// What some policies refuse.
bool Takes(std::string_view policy, const MemorySettings& settings) {
  // Looks at all experts of a layer at once.
  if (policy == "mesh-layer-grouping") return settings.sink != SinkKind::kRelease;
  // Its gradient buffer is bfloat16, which takes weights of that type.
  if (policy == "mesh-bf16-buffer") return settings.types.weights == DType::kBF16;
  return true;
}

class PlanIsPeakTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    shared_ = new TemporaryFolder;
    PrepareSmallCorpus(*shared_ / "corpus");
  }
  static void TearDownTestSuite() { delete shared_; }

  static RunConfig ConfigOf(const std::string& preset, const std::string& policy,
                            const MemorySettings& settings) {
    RunConfig config = SmallRun(*shared_ / "corpus");
    const int64_t vocabulary = config.model.vocab_size;
    config.model = PresetNamed(preset);
    config.model.vocab_size = std::max(config.model.vocab_size, vocabulary);
    config.model.weight_dtype = settings.types.weights;
    config.training.eval_interval = 1;
    config.training.sink = settings.sink;
    config.training.activation_checkpointing = settings.checkpointing;
    config.training.gradient_accumulation_steps = settings.micro_batches;
    config.training.gradient_dtype = settings.types.gradients;
    config.optimizer.policy = policy;
    config.optimizer.clipping.kind = settings.clipping;
    return config;
  }

  // By the first step of a run, with an evaluation; nothing is saved.
  static void ExpectPlanIsPeak(const std::string& preset, const std::string& policy,
                               const MemorySettings& settings) {
    SCOPED_TRACE(settings.ToString());
    const RunConfig config = ConfigOf(preset, policy, settings);
    struct Enough {};
    const TemporaryFolder folder;
    std::optional<Ledger> plan;
    std::optional<StepMetrics> first;
    try {
      Train(config, folder / "run", {},
            {.begin = [&](const RunSummary& summary) { plan = summary.plan; },
             .step =
                 [&](const StepMetrics& metrics) {
                   first = metrics;
                   throw Enough{};
                 },
             .warning = {},
             .saved = {},
             .stop = {}});
    } catch (const Enough&) {
    }
    ASSERT_TRUE(plan && first);
    EXPECT_EQ(first->planned_peak_bytes, plan->total_peak_bytes);
    EXPECT_EQ(first->ledger_peak_bytes, plan->total_peak_bytes);
    EXPECT_EQ(first->ledger_at_peak_bytes, plan->at_peak_bytes);
  }

  static TemporaryFolder* shared_;
};
TemporaryFolder* PlanIsPeakTest::shared_ = nullptr;

// SkewAdam keeps factored state and nothing from step to step but that; MESH keeps gradient
// buffers, which a releasing sink must not give back.
class EveryCombinationTest
    : public PlanIsPeakTest,
      public testing::WithParamInterface<std::tuple<std::string, SinkKind, bool>> {};

TEST_P(EveryCombinationTest, PlanIsPeak) {
  const auto& [policy, sink, checkpointing] = GetParam();
  for (const int64_t micro_batches : {1, 4}) {
    for (const Types& types : kTypes) {
      for (const ClippingKind clipping : kClippings) {
        ExpectPlanIsPeak("gpt-moe-tiny", policy,
                         {sink, checkpointing, micro_batches, types, clipping});
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    , EveryCombinationTest,
    testing::Combine(testing::Values("skewadam", "mesh"),
                     testing::Values(SinkKind::kAccumulate, SinkKind::kRelease), testing::Bool()),
    [](const auto& test) {
      const std::string policy = std::get<0>(test.param);
      const std::string sink =
          std::get<1>(test.param) == SinkKind::kRelease ? "_release" : "_accumulate";
      return policy + sink + (std::get<2>(test.param) ? "_checkpointing" : "");
    });

constexpr SinkKind kKeep = SinkKind::kAccumulate;
constexpr SinkKind kRelease = SinkKind::kRelease;
constexpr Types kF32 = kTypes[0], kMixed = kTypes[1], kBF16 = kTypes[2];
constexpr ClippingKind kGlobal = ClippingKind::kGlobalNorm;
constexpr ClippingKind kByTensor = ClippingKind::kPerTensor;
constexpr ClippingKind kNoClipping = ClippingKind::kNone;

// Every two settings meet in some line. A line: sink, checkpointing, micro-batches, types,
// clipping.
constexpr MemorySettings kEveryPair[] = {
    {kKeep, false, 1, kF32, kNoClipping},    {kKeep, false, 1, kMixed, kGlobal},
    {kKeep, false, 4, kBF16, kGlobal},       {kKeep, true, 1, kBF16, kNoClipping},
    {kKeep, true, 4, kF32, kByTensor},       {kRelease, false, 1, kMixed, kByTensor},
    {kRelease, false, 1, kBF16, kByTensor},  {kRelease, true, 1, kF32, kGlobal},
    {kRelease, true, 4, kMixed, kNoClipping}};

TEST_F(PlanIsPeakTest, EveryTwoSettingsMeetInTheTable) {
  const auto levels = [](const MemorySettings& line) {
    const auto type = line.types.weights == DType::kF32     ? 0
                      : line.types.gradients == DType::kF32 ? 1
                                                            : 2;
    return std::array<int, 5>{static_cast<int>(line.sink), static_cast<int>(line.checkpointing),
                              static_cast<int>(line.micro_batches), type,
                              static_cast<int>(line.clipping)};
  };
  constexpr size_t kLevels[] = {2, 2, 2, 3, 3};
  for (size_t i = 0; i < 5; ++i) {
    for (size_t j = 0; j < i; ++j) {
      std::set<std::pair<int, int>> met;
      for (const MemorySettings& line : kEveryPair) met.emplace(levels(line)[i], levels(line)[j]);
      EXPECT_EQ(met.size(), kLevels[i] * kLevels[j]) << i << ", " << j;
    }
  }
}

class EveryPolicyTest : public PlanIsPeakTest, public testing::WithParamInterface<std::string> {
 protected:
  static void ExpectPlanIsPeakOrRefused(const std::string& preset,
                                        std::span<const MemorySettings> table) {
    for (const MemorySettings& line : table) {
      if (Takes(GetParam(), line)) {
        ExpectPlanIsPeak(preset, GetParam(), line);
      } else {
        EXPECT_THROW(PlanTraining(ConfigOf(preset, GetParam(), line)), Error) << line.ToString();
      }
    }
  }
};

TEST_P(EveryPolicyTest, PlanIsPeak) { ExpectPlanIsPeakOrRefused("gpt-moe-tiny", kEveryPair); }

// Another attention, a shared expert, a selection bias, several residual streams.
TEST_P(EveryPolicyTest, PlanIsPeakOfNanowhale) {
  ExpectPlanIsPeakOrRefused("nanowhale-tiny",
                            std::array{MemorySettings{kKeep, false, 4, kF32, kGlobal},
                                       MemorySettings{kRelease, true, 4, kBF16, kNoClipping},
                                       MemorySettings{kRelease, false, 1, kMixed, kGlobal}});
}

// Other shapes: several layers of experts, a dense one, rotary positions. Sanitizers make minutes
// of it.
#ifndef __SANITIZE_ADDRESS__
TEST_P(EveryPolicyTest, PlanIsPeakOfALargerModel) {
  ExpectPlanIsPeakOrRefused("moe-laptop",
                            std::array{MemorySettings{kKeep, false, 1, kF32, kGlobal},
                                       MemorySettings{kRelease, true, 4, kBF16, kNoClipping}});
}
#endif

std::vector<std::string> AllPolicies() {
  const auto names = PolicyNames();
  return {names.begin(), names.end()};
}

INSTANTIATE_TEST_SUITE_P(, EveryPolicyTest, testing::ValuesIn(AllPolicies()), [](const auto& test) {
  std::string name = test.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

}  // namespace
}  // namespace terrace
