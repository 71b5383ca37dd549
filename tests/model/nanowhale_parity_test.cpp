// The nanowhale model against PyTorch: logits, loss and every gradient in float32, and generation
// with a cache.
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>

#include "model/harness.h"
#include "model/presets.h"
#include "support/temporary_folder.h"
#include "train/safetensors.h"

namespace terrace {
namespace {

class NanowhaleParityTest : public ModelTest {
 protected:
  NanowhaleParityTest() : reader_(TestData() / "nanowhale.safetensors") {
    std::ifstream file(TestData() / "nanowhale.json");
    reference_ = nlohmann::json::parse(file);
  }

  ModelConfig Config() const {
    const nlohmann::json& given = reference_.at("config");
    ModelConfig config = PresetNamed("nanowhale-110m");
    config.vocab_size = given.at("vocab_size");
    config.max_positions = reference_.at("seq");
    config.width = given.at("hidden_size");
    config.layers = given.at("num_hidden_layers");
    config.heads = given.at("num_attention_heads");
    config.head_width = given.at("head_dim");
    config.rope_width = given.at("qk_rope_head_dim");
    config.query_rank = given.at("q_lora_rank");
    config.output_groups = given.at("o_groups");
    config.output_rank = given.at("o_lora_rank");
    config.experts = given.at("n_routed_experts");
    config.router.top_k = given.at("num_experts_per_tok");
    config.router.scaling_factor = given.at("routed_scaling_factor");
    config.router.normalize_weights = given.at("norm_topk_prob");
    config.ffn_width = config.shared_expert_width = given.at("moe_intermediate_size");
    config.hyper_connection = {.streams = given.at("hc_mult"),
                               .sinkhorn_iterations = given.at("hc_sinkhorn_iters"),
                               .epsilon = given.at("hc_eps")};
    config.norm_epsilon = given.at("rms_norm_eps");
    config.rope_theta = given.at("rope_theta");
    config.tied_head = given.at("tie_word_embeddings");
    config.Check();
    return config;
  }

  HostBatch Batch() const {
    HostBatch batch{reference_.at("batch"), reference_.at("seq"), {}, {}};
    for (const auto& row : reference_.at("tokens")) {
      const auto tokens = row.get<std::vector<int32_t>>();
      batch.inputs.insert(batch.inputs.end(), tokens.begin(), tokens.end() - 1);
      batch.targets.insert(batch.targets.end(), tokens.begin() + 1, tokens.end());
    }
    return batch;
  }

  static std::string PublishedName(std::string name) {
    static const std::pair<std::regex, const char*> kNames[] = {
        {std::regex("^tok_emb"), "model.embed_tokens"},
        {std::regex("^norm_f"), "model.norm"},
        {std::regex("^hyper_f\\.(\\w+)$"), "model.hc_head_$1"},
        {std::regex("^layers"), "model.layers"},
        {std::regex("hyper1\\.(\\w+)$"), "hc_attn_$1"},
        {std::regex("hyper2\\.(\\w+)$"), "hc_ffn_$1"},
        {std::regex("(hc_\\w+)_weight$"), "$1_fn"},
        {std::regex("norm1"), "attn_norm"},
        {std::regex("norm2"), "ffn_norm"},
        {std::regex("q_a_proj"), "wq_a"},
        {std::regex("q_b_proj"), "wq_b"},
        {std::regex("kv_proj"), "wkv"},
        {std::regex("out_a_proj"), "wo_a"},
        {std::regex("out_b_proj"), "wo_b"},
        {std::regex("\\.ff\\."), ".ffn."},
        {std::regex("router"), "gate"},
        {std::regex("gate_proj"), "w1"},
        {std::regex("down_proj"), "w2"},
        {std::regex("up_proj"), "w3"},
    };
    for (const auto& [ours, theirs] : kNames) name = std::regex_replace(name, ours, theirs);
    return name;
  }
  TensorView Find(const std::string& kind, const Parameter& parameter) const {
    return reader_.Find(kind + PublishedName(parameter.name));
  }

  void LoadWeights(Model& model) const {
    for (Parameter& parameter : model.parameters()) {
      const TensorView given = Find("weight.", parameter);
      ASSERT_EQ(given.shape, parameter.value.shape) << parameter.name;
      std::memcpy(parameter.value.data, given.data, given.bytes());
    }
  }

  SafetensorsReader reader_;
  nlohmann::json reference_;
};

TEST_P(NanowhaleParityTest, LogitsLossAndGradients) {
  TestModel model(Config(), GetParam());
  LoadWeights(model.model());
  HostBatch batch = Batch();
  const Pass pass = PassOf(batch);
  EXPECT_LE(RelativeError(model.Logits(pass), reader_.Find("logits").span<float>()), 1e-4);

  TestSink sink;
  const Losses losses = model.Step(pass, sink);
  const double lm_loss = reference_.at("lm_loss");
  EXPECT_NEAR(losses.tokens * pass.loss_scale, lm_loss, 1e-5 * lm_loss);
  EXPECT_EQ(losses.balance, 0);
  for (const Parameter& parameter : model->parameters()) {
    EXPECT_EQ(sink.gradients.contains(parameter.name), parameter.trained()) << parameter.name;
    if (!parameter.trained()) continue;
    EXPECT_LE(
        RelativeError(sink.gradients.at(parameter.name), Find("grad.", parameter).span<float>()),
        1e-4)
        << parameter.name;
  }
}

TEST_P(NanowhaleParityTest, GeneratesWithACacheWhatItComputesAtOnce) {
  TestModel model(Config(), GetParam());
  LoadWeights(model.model());
  const HostBatch batch = Batch();
  const std::span<const float> expected = reader_.Find("logits").span<float>();
  const int64_t vocabulary = model->config().vocab_size;
  Arena& arena = model->backend().arena();
  const Arena::Frame frame(arena);
  const TensorView logits =
      arena.Allocate(Memory::kActivations, DType::kF32, {vocabulary}, "logits");
  const std::span<const int32_t> tokens = std::span(batch.inputs).first(batch.length);
  // The first tokens at once, the rest one by one.
  const std::unique_ptr<KvCache> cache = model->NewCache(batch.length);
  for (int64_t next = 0; next < batch.length;) {
    const int64_t count = next == 0 ? 5 : 1;
    model->Decode(tokens.subspan(next, count), *cache, logits);
    next += count;
    EXPECT_LE(
        RelativeError(logits.span<float>(), expected.subspan((next - 1) * vocabulary, vocabulary)),
        1e-4)
        << next;
  }
}

// The reference holds exactly the parameters that the model declares.
TEST_P(NanowhaleParityTest, ParameterNames) {
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

TERRACE_ON_ALL_BACKENDS(NanowhaleParityTest);

}  // namespace
}  // namespace terrace
