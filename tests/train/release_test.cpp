// Training with updates that are applied as soon as their gradient is complete.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <limits>

#include "backend/cpu/cpu_backend.h"
#include "core/rng.h"
#include "optim/accumulate_sink.h"
#include "optim/release_sink.h"
#include "support/small_run.h"
#include "train/step.h"

namespace terrace {
namespace {

using ::testing::HasSubstr;

struct Case {
  std::string policy;
  Clipping clipping;
  int64_t micro_batches;
  bool checkpointing = true;
};

// A model of random routers under one sink.
struct Trained {
  Trained(const Case& c, bool release)
      : config(SmallRun("corpus")), checkpointing(c.checkpointing) {
    config.optimizer.policy = c.policy;
    model = std::make_unique<Model>(config.model, backend);
    optimizer =
        std::make_unique<Optimizer>(ResolvedRun(config).policy, model->parameters(), arena, 1);
    if (release) {
      sink = std::make_unique<ReleaseSink>(model->parameters(), *optimizer, arena, DType::kF32,
                                           c.clipping);
    } else {
      sink = std::make_unique<AccumulateSink>(model->parameters(), *optimizer, arena, DType::kF32,
                                              c.clipping);
    }
    model->Initialize(1);
    batches = AllocateMicroBatches(arena, c.micro_batches, 4, 16);
  }

  StepReport Step(int64_t step) {
    uint64_t token = 0;
    for (const MicroBatch& batch : batches) {
      for (int64_t i = 0; i < batch.tokens(); ++i, ++token) {
        batch.inputs.as<int32_t>()[i] = static_cast<int32_t>(RandomBits(step, token) % 257);
        batch.targets.as<int32_t>()[i] = static_cast<int32_t>(RandomBits(step, token + 1) % 257);
      }
    }
    const auto noise_key = static_cast<uint64_t>(step);
    return TrainStep(*model, batches, {1e-2f, noise_key, checkpointing}, *sink);
  }

  RunConfig config;
  bool checkpointing;
  Arena arena{int64_t{64} << 20};
  CpuBackend backend{arena};
  std::unique_ptr<Model> model;
  std::unique_ptr<Optimizer> optimizer;
  std::unique_ptr<StepSink> sink;
  std::vector<MicroBatch> batches;
};

// One thread suffices for so small a model.
class ReleaseTest : public ::testing::Test {
 protected:
  ReleaseTest() : threads_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~ReleaseTest() override { omp_set_num_threads(threads_); }

 private:
  int threads_;
};

double LargestDifference(TensorView a, TensorView b) {
  double largest = 0;
  for (int64_t i = 0; i < a.size(); ++i) {
    largest = std::max<double>(largest, std::abs(a.as<float>()[i] - b.as<float>()[i]));
  }
  return largest;
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const char* policy : {"skewadam", "mesh"}) {
    for (const ClippingKind kind :
         {ClippingKind::kNone, ClippingKind::kPerTensor, ClippingKind::kGlobalNorm}) {
      for (const int64_t micro_batches : {1, 4}) {
        for (const bool checkpointing : {true, false}) {
          cases.push_back({policy, {kind, 0.05f}, micro_batches, checkpointing});
        }
      }
    }
  }
  return cases;
}

// Every gradient is summed in the same order but for that of a tied embedding, to which
// accumulating adds head and embedding by turns, micro-batch by micro-batch.
TEST_F(ReleaseTest, GivesTheWeightsThatAccumulatingGives) {
  for (const Case& c : Cases()) {
    SCOPED_TRACE(fmt::format("{}, {}, {} micro-batches, checkpointing {}", c.policy,
                             NameOf(c.clipping.kind), c.micro_batches, c.checkpointing));
    Trained kept(c, false), released(c, true);
    for (int64_t step = 1; step <= 3; ++step) {
      const StepReport a = kept.Step(step), b = released.Step(step);
      EXPECT_NEAR(a.losses.loss, b.losses.loss, 1e-5);
      EXPECT_NEAR(a.update.gradient_norm, b.update.gradient_norm, 1e-5 * a.update.gradient_norm);
      EXPECT_NEAR(a.update.gradient_scale, b.update.gradient_scale, 1e-5);
      EXPECT_EQ(a.update.updated_tensors, b.update.updated_tensors);
      EXPECT_EQ(a.update.skipped_tensors, b.update.skipped_tensors);
      ASSERT_EQ(a.losses.routing.size(), b.losses.routing.size());
      for (size_t layer = 0; layer < a.losses.routing.size(); ++layer) {
        EXPECT_EQ(a.losses.routing[layer].counts, b.losses.routing[layer].counts);
      }
      for (const Parameter& parameter : kept.model->parameters()) {
        const TensorView other = released.model->Find(parameter.name).value;
        // Steps are of 1e-2.
        EXPECT_LE(LargestDifference(parameter.value, other), c.micro_batches == 1 ? 0 : 2e-4)
            << parameter.name << " in step " << step;
      }
    }
    EXPECT_GT(LargestDifference(released.model->Find("tok_emb.weight").value,
                                Trained(c, true).model->Find("tok_emb.weight").value),
              1e-3);
  }
}

TEST_F(ReleaseTest, OneGradientAtATime) {
  const Case c{"skewadam", {}, 2};
  Trained kept(c, false), released(c, true);
  kept.Step(1);
  released.Step(1);
  const auto gradients = [](const Trained& trained) {
    return trained.arena.ledger().peak_bytes[static_cast<int>(Memory::kGradients)];
  };
  int64_t all = 0, largest = 0, tied = 0;
  for (const Parameter& parameter : kept.model->parameters()) {
    Arena alone = Arena::Dry();
    alone.Allocate(Memory::kGradients, DType::kF32, parameter.value.shape, "gradient");
    const int64_t bytes = alone.ledger().total_bytes;
    all += bytes;
    if (parameter.contributions > 1) {
      tied += bytes;
    } else {
      largest = std::max(largest, bytes);
    }
  }
  // Beside them stand the sums that rules leave while they measure gradients, of rows and columns.
  Arena alone = Arena::Dry();
  const Optimizer optimizer(ResolvedRun(kept.config).policy, kept.model->parameters(), alone, 1);
  const int64_t sums = alone.ledger().current_bytes[static_cast<int>(Memory::kGradients)];
  EXPECT_EQ(gradients(kept), all + sums);
  EXPECT_EQ(gradients(released), tied + largest + sums);
}

TEST_F(ReleaseTest, RefusesPoliciesThatUpdateTensorsTogether) {
  try {
    Trained({"mesh-layer-grouping", {}, 1}, true);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("training.sink = \"release\" updates tensor by tensor"));
    EXPECT_THAT(error.what(), HasSubstr("experts.0"));
  }
}

// Two passes find it before any update.
TEST_F(ReleaseTest, AGradientThatIsNotFiniteChangesNothingUnderTheGlobalNorm) {
  for (const char* name :
       {"layers.0.attn.v_proj.weight", "layers.1.ff.experts.1.gate_proj.weight"}) {
    Trained trained({"skewadam", {}, 2}, true);
    trained.Step(1);
    trained.model->Find(name).value.as<float>()[3] = std::numeric_limits<float>::infinity();
    std::vector<std::vector<float>> before;
    const auto weights = [&] {
      std::vector<std::vector<float>> all;
      for (const Parameter& parameter : trained.model->parameters()) {
        const auto values = parameter.value.span<const float>();
        all.emplace_back(values.begin(), values.end());
      }
      return all;
    };
    before = weights();
    EXPECT_THROW(trained.Step(2), NotFiniteError);
    EXPECT_EQ(weights(), before);
  }
}

TEST_F(ReleaseTest, ALossThatIsNotFiniteChangesNothing) {
  for (const ClippingKind kind : {ClippingKind::kNone, ClippingKind::kPerTensor}) {
    Trained trained({"skewadam", {kind, 1}, 2}, true);
    trained.model->Find("layers.0.attn.v_proj.weight").value.as<float>()[3] = NAN;
    const auto embedding = trained.model->Find("tok_emb.weight").value.span<const float>();
    const std::vector<float> before(embedding.begin(), embedding.end());
    EXPECT_THROW(trained.Step(1), NotFiniteError);
    EXPECT_TRUE(std::equal(before.begin(), before.end(), embedding.begin()));
    for (const int64_t steps : trained.optimizer->steps()) EXPECT_EQ(steps, 0);
  }
}

}  // namespace
}  // namespace terrace
