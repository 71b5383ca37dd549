// Logits, losses and every gradient against those that PyTorch computed in float32.
#include <fstream>
#include <nlohmann/json.hpp>

#include "model/harness.h"
#include "model/presets.h"
#include "support/temporary_folder.h"
#include "train/safetensors.h"

namespace terrace {
namespace {

class ParityTest : public ModelTest {
 protected:
  ParityTest() : reader_(TestData() / "gpt_moe.safetensors") {
    std::ifstream file(TestData() / "gpt_moe.json");
    reference_ = nlohmann::json::parse(file);
  }

  // From the file, so that others of the same form can be tried.
  ModelConfig Config() const {
    const nlohmann::json& given = reference_.at("config");
    ModelConfig config = PresetNamed("gpt-moe-tiny");
    config.vocab_size = given.at("vocab_size");
    config.max_positions = given.at("max_positions");
    config.width = given.at("d_model");
    config.layers = given.at("num_layers");
    config.heads = given.at("n_heads");
    config.kv_heads = given.at("n_kv_heads");
    config.ffn_width = given.at("ff_dim");
    config.experts = given.at("num_experts");
    config.expert_width = given.at("expert_ff_dim");
    config.router.top_k = given.at("top_k");
    config.router.aux_coefficient = given.at("load_balancing_coef");
    return config;
  }

  HostBatch Batch(size_t step) const {
    HostBatch batch{reference_.at("batch"), reference_.at("seq"), {}, {}};
    for (const auto& row : reference_.at("tokens").at(step)) {
      const auto tokens = row.get<std::vector<int32_t>>();
      batch.inputs.insert(batch.inputs.end(), tokens.begin(), tokens.end() - 1);
      batch.targets.insert(batch.targets.end(), tokens.begin() + 1, tokens.end());
    }
    return batch;
  }

  void LoadWeights(Model& model) const {
    for (Parameter& parameter : model.parameters()) {
      const TensorView given = reader_.Find("weight." + parameter.name);
      ASSERT_EQ(given.shape, parameter.value.shape) << parameter.name;
      std::memcpy(parameter.value.data, given.data, given.bytes());
    }
  }

  SafetensorsReader reader_;
  nlohmann::json reference_;
};

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
    const TensorView expected = reader_.Find("grad." + parameter.name);
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
  for (const Parameter& parameter : ParametersOf(Config())) actual.push_back(parameter.name);
  std::sort(expected.begin(), expected.end());
  std::sort(actual.begin(), actual.end());
  EXPECT_EQ(actual, expected);
}

TERRACE_ON_ALL_BACKENDS(ParityTest);

}  // namespace
}  // namespace terrace
