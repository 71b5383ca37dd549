// Gradients against differences of the loss, for every path through the model.
#include "model/harness.h"

namespace terrace {
namespace {

struct Case {
  const char* name;
  void (*change)(ModelConfig& config);
  bool training = false;        // router noise
  int64_t ignored_targets = 0;  // of the batch's first tokens
  float loss_scale = -1;        // negative: 1 / counted tokens
};

std::ostream& operator<<(std::ostream& out, const Case& the_case) { return out << the_case.name; }

void UseNanowhaleAttention(ModelConfig& config) {
  config.attention = AttentionKind::kNanowhaleMla;
  config.kv_heads = 1;
  config.head_width = 6;
  config.rope_width = 4;
  config.query_rank = 10;
  config.output_groups = 2;
  config.output_rank = 5;
}

constexpr Case kCases[] = {
    {"RmsNormRopeTied", [](ModelConfig&) {}},
    {"LayerNormLearnedUntied",
     [](ModelConfig& config) {
       config.norm = NormKind::kLayerNorm;
       config.positions = PositionKind::kLearned;
       config.tied_head = false;
     }},
    {"OneKeyValueHead", [](ModelConfig& config) { config.kv_heads = 1; }},
    {"WideHeads", [](ModelConfig& config) { config.head_width = 6; }},
    {"AllDense", [](ModelConfig& config) { config.ffn = {FeedForwardKind::kDense}; }},
    {"AllMoeEveryExpert",
     [](ModelConfig& config) {
       config.ffn = {FeedForwardKind::kMoe};
       config.router.top_k = config.experts;
     }},
    {"TopOneNotNormalized",
     [](ModelConfig& config) {
       config.router.top_k = 1;
       config.router.normalize_weights = false;
     }},
    {"NoisyRouter", [](ModelConfig& config) { config.router.noise_scale = 0.5f; }, true},
    {"PartialRotation", [](ModelConfig& config) { config.rope_width = 2; }},
    {"NanowhaleAttention", UseNanowhaleAttention},
    {"NanowhaleAttentionInOneGroup",
     [](ModelConfig& config) {
       UseNanowhaleAttention(config);
       config.output_groups = 1;
       config.ffn = {FeedForwardKind::kDense};
       config.norm = NormKind::kLayerNorm;
       config.positions = PositionKind::kLearned;
     }},
    {"SigmoidRouterAndSharedExpert",
     [](ModelConfig& config) {
       config.router.score = RouterScore::kSigmoid;
       config.router.normalize_weights = false;
       config.router.scaling_factor = 1.5f;
       config.shared_expert_width = 12;
     }},
    {"SqrtSoftplusRouterWithBias",
     [](ModelConfig& config) {
       config.router.score = RouterScore::kSqrtSoftplus;
       config.router.scaling_factor = 2.5f;
       config.router.aux_coefficient = 1;
       config.selection_bias = SelectionBias::kFixed;
     },
     false, 3},
    {"SoftmaxRouterWithBiasAndFactor",
     [](ModelConfig& config) {
       config.router.scaling_factor = 0.7f;
       config.selection_bias = SelectionBias::kBalancing;
     }},
    {"HyperConnections",
     [](ModelConfig& config) {
       config.hyper_connection.streams = 4;
       config.hyper_connection.sinkhorn_iterations = 3;
     }},
    {"TwoStreamsLearnedPositions",
     [](ModelConfig& config) {
       config.hyper_connection.streams = 2;
       config.hyper_connection.sinkhorn_iterations = 1;
       config.norm = NormKind::kLayerNorm;
       config.positions = PositionKind::kLearned;
       config.tied_head = false;
     }},
    {"IgnoredTargets", [](ModelConfig&) {}, false, 5},
    // With no token loss all of the gradient is the router's: it must reach the router's inputs.
    {"LoadBalancingLossAlone",
     [](ModelConfig& config) {
       config.router.aux_coefficient = 1;
       config.router.z_coefficient = 0.1f;
     },
     false, 3, 0},
};

class FiniteDifferenceTest : public testing::TestWithParam<std::tuple<BackendChoice, Case>> {};

// Along several directions r of unit length per parameter, (L(w + h r) - L(w - h r)) / 2h against
// gradient . r. The losses are sums of float32 terms of about 4: they carry some 1e-6 of rounding,
// the quotient 1e-6 / h. The third derivative adds about h^2.
TEST_P(FiniteDifferenceTest, EveryParameter) {
  const auto& [choice, the_case] = GetParam();
  constexpr double kStep = 4e-3;
  constexpr double kAbsolute = 2e-4, kRelative = 3e-3;

  ModelConfig config = SmallConfig();
  the_case.change(config);
  TestModel model(config, choice);
  model.Randomize(11, 0.3);
  HostBatch batch = RandomBatch(config, 2, 6, 5);
  std::fill_n(batch.targets.begin(), the_case.ignored_targets, kIgnoredTarget);
  Pass pass = PassOf(batch);
  pass.training = the_case.training;
  pass.noise_key = 99;
  if (the_case.loss_scale >= 0) pass.loss_scale = the_case.loss_scale;
  pass.balance_scale = 0.7f;
  const auto loss = [&] {
    const Losses losses = model.Forward(pass);
    return losses.tokens * pass.loss_scale + losses.balance * pass.balance_scale;
  };

  TestSink sink;
  model.Step(pass, sink);
  for (const Parameter& parameter : model->parameters()) {
    const auto found = sink.gradients.find(parameter.name);
    if (found == sink.gradients.end()) {
      EXPECT_TRUE(!parameter.trained() || sink.skips.contains(parameter.name)) << parameter.name;
      continue;
    }
    EXPECT_EQ(sink.ends.at(parameter.name), parameter.contributions);
    const std::vector<float>& gradient = found->second;
    const auto values = parameter.value.span<float>();
    const std::vector<float> before(values.begin(), values.end());
    const double norm = Norm(gradient);
    for (uint64_t trial = 0; trial < 4; ++trial) {
      std::vector<float> direction(gradient.size());
      for (size_t i = 0; i < direction.size(); ++i) {
        direction[i] = RandomNormal(MixKeys(trial, parameter.id), i);
      }
      const double length = Norm(direction);
      double expected = 0;
      for (size_t i = 0; i < direction.size(); ++i) {
        direction[i] = static_cast<float>(direction[i] / length);
        expected += static_cast<double>(direction[i]) * gradient[i];
      }
      const auto loss_at = [&](double step) {
        for (size_t i = 0; i < direction.size(); ++i) {
          values[i] = static_cast<float>(before[i] + step * direction[i]);
        }
        return loss();
      };
      const double difference = (loss_at(kStep) - loss_at(-kStep)) / (2 * kStep);
      EXPECT_NEAR(difference, expected, kAbsolute + kRelative * norm)
          << parameter.name << ", gradient of norm " << norm;
    }
    std::copy(before.begin(), before.end(), values.begin());
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, FiniteDifferenceTest,
                         testing::Combine(testing::Values(kReference, kCpu),
                                          testing::ValuesIn(kCases)),
                         [](const auto& about) {
                           return std::string(std::get<0>(about.param).name) +
                                  std::get<1>(about.param).name;
                         });

}  // namespace
}  // namespace terrace
