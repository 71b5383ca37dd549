// What is planned is what a run takes, to the byte and by category: every preset small enough to
// run here, under every policy and sink, with and without activation checkpointing, with one
// micro-batch and four, for all types of weights and gradients and kinds of clipping.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>

#include "core/error.h"
#include "model/presets.h"
#include "support/small_run.h"
#include "support/temporary_folder.h"
#include "train/trainer.h"

namespace terrace {
namespace {

using Case = std::tuple<std::string, std::string>;  // preset, policy

class PlanIsPeakTest : public testing::TestWithParam<Case> {
 protected:
  static void SetUpTestSuite() {
    shared_ = new TemporaryFolder;
    PrepareSmallCorpus(*shared_ / "corpus");
  }
  static void TearDownTestSuite() { delete shared_; }

  // By the first step of a run, with an evaluation; nothing is saved.
  static void ExpectPlanIsPeak(const RunConfig& config) {
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

struct Types {
  DType weights, gradients;
};
constexpr Types kTypes[] = {
    {DType::kF32, DType::kF32}, {DType::kBF16, DType::kF32}, {DType::kBF16, DType::kBF16}};
constexpr ClippingKind kClippings[] = {ClippingKind::kGlobalNorm, ClippingKind::kPerTensor,
                                       ClippingKind::kNone};

TEST_P(PlanIsPeakTest, ForEverySettingThatChangesMemory) {
  const auto& [preset, policy] = GetParam();
  RunConfig config = SmallRun(*shared_ / "corpus");
  const int64_t vocabulary = config.model.vocab_size;
  config.model = PresetNamed(preset);
  config.model.vocab_size = std::max(config.model.vocab_size, vocabulary);
  config.training.eval_interval = 1;
  config.optimizer.policy = policy;
  // Types and clippings come turn by turn, so that each meets every other setting under some
  // policy.
  size_t turn = policy.size();
  for (const SinkKind sink : {SinkKind::kAccumulate, SinkKind::kRelease}) {
    // This rule looks at all experts of a layer at once.
    if (sink == SinkKind::kRelease && policy == "mesh-layer-grouping") continue;
    for (const bool checkpointing : {false, true}) {
      for (const int64_t micro_batches : {1, 4}) {
        // Its gradient buffer is bfloat16, which takes weights of that type.
        const bool narrow = policy == "mesh-bf16-buffer";
        const Types types = narrow ? kTypes[1 + turn % 2] : kTypes[turn % std::size(kTypes)];
        const ClippingKind clipping = kClippings[turn / 3 % std::size(kClippings)];
        ++turn;
        SCOPED_TRACE(fmt::format(
            "release {}, checkpointing {}, {} micro-batches, weights {}, gradients {}, {}",
            sink == SinkKind::kRelease, checkpointing, micro_batches, NameOf(types.weights),
            NameOf(types.gradients), NameOf(clipping)));
        config.training.sink = sink;
        config.training.activation_checkpointing = checkpointing;
        config.training.gradient_accumulation_steps = micro_batches;
        config.model.weight_dtype = types.weights;
        config.training.gradient_dtype = types.gradients;
        config.optimizer.clipping.kind = clipping;
        ExpectPlanIsPeak(config);
      }
    }
  }
}

// Sanitizers make minutes of the second one.
#ifdef __SANITIZE_ADDRESS__
const std::string kPresets[] = {"gpt-moe-tiny"};
#else
const std::string kPresets[] = {"gpt-moe-tiny", "moe-laptop"};
#endif

std::vector<std::string> AllPolicies() {
  const auto names = PolicyNames();
  return {names.begin(), names.end()};
}

INSTANTIATE_TEST_SUITE_P(, PlanIsPeakTest,
                         testing::Combine(testing::ValuesIn(kPresets),
                                          testing::ValuesIn(AllPolicies())),
                         [](const auto& test) {
                           std::string name =
                               std::get<0>(test.param) + "_" + std::get<1>(test.param);
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace terrace
