// Micro-batches: one after another, together in one backward call, or as one batch.
#include "model/harness.h"

namespace terrace {
namespace {

class AccumulationTest : public ModelTest {
 protected:
  static constexpr int64_t kMicroBatches = 4;

  // Four micro-batches of two sequences, and the same eight sequences as one batch.
  static HostBatch Whole(const ModelConfig& config) { return RandomBatch(config, 8, 6, 3); }
  static std::vector<HostBatch> Parts(const HostBatch& whole) {
    std::vector<HostBatch> parts;
    const int64_t tokens = std::ssize(whole.inputs) / kMicroBatches;
    for (int64_t i = 0; i < kMicroBatches; ++i) {
      const auto part = [&](const std::vector<int32_t>& values) {
        return std::vector<int32_t>(values.begin() + i * tokens, values.begin() + (i + 1) * tokens);
      };
      parts.push_back(
          {whole.sequences / kMicroBatches, whole.length, part(whole.inputs), part(whole.targets)});
    }
    return parts;
  }
  static std::vector<Pass> PassesOf(std::vector<HostBatch>& parts) {
    std::vector<Pass> passes;
    int64_t counted = 0;
    for (const HostBatch& part : parts) counted += part.Counted();
    for (HostBatch& part : parts) {
      passes.push_back(PassOf(part));
      passes.back().loss_scale = 1.0f / static_cast<float>(counted);
      passes.back().balance_scale = 1.0f / kMicroBatches;
    }
    return passes;
  }
};

// Without load-balancing losses the split is exact to rounding, also where counted tokens differ.
TEST_P(AccumulationTest, FourMicroBatchesEqualOneBatch) {
  ModelConfig config = SmallConfig();
  config.router.aux_coefficient = config.router.z_coefficient = 0;
  TestModel model(config, GetParam());
  model.Randomize(1, 0.3);
  HostBatch whole = Whole(config);
  for (const int64_t n : {0, 1, 2, 3, 20}) whole.targets[n] = kIgnoredTarget;
  TestSink one, four;
  const Losses whole_losses = model.Step(PassOf(whole), one);
  std::vector<HostBatch> parts = Parts(whole);
  Losses sum;
  for (const Pass& pass : PassesOf(parts)) {
    const Losses losses = model.Step(pass, four);
    sum.tokens += losses.tokens;
  }
  EXPECT_NEAR(sum.tokens, whole_losses.tokens, 1e-6 * whole_losses.tokens);
  ExpectGradientsNear(four, one, 1e-5);
}

TEST_P(AccumulationTest, TogetherEqualsOneAfterAnother) {
  ModelConfig config = SmallConfig();
  config.norm = NormKind::kLayerNorm;
  config.positions = PositionKind::kLearned;
  config.router.noise_scale = 0.3f;
  TestModel model(config, GetParam());
  model.Randomize(1, 0.3);
  std::vector<HostBatch> parts = Parts(Whole(config));
  std::vector<Pass> passes = PassesOf(parts);
  for (size_t i = 0; i < passes.size(); ++i) {
    passes[i].training = true;
    passes[i].noise_key = i;
  }
  TestSink together, apart;
  const Losses losses = model.Run(passes, &together);
  double tokens = 0, balance = 0;
  for (const Pass& pass : passes) {
    const Losses part = model.Step(pass, apart);
    tokens += part.tokens;
    balance += part.balance;
  }
  EXPECT_NEAR(losses.tokens, tokens, 1e-9 * tokens);
  EXPECT_NEAR(losses.balance, balance, 1e-9);
  ExpectGradientsNear(together, apart, 1e-5);
  // However many micro-batches, one Begin/End pair a contribution.
  for (const Parameter& parameter : model->parameters()) {
    if (together.skips.contains(parameter.name)) continue;
    EXPECT_EQ(together.ends.at(parameter.name), parameter.contributions) << parameter.name;
  }
}

// Load-balancing losses are means within a micro-batch, averaged over micro-batches: four times the
// same micro-batch is that micro-batch.
TEST_P(AccumulationTest, BalanceIsAveragedOverMicroBatches) {
  ModelConfig config = SmallConfig();
  config.router.aux_coefficient = 1;
  config.router.z_coefficient = 0.1f;
  TestModel model(config, GetParam());
  model.Randomize(1, 0.3);
  HostBatch part = RandomBatch(config, 2, 6, 3);
  std::vector<HostBatch> copies(kMicroBatches, part);
  TestSink once, repeated;
  model.Step(PassOf(part), once);
  for (const Pass& pass : PassesOf(copies)) model.Step(pass, repeated);
  ExpectGradientsNear(repeated, once, 1e-5);
}

// A sink may update a parameter at its End. Here it destroys it: the gradients stay the same.
TEST_P(AccumulationTest, NoParameterIsReadAfterItsEnd) {
  for (const bool tied : {false, true}) {
    ModelConfig config = SmallConfig();
    config.norm = NormKind::kLayerNorm;
    config.positions = PositionKind::kLearned;
    config.tied_head = tied;
    TestModel model(config, GetParam());
    model.Randomize(1, 0.3);
    std::vector<HostBatch> parts = Parts(Whole(config));
    const std::vector<Pass> passes = PassesOf(parts);
    TestSink expected, spoiled;
    model.Run(passes, &expected);
    spoiled.spoil_after_end = true;
    model.Run(passes, &spoiled);
    EXPECT_EQ(spoiled.gradients, expected.gradients);
  }
}

TERRACE_ON_ALL_BACKENDS(AccumulationTest);

}  // namespace
}  // namespace terrace
