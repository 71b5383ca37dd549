// Models as Hugging Face describes them: config.json of the Mixtral, OLMoE, Qwen3-MoE and
// DeepSeek-V3 families.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "model/config.h"
#include "model/parameter.h"

namespace terrace {

// `count` tensors of one shape.
struct DeclaredTensor {
  std::string name;  // of the family's own, with * for numbers
  Population population;
  Shape shape;
  int64_t count;
  int64_t active;          // of them, per token
  bool in_product = true;  // takes part in a matrix product with every token that reaches it
  bool wide = false;       // float32 whatever the precision: norms and routers
  bool trained = true;     // has a gradient
};

struct HuggingFaceModel {
  std::string family;  // "mixtral"
  std::vector<DeclaredTensor> tensors;
  ModelSize size;
  int64_t width = 0;
  int64_t layers = 0;
  int64_t experts = 0;  // routed, per MoE layer
  int64_t top_k = 0;
  int64_t max_positions = 0;
  DType weight_dtype = DType::kBF16;  // float32 where torch_dtype says so
  // The same model of this engine, parameter by parameter, where its layers can run it.
  std::optional<ModelConfig> config;
  std::string not_runnable;  // otherwise: what the engine lacks
};

// Reads what decides sizes and ignores other keys. Throws Error on one line, "NAME: ...", for text
// that is not JSON, a key twice, nesting, sizes and numbers beyond reason, and an architecture
// that is not one of the four.
HuggingFaceModel ParseHuggingFaceModel(std::string_view json, const std::string& name);
HuggingFaceModel ReadHuggingFaceModel(const std::string& path);

}  // namespace terrace
