#include "train/step.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "backend/cpu/cpu_backend.h"
#include "core/rng.h"
#include "optim/accumulate_sink.h"
#include "support/compare.h"
#include "support/small_run.h"

namespace terrace {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kLength = 16;

// A model and a sink; tokens of sequence s are a function of s alone.
struct Fixture {
  explicit Fixture(const RunConfig& config)
      : arena(64 << 20),
        backend(arena),
        model(config.model, backend),
        optimizer(ResolvedRun(config).policy, model.parameters(), arena, 1),
        sink(model.parameters(), optimizer, arena, DType::kF32, {}) {
    model.Initialize(1);
    // Routers start at zero: give them preferences.
    for (Parameter& parameter : model.parameters()) {
      if (parameter.population != Population::kRouter) continue;
      for (int64_t i = 0; i < parameter.value.size(); ++i) {
        parameter.value.as<float>()[i] = 0.2f * RandomNormal(5, static_cast<uint64_t>(i));
      }
    }
  }
  std::vector<MicroBatch> Batches(int64_t count, int64_t sequences) {
    std::vector<MicroBatch> batches = AllocateMicroBatches(arena, count, sequences, kLength);
    uint64_t token = 0;
    for (const MicroBatch& batch : batches) {
      for (int32_t& id : batch.inputs.span<int32_t>()) id = Token(token++);
    }
    token = 1;
    for (const MicroBatch& batch : batches) {
      for (int32_t& id : batch.targets.span<int32_t>()) id = Token(token++);
    }
    return batches;
  }
  static int32_t Token(uint64_t i) { return static_cast<int32_t>(RandomBits(3, i) % 257); }

  Arena arena;
  CpuBackend backend;
  Model model;
  Optimizer optimizer;
  AccumulateSink sink;
};

RunConfig Config() {
  RunConfig config = SmallRun("corpus");
  config.model.router.noise_scale = 0;
  return config;
}

// Without load-balancing losses, which are means within a micro-batch (see below), the gradient
// does not depend on how a step is cut.
TEST(StepTest, FourMicroBatchesAreOneBatch) {
  RunConfig config = Config();
  config.model.router.aux_coefficient = 0;
  config.model.router.z_coefficient = 0;
  Fixture whole(config), parts(config);
  std::vector<MicroBatch> batch = whole.Batches(1, 8), quarters = parts.Batches(4, 2);
  // Unevenly many ignored targets: a mean of the micro-batches' means would show.
  for (int i = 0; i < 13; ++i) {
    batch[0].targets.as<int32_t>()[i] = kIgnoredTarget;
    quarters[0].targets.as<int32_t>()[i] = kIgnoredTarget;
  }
  whole.sink.BeginStep(1, 0);
  const StepLosses a = ForwardBackward(whole.model, batch, {1}, whole.sink);
  parts.sink.BeginStep(4, 0);
  const StepLosses b = ForwardBackward(parts.model, quarters, {1}, parts.sink);
  EXPECT_EQ(a.tokens, 8 * kLength - 13);
  EXPECT_EQ(b.tokens, a.tokens);
  EXPECT_NEAR(a.loss, b.loss, 1e-6);
  ASSERT_EQ(a.routing.size(), 1u);
  EXPECT_EQ(a.routing[0].counts, b.routing[0].counts);
  EXPECT_NEAR(a.routing[0].statistics.entropy, b.routing[0].statistics.entropy, 1e-6);
  for (size_t p = 0; p < whole.model.parameters().size(); ++p) {
    const TensorView x = whole.sink.Gradient(whole.model.parameters()[p]);
    const TensorView y = parts.sink.Gradient(parts.model.parameters()[p]);
    EXPECT_TRUE(Near(y, x, {.relative = 1e-5, .absolute = 2e-6 * MaxAbs(x)})) << x.name;
  }
}

// Load-balancing losses are means within each micro-batch, averaged over them.
TEST(StepTest, LoadBalancingLossesAreAveragedOverMicroBatches) {
  Fixture fixture(Config());
  const std::vector<MicroBatch> batches = fixture.Batches(4, 2);
  double aux_loss = 0, z_loss = 0;
  for (const MicroBatch& batch : batches) {
    fixture.sink.BeginStep(1, 0);
    const StepLosses one = ForwardBackward(fixture.model, {&batch, 1}, {1}, fixture.sink);
    aux_loss += one.aux_loss / 4;
    z_loss += one.z_loss / 4;
  }
  fixture.sink.BeginStep(4, 0);
  const StepLosses all = ForwardBackward(fixture.model, batches, {1}, fixture.sink);
  EXPECT_GT(all.aux_loss, 0.04);  // coefficient 0.05, at least 1 when balanced
  EXPECT_DOUBLE_EQ(all.aux_loss, aux_loss);
  EXPECT_DOUBLE_EQ(all.z_loss, z_loss);
}

TEST(StepTest, CheckpointingGivesTheSameGradientsAndCounts) {
  RunConfig config = Config();
  config.model.router.noise_scale = 0.5f;  // recomputed noise must be the first one
  config.model.layers = 4;
  Fixture plain(config), again(config);
  const auto batches_a = plain.Batches(2, 2), batches_b = again.Batches(2, 2);
  // Of experts without tokens nothing is written.
  for (Fixture* fixture : {&plain, &again}) {
    for (const Parameter& parameter : fixture->model.parameters()) {
      const TensorView gradient = fixture->sink.Gradient(parameter);
      std::memset(gradient.data, 0, static_cast<size_t>(gradient.bytes()));
    }
  }
  plain.sink.BeginStep(2, 0);
  const StepLosses a = ForwardBackward(plain.model, batches_a, {9}, plain.sink);
  again.sink.BeginStep(2, 0);
  const StepLosses b = ForwardBackward(again.model, batches_b, {9, true}, again.sink);
  EXPECT_EQ(a.loss, b.loss);
  EXPECT_EQ(a.routing[1].counts, b.routing[1].counts);
  for (size_t p = 0; p < plain.model.parameters().size(); ++p) {
    const Parameter& parameter = plain.model.parameters()[p];
    EXPECT_TRUE(SameBytes(again.sink.Gradient(again.model.parameters()[p]),
                          plain.sink.Gradient(parameter)));
  }
}

TEST(StepTest, GivesBackItsMemory) {
  Fixture fixture(Config());
  const auto batches = fixture.Batches(2, 2);
  const int64_t before = fixture.arena.ledger().total_bytes;
  for (const bool checkpointing : {false, true}) {
    TrainStep(fixture.model, batches, {.learning_rate = 1e-3f, .checkpointing = checkpointing},
              fixture.sink);
    ForwardLoss(fixture.model, batches[0]);
    EXPECT_EQ(fixture.arena.ledger().total_bytes, before);
  }
}

TEST(StepTest, ForwardLossIsTheLossOfTraining) {
  Fixture fixture(Config());
  const auto batches = fixture.Batches(1, 4);
  fixture.sink.BeginStep(1, 0);
  const StepLosses losses = ForwardBackward(fixture.model, batches, {1}, fixture.sink);
  EXPECT_DOUBLE_EQ(ForwardLoss(fixture.model, batches[0]) / static_cast<double>(losses.tokens),
                   losses.loss);
}

TEST(StepTest, WithoutCountedTokensNothingIsLearnedAndNothingIsNan) {
  Fixture fixture(Config());
  const auto batches = fixture.Batches(1, 2);
  for (int32_t& target : batches[0].targets.span<int32_t>()) target = kIgnoredTarget;
  const StepReport report = TrainStep(fixture.model, batches, {.learning_rate = 0}, fixture.sink);
  EXPECT_EQ(report.losses.loss, 0);
  EXPECT_EQ(report.losses.tokens, 0);
  EXPECT_EQ(report.update.gradient_norm, 0);
}

TEST(StepTest, NamesTheFirstTensorThatIsNotFiniteAndChangesNothing) {
  struct Case {
    std::string_view weight;
    float value;
    std::string_view message;
  };
  const float kNan = std::numeric_limits<float>::quiet_NaN();
  const Case kCases[] = {
      {"layers.0.attn.q_proj.weight", kNan,
       "the loss is not finite, first layers.0.attn.q_proj.weight"},
      {"norm_f.weight", kNan, "the loss is not finite, first norm_f.weight"},
      {"layers.1.ff.router.weight", kNan, "is not finite, first layers.1.ff.router.weight"},
      // Finite, but what comes of it is not.
      {"layers.0.norm2.weight", 1e38f, "the loss is not finite, first layers.0's output"},
  };
  for (const Case& c : kCases) {
    Fixture fixture(Config());
    bool found = false;
    for (Parameter& parameter : fixture.model.parameters()) {
      if (parameter.name != c.weight) continue;
      for (float& weight : parameter.value.span<float>()) weight = c.value;
      found = true;
    }
    ASSERT_TRUE(found) << c.weight;
    const auto batches = fixture.Batches(2, 2);
    const TensorView untouched = fixture.model.Find("tok_emb.weight").value;
    const float before = untouched.as<float>()[0];
    try {
      TrainStep(fixture.model, batches, {.learning_rate = 1}, fixture.sink);
      FAIL() << c.weight;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(c.message));
    }
    EXPECT_EQ(untouched.as<float>()[0], before);
    for (int64_t steps : fixture.optimizer.steps()) EXPECT_EQ(steps, 0);
  }
}

// Activations whose squares overflow are normalized to 0: the loss stays finite, and the model
// dead.
TEST(StepTest, GradientsThatAreAllZeroAreNoStep) {
  Fixture fixture(Config());
  for (float& weight : fixture.model.Find("tok_emb.weight").value.span<float>()) weight = 1e25f;
  const auto batches = fixture.Batches(1, 2);
  try {
    TrainStep(fixture.model, batches, {.learning_rate = 1}, fixture.sink);
    FAIL();
  } catch (const NotFiniteError& error) {
    EXPECT_THAT(error.what(), HasSubstr("all gradients are 0"));
  }
}

// Tokens of a step that go to an expert which its selection bias keeps from being chosen at first.
std::vector<int64_t> TokensOfAStarvedExpert(SelectionBias selection_bias, float rate) {
  RunConfig config = Config();
  config.model.router.score = RouterScore::kSigmoid;
  config.model.router.aux_coefficient = config.model.router.z_coefficient = 0;
  config.model.selection_bias = selection_bias;
  config.model.selection_bias_rate = rate;
  Fixture fixture(config);
  const std::span<float> bias = fixture.model.SelectionBias(1).span<float>();
  std::fill(bias.begin(), bias.end(), 0.0f);
  bias[2] = -1;  // no score is above 1
  const std::vector<MicroBatch> batches = fixture.Batches(2, 4);
  std::vector<int64_t> counts;
  for (int step = 0; step < 20; ++step) {
    const StepReport report = TrainStep(fixture.model, batches, {.learning_rate = 0}, fixture.sink);
    counts.push_back(report.losses.routing[0].counts[2]);
  }
  return counts;
}

TEST(StepTest, AStarvedExpertGetsTokensAgainWhereItsBiasMoves) {
  const std::vector<int64_t> fixed = TokensOfAStarvedExpert(SelectionBias::kFixed, 0);
  EXPECT_EQ(fixed, std::vector<int64_t>(20, 0));
  const std::vector<int64_t> moved = TokensOfAStarvedExpert(SelectionBias::kBalancing, 0.1f);
  EXPECT_EQ(moved[0], 0);
  const int64_t even = 2 * 4 * kLength * 2 / 4;
  EXPECT_GT(moved.back(), even / 2);
}

// By the counts of all micro-batches together; neither evaluation nor recomputation counts.
TEST(StepTest, SelectionBiasesMoveOnceAStep) {
  RunConfig config = Config();
  config.model.selection_bias = SelectionBias::kBalancing;
  config.model.selection_bias_rate = 0.25f;
  for (const bool checkpointing : {false, true}) {
    Fixture fixture(config);
    const std::vector<MicroBatch> batches = fixture.Batches(2, 4);
    const std::span<float> bias = fixture.model.SelectionBias(1).span<float>();
    const std::vector<float> before(bias.begin(), bias.end());
    ForwardLoss(fixture.model, batches[0]);
    EXPECT_TRUE(std::equal(bias.begin(), bias.end(), before.begin()));
    const StepReport report = TrainStep(
        fixture.model, batches, {.learning_rate = 0, .checkpointing = checkpointing}, fixture.sink);
    const std::vector<int64_t>& counts = report.losses.routing[0].counts;
    const int64_t total = 2 * 4 * kLength * 2;
    EXPECT_EQ(counts[0] + counts[1] + counts[2] + counts[3], total);
    for (size_t e = 0; e < 4; ++e) {
      const float direction = counts[e] * 4 == total ? 0.0f : counts[e] * 4 > total ? -1.0f : 1.0f;
      EXPECT_EQ(bias[e], before[e] + 0.25f * direction) << e;
    }
  }
}

}  // namespace
}  // namespace terrace
