// What is planned is what a run takes, to the byte: every preset small enough to run here, under
// every policy and sink, with and without activation checkpointing, with one micro-batch and four.
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

  // The first step of a run, with an evaluation; nothing is saved.
  static StepMetrics FirstStep(const RunConfig& config) {
    struct Enough {};
    const TemporaryFolder folder;
    std::optional<StepMetrics> first;
    try {
      Train(config, folder / "run", {},
            {.begin = {},
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
    return first.value();
  }

  static TemporaryFolder* shared_;
};
TemporaryFolder* PlanIsPeakTest::shared_ = nullptr;

TEST_P(PlanIsPeakTest, ForEverySinkCheckpointingAndNumberOfMicroBatches) {
  const auto& [preset, policy] = GetParam();
  RunConfig config = SmallRun(*shared_ / "corpus");
  const int64_t vocabulary = config.model.vocab_size;
  config.model = PresetNamed(preset);
  config.model.vocab_size = std::max(config.model.vocab_size, vocabulary);
  // Its gradient buffer is bfloat16, which takes weights of that type.
  if (policy == "mesh-bf16-buffer") config.model.weight_dtype = DType::kBF16;
  config.training.gradient_dtype = config.model.weight_dtype;
  config.training.eval_interval = 1;
  config.optimizer.policy = policy;
  for (const SinkKind sink : {SinkKind::kAccumulate, SinkKind::kRelease}) {
    // This rule looks at all experts of a layer at once.
    if (sink == SinkKind::kRelease && policy == "mesh-layer-grouping") continue;
    for (const bool checkpointing : {false, true}) {
      for (const int64_t micro_batches : {1, 4}) {
        SCOPED_TRACE(fmt::format("release {}, checkpointing {}, {} micro-batches",
                                 sink == SinkKind::kRelease, checkpointing, micro_batches));
        config.training.sink = sink;
        config.training.activation_checkpointing = checkpointing;
        config.training.micro_batches = micro_batches;
        const StepMetrics step = FirstStep(config);
        EXPECT_EQ(step.planned_peak_bytes, PlanTraining(config).total_peak_bytes);
        EXPECT_EQ(step.ledger_peak_bytes, step.planned_peak_bytes);
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
