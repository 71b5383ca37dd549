// What must hold for every rule on experts and every way to store its momentum, under both sinks,
// where experts really are: in a model whose router decides which of them have tokens.
#include <gtest/gtest.h>
#include <omp.h>

#include <tuple>

#include "backend/cpu/cpu_backend.h"
#include "core/rng.h"
#include "optim/accumulate_sink.h"
#include "optim/release_sink.h"
#include "optim/rules/rules.h"
#include "support/small_run.h"
#include "support/temporary_folder.h"
#include "train/checkpoint.h"
#include "train/step.h"

namespace terrace {
namespace {

struct Variant {
  std::string rule;
  std::string momentum;  // empty: the rule has no such setting
  SinkKind sink;
};

// Every momentum that a rule takes.
std::vector<Variant> Variants(std::initializer_list<SinkKind> sinks) {
  std::vector<Variant> variants;
  for (const std::string_view rule : RuleNames()) {
    std::vector<std::string> momenta;
    for (const char* momentum : {"none", "f32", "bf16", "int8", "hidden_f32", "hidden_bf16"}) {
      try {
        MakeRule(rule, {{"momentum", momentum}});
        momenta.emplace_back(momentum);
      } catch (const Error&) {
      }
    }
    if (momenta.empty()) momenta.emplace_back();
    for (const std::string& momentum : momenta) {
      for (const SinkKind sink : sinks) variants.push_back({std::string(rule), momentum, sink});
    }
  }
  return variants;
}

std::string NameOfVariant(const testing::TestParamInfo<Variant>& info) {
  return info.param.rule + "_" + info.param.momentum +
         (info.param.sink == SinkKind::kRelease ? "_release" : "_accumulate");
}

constexpr int64_t kIdle = 4;  // the expert, the last of five

// A model with bfloat16 weights, whose router stays as it is.
struct Trained {
  explicit Trained(const Variant& variant, bool dry = false)
      : arena(dry ? Arena::Dry() : Arena(int64_t{64} << 20)) {
    config.model.experts = 5;
    config.model.router.noise_scale = 0;
    config.model.weight_dtype = DType::kBF16;
    std::string policy =
        "base = \"adamw\"\n[router]\nlr_multiplier = 0\n[expert]\nlr_multiplier = 1\n";
    policy += fmt::format("rule = \"{}\"\n", variant.rule);
    if (!variant.momentum.empty()) policy += fmt::format("momentum = \"{}\"\n", variant.momentum);
    if (variant.rule == "galore") policy += "rank = 8\n";
    config.policy = ParsePolicy(policy, "test");
    config.optimizer.policy = kOwnPolicy;
    model = std::make_unique<Model>(config.model, backend);
    optimizer =
        std::make_unique<Optimizer>(ResolvedRun(config).policy, model->parameters(), arena, 1);
    const Clipping clipping{ClippingKind::kGlobalNorm, 0.05f};
    if (variant.sink == SinkKind::kRelease) {
      sink = std::make_unique<ReleaseSink>(model->parameters(), *optimizer, arena, DType::kF32,
                                           clipping);
    } else {
      sink = std::make_unique<AccumulateSink>(model->parameters(), *optimizer, arena, DType::kF32,
                                              clipping);
    }
    if (!dry) model->Initialize(1);
    batches = AllocateMicroBatches(arena, 2, 4, 16);
  }

  // Experts 0 to 3 have scores of a, -a, b and -b: two of them are above the last one's 0, which
  // then has no tokens; else it has a score of its own.
  void Route(bool idle) {
    const TensorView router = model->Find("layers.1.ff.router.weight").value;
    const int64_t width = router.columns();
    for (int64_t e = 0; e <= kIdle; ++e) {
      for (int64_t j = 0; j < width; ++j) {
        const float score = static_cast<float>(RandomUniform(7 + e / 2, j)) - 0.5f;
        router.as<float>()[e * width + j] = e < kIdle ? (e % 2 == 0 ? score : -score)
                                            : idle    ? 0
                                                      : score;
      }
    }
  }

  StepReport Step(int64_t step) {
    uint64_t token = 0;
    for (const MicroBatch& batch : batches) {
      for (int64_t i = 0; !arena.dry() && i < batch.tokens(); ++i, ++token) {
        batch.inputs.as<int32_t>()[i] = static_cast<int32_t>(RandomBits(step, token) % 257);
        batch.targets.as<int32_t>()[i] = static_cast<int32_t>(RandomBits(step, token + 1) % 257);
      }
    }
    return TrainStep(*model, batches, {1e-2f, static_cast<uint64_t>(step), true}, *sink);
  }

  // Every bit of an expert's weights, of its state and of its hidden buffers, and its step counts;
  // -1: of the whole model.
  std::string Bits(int64_t expert) const {
    const std::string prefix = expert < 0 ? "" : fmt::format("layers.1.ff.experts.{}.", expert);
    std::string bits;
    const auto add = [&](const TensorView& view) {
      if (!std::string_view(view.name).starts_with(prefix)) return;
      bits.append(reinterpret_cast<const char*>(view.data), static_cast<size_t>(view.bytes()));
    };
    for (const Parameter& parameter : model->parameters()) {
      add(parameter.value);
      if (parameter.name.starts_with(prefix)) {
        bits += fmt::format(" {}", optimizer->steps()[static_cast<size_t>(parameter.id)]);
      }
    }
    for (const TensorView& view : optimizer->state()) add(view);
    return bits;
  }

  RunConfig config = SmallRun("corpus");
  Arena arena;
  CpuBackend backend{arena};
  std::unique_ptr<Model> model;
  std::unique_ptr<Optimizer> optimizer;
  std::unique_ptr<StepSink> sink;
  std::vector<MicroBatch> batches;
};

// One thread suffices for so small a model.
class EveryMomentumTest : public testing::TestWithParam<Variant> {
 protected:
  EveryMomentumTest() : threads_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~EveryMomentumTest() override { omp_set_num_threads(threads_); }

 private:
  int threads_;
};

INSTANTIATE_TEST_SUITE_P(, EveryMomentumTest,
                         testing::ValuesIn(Variants({SinkKind::kAccumulate, SinkKind::kRelease})),
                         NameOfVariant);

// Neither a momentum that is still there nor weight decay moves it.
TEST_P(EveryMomentumTest, AnIdleExpertKeepsEveryBit) {
  Trained trained(GetParam());
  trained.Route(/*idle=*/false);
  for (int64_t step = 1; step <= 2; ++step) {
    const std::string before = trained.Bits(kIdle);
    const StepReport report = trained.Step(step);
    ASSERT_GT(report.losses.routing.back().counts[kIdle], 0);
    ASSERT_NE(trained.Bits(kIdle), before) << "a busy expert moves";
  }
  trained.Route(/*idle=*/true);
  const std::string idle = trained.Bits(kIdle);
  std::vector<std::string> busy;
  for (int64_t e = 0; e < kIdle; ++e) busy.push_back(trained.Bits(e));
  for (int64_t step = 3; step <= 6; ++step) {
    const StepReport report = trained.Step(step);
    ASSERT_EQ(report.losses.routing.back().counts[kIdle], 0);
    EXPECT_EQ(report.update.skipped_tensors, 3);
    ASSERT_TRUE(trained.Bits(kIdle) == idle) << "step " << step;
  }
  for (int64_t e = 0; e < kIdle; ++e) EXPECT_FALSE(trained.Bits(e) == busy[static_cast<size_t>(e)]);
}

TEST_P(EveryMomentumTest, ADryRunTakesTheSame) {
  Trained real(GetParam()), dry(GetParam(), /*dry=*/true);
  real.Step(1);
  dry.Step(1);
  EXPECT_EQ(dry.arena.ledger().total_peak_bytes, real.arena.ledger().total_peak_bytes);
  EXPECT_EQ(dry.arena.ledger().peak_bytes, real.arena.ledger().peak_bytes);
}

// The state is the same whatever the sink.
using EveryMomentumInCheckpointsTest = EveryMomentumTest;

INSTANTIATE_TEST_SUITE_P(, EveryMomentumInCheckpointsTest,
                         testing::ValuesIn(Variants({SinkKind::kRelease})), NameOfVariant);

TEST_P(EveryMomentumInCheckpointsTest, ACheckpointContinuesBitForBit) {
  const TemporaryFolder folder;
  Trained whole(GetParam()), resumed(GetParam());
  for (int64_t step = 1; step <= 2; ++step) whole.Step(step);
  const auto checkpoint =
      SaveCheckpoint(folder.path(), 1, "text", {2, 0, {}}, *whole.model, *whole.optimizer);
  LoadModel(checkpoint, *resumed.model);
  LoadState(checkpoint, *resumed.model, *resumed.optimizer);
  EXPECT_TRUE(resumed.Bits(-1) == whole.Bits(-1));
  for (int64_t step = 3; step <= 4; ++step) {
    whole.Step(step);
    resumed.Step(step);
  }
  EXPECT_TRUE(resumed.Bits(-1) == whole.Bits(-1));
}

}  // namespace
}  // namespace terrace
