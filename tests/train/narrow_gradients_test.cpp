// Gradients that are summed in bfloat16: over many micro-batches, and in hidden buffers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>

#include "backend/cpu/cpu_backend.h"
#include "core/rng.h"
#include "model/path.h"
#include "optim/accumulate_sink.h"
#include "optim/release_sink.h"
#include "support/compare.h"
#include "support/small_run.h"
#include "train/step.h"

namespace terrace {
namespace {

std::unique_ptr<StepSink> MakeSink(bool release, const Parameters& parameters, Optimizer& optimizer,
                                   Arena& arena, DType dtype, const Clipping& clipping) {
  if (release) {
    return std::make_unique<ReleaseSink>(parameters, optimizer, arena, dtype, clipping);
  }
  return std::make_unique<AccumulateSink>(parameters, optimizer, arena, dtype, clipping);
}

// One thread suffices for so small a model.
class NarrowGradientsTest : public testing::Test {
 protected:
  NarrowGradientsTest() : threads_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~NarrowGradientsTest() override { omp_set_num_threads(threads_); }

 private:
  int threads_;
};

constexpr int64_t kMicroBatches = 1024;

// One step of a small model in bfloat16; the norm of its gradient.
double GradientNorm(bool release, DType gradient_dtype) {
  RunConfig config = SmallRun("corpus");
  config.model.weight_dtype = DType::kBF16;
  config.model.router.noise_scale = 0;
  Arena arena(int64_t{128} << 20);
  CpuBackend backend(arena);
  Model model(config.model, backend);
  Optimizer optimizer(ResolvedRun(config).policy, model.parameters(), arena, 1);
  const auto sink = MakeSink(release, model.parameters(), optimizer, arena, gradient_dtype, {});
  model.Initialize(1);
  const auto batches = AllocateMicroBatches(arena, kMicroBatches, 1, 4);
  uint64_t token = 0;
  for (const MicroBatch& batch : batches) {
    for (int64_t i = 0; i < batch.tokens(); ++i, ++token) {
      batch.inputs.as<int32_t>()[i] = static_cast<int32_t>(RandomBits(1, token) % 64);
      batch.targets.as<int32_t>()[i] = static_cast<int32_t>(RandomBits(1, token + 1) % 64);
    }
  }
  return TrainStep(model, batches, {.learning_rate = 1e-3f}, *sink).update.gradient_norm;
}

// Rounding to nearest would lose a sixth of the norm. Stochastic rounding adds a variance of at
// most a quarter of the last place's square for each addition: with a sum that grows to s in n
// additions, n / 4 * (2^-7 s)^2 at most, which adds n 2^-17 = 0.8 % to the norm.
TEST_F(NarrowGradientsTest, ManyMicroBatchesSumToWhatTheySumToInFloat32) {
  for (const bool release : {false, true}) {
    const double wide = GradientNorm(release, DType::kF32);
    const double narrow = GradientNorm(release, DType::kBF16);
    EXPECT_NEAR(narrow, wide, kMicroBatches * 0x1p-17 * wide) << release;
    EXPECT_NE(narrow, wide);
    EXPECT_EQ(GradientNorm(release, DType::kBF16), narrow);
  }
}

// A constant gradient of 1 in eight parts a step: the mean that a hidden buffer holds after s
// steps is 1 - beta^s.
TEST_F(NarrowGradientsTest, AHiddenBufferOfBFloat16HoldsTheMean) {
  constexpr int kSteps = 3000, kParts = 8;
  constexpr int64_t kRows = 16, kColumns = 64;
  for (const bool release : {false, true}) {
    Arena arena(int64_t{16} << 20);
    CpuBackend backend(arena);
    Parameters parameters(1);
    Parameter& parameter = parameters.front();
    parameter.name = "experts.0.weight";
    parameter.population = Population::kExpert;
    parameter.expert = 0;
    parameter.value = arena.Allocate(Memory::kWeights, DType::kBF16, {kRows, kColumns}, "weight");
    backend.Zero(parameter.value);
    const Policy policy = ResolvePolicy(
        "test",
        ParsePolicy("base = \"mesh\"\n[expert]\nmomentum = \"hidden_bf16\"\nbeta = 0.999", "test"));
    Optimizer optimizer(policy, parameters, arena, 1);
    const auto sink =
        MakeSink(release, parameters, optimizer, arena, DType::kF32, {.kind = ClippingKind::kNone});
    const TensorView dy = arena.Allocate(Memory::kActivations, DType::kF32, {1, kRows}, "dy");
    const TensorView x = arena.Allocate(Memory::kActivations, DType::kF32, {1, kColumns}, "x");
    for (float& value : dy.span<float>()) value = 1;
    for (float& value : x.span<float>()) value = 1.0f / kParts;
    for (int step = 0; step < kSteps; ++step) {
      sink->BeginStep(kParts, 1e-3f);
      if (release) {
        const std::vector<WeightProduct> products(kParts, WeightProduct{dy, x});
        LeaveWeightGradient(backend, parameter, products, *sink);
      } else {
        const WeightProduct product{dy, x};
        for (int i = 0; i < kParts; ++i) {
          LeaveWeightGradient(backend, parameter, {&product, 1}, *sink);
        }
      }
      sink->Finish();
    }
    const TensorView buffer = optimizer.HiddenBuffer(parameter);
    ASSERT_EQ(buffer.dtype, DType::kBF16);
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < buffer.size(); ++i) {
      const double mean = 0.001 * ToFloat(buffer.as<BF16>()[i]);
      sum += mean;
      squares += mean * mean;
    }
    const double size = static_cast<double>(buffer.size());
    const double error = std::sqrt((squares / size - sum / size * sum / size) / size);
    ASSERT_GT(error, 0) << "nothing was rounded: the case tests nothing";
    EXPECT_NEAR(sum / size, 1 - std::pow(0.999, kSteps), 4 * error) << release;
  }
}

}  // namespace
}  // namespace terrace
