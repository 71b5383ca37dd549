// The plan's tables say what the ledger says, and say it of the run.
#include "plan/memory_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "model/presets.h"
#include "optim/optimizer.h"
#include "plan/declared_plan.h"
#include "train/trainer.h"

namespace terrace {
namespace {

using ::testing::AnyOf;
using ::testing::StartsWith;

constexpr size_t At(Memory category) { return static_cast<size_t>(category); }

struct Case {
  const char* preset;
  const char* policy;
  const char* sink;
  bool checkpointing = false;
  int micro_batches = 1;
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.preset << ' ' << c.policy << ' ' << c.sink << ' ' << c.checkpointing << ' '
       << c.micro_batches;
}

RunConfig ConfigOf(const Case& c) {
  return ConfigOfModel(
      PresetNamed(c.preset),
      {std::string("optimizer.policy=") + c.policy, std::string("training.sink=") + c.sink,
       "training.micro_batch_size=2", "training.sequence_length=16",
       fmt::format("training.gradient_accumulation_steps={}", c.micro_batches),
       fmt::format("training.activation_checkpointing={}", c.checkpointing)});
}

class MemoryPlanTest : public testing::TestWithParam<Case> {};

TEST_P(MemoryPlanTest, AddsUpToTheLedger) {
  const RunConfig config = ConfigOf(GetParam());
  const Ledger ledger = PlanTraining(config);
  const MemoryPlan plan = PlanMemory(config);
  EXPECT_EQ(plan.ledger.total_peak_bytes, ledger.total_peak_bytes);
  EXPECT_EQ(plan.ledger.at_peak_bytes, ledger.at_peak_bytes);
  CategoryBytes sums{};
  for (const CategoryBytes& row : plan.at_peak) {
    for (size_t i = 0; i < row.size(); ++i) sums[i] += row[i];
  }
  EXPECT_EQ(sums, ledger.at_peak_bytes);

  // What belongs to no parameter is activations and scratch, and only that.
  const CategoryBytes& none = plan.at_peak[kPopulations];
  EXPECT_EQ(none[At(Memory::kWeights)], 0);
  EXPECT_EQ(none[At(Memory::kGradients)], 0);
  EXPECT_EQ(none[At(Memory::kOptimizer)], 0);
  EXPECT_EQ(none[At(Memory::kActivations)], ledger.at_peak_bytes[At(Memory::kActivations)]);
  EXPECT_EQ(none[At(Memory::kScratch)], ledger.at_peak_bytes[At(Memory::kScratch)]);

  // The peak is among the moments, under its own name, and nothing is above it.
  const auto highest = std::max_element(
      plan.moments.begin(), plan.moments.end(),
      [](const auto& a, const auto& b) { return a.total_bytes() < b.total_bytes(); });
  ASSERT_NE(highest, plan.moments.end());
  EXPECT_EQ(highest->bytes, ledger.at_peak_bytes);
  EXPECT_EQ(highest->phase, plan.peak_phase);
  EXPECT_LE(plan.moments.size(), MemoryPlan::kMoments);
  EXPECT_NE(plan.peak_tensor, "");
}

TEST_P(MemoryPlanTest, PopulationsHoldWhatTheirTensorsDeclare) {
  const RunConfig config = ConfigOf(GetParam());
  const MemoryPlan plan = PlanMemory(config);
  std::array<int64_t, kPopulations> weights{};
  Parameters parameters;
  int64_t tensors = 0;
  for (Parameter& parameter : ParametersOf(config.model)) {
    weights[static_cast<size_t>(parameter.population)] += parameter.value.bytes();
    parameters.push_back(std::move(parameter));
    ++tensors;
  }
  const StateBytes state = StateBytesOf(ResolvedRun(config).policy, parameters);
  int64_t above = 0;
  for (size_t i = 0; i < kPopulations; ++i) {
    const int64_t more_weights = plan.at_peak[i][At(Memory::kWeights)] - weights[i];
    const int64_t more_state = plan.at_peak[i][At(Memory::kOptimizer)] - state.by_population[i];
    EXPECT_GE(more_weights, 0) << RowName(static_cast<int>(i));
    EXPECT_GE(more_state, 0) << RowName(static_cast<int>(i));
    above += more_weights + more_state;
  }
  // The rest is alignment: below 64 bytes a tensor, in debug builds 64 more.
  EXPECT_LE(above, plan.alignment_bytes);
  EXPECT_LE(plan.alignment_bytes, 8 * 2 * Arena::kAlignment * (tensors + 1000));
}

INSTANTIATE_TEST_SUITE_P(Runs, MemoryPlanTest,
                         testing::Values(Case{"gpt-moe-tiny", "skewadam", "accumulate"},
                                         Case{"gpt-moe-tiny", "skewadam", "release", true, 4},
                                         Case{"gpt-moe-tiny", "adamw", "release"},
                                         Case{"gpt-moe-tiny", "mesh", "accumulate", false, 4},
                                         Case{"gpt-moe-tiny", "mesh", "release"},
                                         Case{"gpt-moe-tiny", "muon", "accumulate", true},
                                         Case{"moe-laptop", "lion", "accumulate"},
                                         Case{"moe-laptop", "muon", "release", true},
                                         Case{"moe-110m", "skewadam", "accumulate", true, 4},
                                         Case{"moe-110m", "adamw", "release", true, 4},
                                         Case{"skewadam-6.78b", "skewadam", "accumulate"},
                                         Case{"skewadam-6.78b", "skewadam", "release", true, 4}));

TEST(MemoryPlanTest, SaysWhereThePeakIs) {
  // All gradients and the experts' hidden rows are there once the head is done.
  const MemoryPlan accumulated = PlanMemory(ConfigOf({"moe-110m", "skewadam", "accumulate"}));
  EXPECT_THAT(TextOf(accumulated.peak_phase), AnyOf(StartsWith("backward of layers."),
                                                    StartsWith("forward and backward of the head"),
                                                    StartsWith("update of the weights")));
  const MemoryPlan large =
      PlanMemory(ConfigOfModel(PresetNamed("moe-110m"), {"training.micro_batch_size=64"}));
  EXPECT_THAT(TextOf(large.peak_phase), StartsWith("backward of layers.3's "));
  // Muon's iteration needs more than a tiny batch does.
  const MemoryPlan muon = PlanMemory(ConfigOfModel(
      PresetNamed("moe-110m"), {"training.micro_batch_size=1", "training.sequence_length=1",
                                "training.precision=f32", "optimizer.policy=muon"}));
  EXPECT_EQ(TextOf(muon.peak_phase), "update of the weights");
}

TEST(MemoryPlanTest, ThinsALongStep) {
  const RunConfig config = ConfigOfModel(
      PresetNamed("gpt-moe-tiny"), {"training.micro_batch_size=1", "training.sequence_length=1",
                                    "training.gradient_accumulation_steps=500"});
  const MemoryPlan plan = PlanMemory(config);
  EXPECT_GT(plan.moments.size(), MemoryPlan::kMoments / 4);
  EXPECT_LE(plan.moments.size(), MemoryPlan::kMoments);
  int64_t highest = 0;
  for (const PlanMoment& moment : plan.moments) highest = std::max(highest, moment.total_bytes());
  EXPECT_EQ(highest, PlanTraining(config).total_peak_bytes);
}

TEST(MemoryPlanTest, NamesPhases) {
  EXPECT_EQ(TextOf(Phase{"backward", "feed-forward", 1}), "backward of layers.1's feed-forward");
  EXPECT_EQ(TextOf(Phase{"forward", "", 0}), "forward of layers.0");
  EXPECT_EQ(TextOf(Phase{"forward", "embedding"}), "forward of the embedding");
  EXPECT_EQ(TextOf(Phase{"evaluation"}), "evaluation");
}

}  // namespace
}  // namespace terrace
