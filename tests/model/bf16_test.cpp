// A bfloat16 model against the float32 model of the same (rounded) weights.
//
// bfloat16 rounds to 2^-9 of a value. Some four roundings a sub-layer, six sub-layers and twice
// that backward, adding up as a random walk, give about 2^-9 * sqrt(50) = 1.4 % in the norm of a
// gradient; the bounds are twice that. Losses average over tokens and are closer.
#include "model/harness.h"

namespace terrace {
namespace {

constexpr double kGradientBound = 0.03;
constexpr double kLogitBound = 0.03;
constexpr double kLossBound = 3e-3;

class BFloat16Test : public ModelTest {};

double RelativeNorm(const std::vector<float>& actual, const std::vector<float>& expected) {
  std::vector<float> difference(expected.size());
  for (size_t i = 0; i < expected.size(); ++i) difference[i] = actual[i] - expected[i];
  return Norm(difference) / Norm(expected);
}

TEST_P(BFloat16Test, AgreesWithFloat32) {
  ModelConfig config = SmallConfig();
  config.width = 32;
  config.layers = 3;
  config.experts = 3;
  config.router.top_k = 3;  // no choice that rounding could turn
  TestModel wide(config, GetParam());
  config.weight_dtype = DType::kBF16;
  TestModel narrow(config, GetParam());
  narrow.Randomize(1, 0.15);
  for (const Parameter& parameter : narrow->parameters()) {
    const TensorView value = wide.Value(parameter.name);
    for (int64_t i = 0; i < value.size(); ++i) SetElement(value, i, ElementAt(parameter.value, i));
  }
  HostBatch batch = RandomBatch(config, 4, 8, 2);
  const Pass pass = PassOf(batch);
  EXPECT_LE(RelativeNorm(narrow.Logits(pass), wide.Logits(pass)), kLogitBound);

  TestSink wide_sink, narrow_sink;
  const Losses wide_losses = wide.Step(pass, wide_sink);
  const Losses narrow_losses = narrow.Step(pass, narrow_sink);
  EXPECT_NEAR(narrow_losses.tokens, wide_losses.tokens, kLossBound * wide_losses.tokens);
  EXPECT_NEAR(narrow_losses.balance, wide_losses.balance, kLossBound * wide_losses.balance);
  for (const auto& [name, gradient] : wide_sink.gradients) {
    const double error = RelativeNorm(narrow_sink.gradients.at(name), gradient);
    EXPECT_LE(error, kGradientBound) << name;
    EXPECT_GT(error, 1e-6) << name << ": bfloat16 took no part";
  }
}

TERRACE_ON_ALL_BACKENDS(BFloat16Test);

}  // namespace
}  // namespace terrace
