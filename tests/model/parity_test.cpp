// Logits, losses and every gradient against those that PyTorch computed in float32.
#include "model/reference_model.h"

namespace terrace {
namespace {

class ParityTest : public ReferenceModelTest {};

TEST_P(ParityTest, LogitsLossesAndGradients) {
  TestModel model(Config(), GetParam());
  LoadWeights(model.model());
  HostBatch batch = Batch(0);
  const Pass pass = PassOf(batch);

  EXPECT_LE(RelativeError(model.Logits(pass), reader_.Find("logits").span<float>()), 1e-4);

  TestSink sink;
  const Losses losses = model.Step(pass, sink);
  const double lm_loss = reference_.at("lm_loss"), router_loss = reference_.at("router_loss");
  EXPECT_NEAR(losses.tokens * pass.loss_scale, lm_loss, 1e-5 * lm_loss);
  EXPECT_NEAR(losses.balance, router_loss, 1e-5 * router_loss);

  double sum = 0;
  for (const Parameter& parameter : model->parameters()) {
    const TensorView expected = Find("grad.", parameter);
    ASSERT_TRUE(sink.gradients.contains(parameter.name)) << parameter.name;
    const std::vector<float>& gradient = sink.gradients.at(parameter.name);
    EXPECT_LE(RelativeError(gradient, expected.span<float>()), 1e-4) << parameter.name;
    sum += Norm(gradient) * Norm(gradient);
  }
  const double grad_norm = reference_.at("grad_norm");
  EXPECT_NEAR(std::sqrt(sum), grad_norm, 1e-5 * grad_norm);
}

// The reference holds exactly the parameters that the model declares.
TEST_P(ParityTest, ParameterNames) {
  std::vector<std::string> expected, actual;
  for (const std::string& name : reader_.names()) {
    if (name.starts_with("weight.")) expected.push_back(name.substr(7));
  }
  for (const Parameter& parameter : ParametersOf(Config())) {
    actual.push_back(PublishedName(parameter.name));
  }
  std::sort(expected.begin(), expected.end());
  std::sort(actual.begin(), actual.end());
  EXPECT_EQ(actual, expected);
}

TERRACE_ON_ALL_BACKENDS(ParityTest);

}  // namespace
}  // namespace terrace
