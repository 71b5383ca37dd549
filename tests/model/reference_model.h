// The reference model: its configuration, tokens, weights and what PyTorch made of them.
#pragma once

#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

#include "model/harness.h"
#include "model/presets.h"
#include "support/temporary_folder.h"
#include "train/safetensors.h"

namespace terrace {

class ReferenceModelTest : public ModelTest {
 protected:
  ReferenceModelTest() : reader_(TestData() / "gpt_moe.safetensors") {
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
      const TensorView given = Find("weight.", parameter);
      ASSERT_EQ(given.shape, parameter.value.shape) << parameter.name;
      std::memcpy(parameter.value.data, given.data, given.bytes());
    }
  }

  // As the file names a parameter: it calls an expert's projections w1, w2 and w3.
  static std::string PublishedName(std::string name) {
    constexpr std::pair<std::string_view, std::string_view> kNames[] = {
        {"gate_proj", "w1"}, {"up_proj", "w2"}, {"down_proj", "w3"}};
    for (const auto& [ours, theirs] : kNames) {
      if (const size_t at = name.find(ours); at != std::string::npos) {
        name.replace(at, ours.size(), theirs);
      }
    }
    return name;
  }
  // A parameter's tensor of a kind: "weight.", "grad.".
  TensorView Find(const std::string& kind, const Parameter& parameter) const {
    return reader_.Find(kind + PublishedName(parameter.name));
  }

  SafetensorsReader reader_;
  nlohmann::json reference_;
};

}  // namespace terrace
