#include "model/presets.h"

#include <algorithm>
#include <vector>

#include "core/error.h"
#include "core/nearest_name.h"

namespace terrace {
namespace {

constexpr Preset kPresets[] = {
    // The published SkewAdam experiment (arXiv 2607.19058).
    {"skewadam-6.78b", "",
     "the published SkewAdam model: 128 experts in one of two layers, GPT-2 tokens",
     [](ModelConfig& config) {
       config.vocab_size = 50304;
       config.max_positions = 256;
       config.width = 4096;
       config.layers = 2;
       config.heads = 32;
       config.kv_heads = 8;
       config.positions = PositionKind::kLearned;
       config.norm = NormKind::kLayerNorm;
       config.ffn_width = 4096;
       config.ffn = {FeedForwardKind::kDense, FeedForwardKind::kMoe};
       config.experts = 128;
       config.router.top_k = 2;
       config.router.aux_coefficient = 0.05f;
       config.router.z_coefficient = 1e-4f;
       config.router.noise_scale = 0.5f;
       config.weight_dtype = DType::kBF16;
     }},
    {"moe-110m", "skewadam-6.78b",
     "the same at a sixtieth of the size: 32 experts in two of four layers",
     [](ModelConfig& config) {
       config.vocab_size = 8192;
       config.max_positions = 128;
       config.width = 512;
       config.layers = 4;
       config.heads = 8;
       config.kv_heads = 2;
       config.ffn_width = 1024;
       config.experts = 32;
     }},
    // float32, which every CPU multiplies fast.
    {"moe-laptop", "moe-110m",
     "minutes to train: 16 experts in two of four layers, RoPE, RMSNorm, float32",
     [](ModelConfig& config) {
       config.vocab_size = 4096;
       config.max_positions = 256;
       config.width = 256;
       config.heads = 4;
       config.positions = PositionKind::kRope;
       config.norm = NormKind::kRmsNorm;
       config.ffn_width = 512;
       config.experts = 16;
       config.expert_width = 192;
       config.weight_dtype = DType::kF32;
     }},
    // The model that MESH was found on (arXiv 2608.04407).
    {"nanowhale-110m", "",
     "after DeepSeek-V4: low-rank attention, hyper-connections, 4 experts and a shared one",
     [](ModelConfig& config) {
       config.vocab_size = 129280;
       config.max_positions = 2048;
       config.width = 320;
       config.layers = 8;
       config.heads = 8;
       config.kv_heads = 1;
       config.head_width = 96;
       config.attention = AttentionKind::kNanowhaleMla;
       config.query_rank = 160;
       config.output_groups = 2;
       config.output_rank = 80;
       config.rope_width = 32;
       config.norm_epsilon = 1e-6f;
       config.ffn_width = 640;
       config.ffn = {FeedForwardKind::kMoe};
       config.experts = 4;
       config.router.top_k = 2;
       config.router.score = RouterScore::kSqrtSoftplus;
       config.router.scaling_factor = 1.5f;
       config.selection_bias = SelectionBias::kBalancing;
       config.shared_expert_width = 640;
       config.hyper_connection.streams = 4;
       config.tied_head = false;
     }},
    {"nanowhale-small", "nanowhale-110m", "the same in the size of moe-laptop",
     [](ModelConfig& config) {
       config.vocab_size = 4096;
       config.max_positions = 256;
       config.width = 192;
       config.layers = 4;
       config.heads = 4;
       config.head_width = 64;
       config.query_rank = 96;
       config.output_rank = 48;
       config.ffn_width = 384;
       config.shared_expert_width = 384;
     }},
    {"gpt-moe-tiny", "skewadam-6.78b", "to test with: 6 experts, float32, no router noise",
     [](ModelConfig& config) {
       config.vocab_size = 97;
       config.max_positions = 24;
       config.width = 32;
       config.layers = 4;
       config.heads = 4;
       config.kv_heads = 2;
       config.ffn_width = 48;
       config.experts = 6;
       config.router.noise_scale = 0;
       config.weight_dtype = DType::kF32;
     }},
    {"nanowhale-tiny", "nanowhale-110m", "to test with: nanowhale's parts, all small",
     [](ModelConfig& config) {
       config.vocab_size = 101;
       config.max_positions = 24;
       config.width = 24;
       config.layers = 2;
       config.heads = 4;
       config.head_width = 12;
       config.query_rank = 10;
       config.output_rank = 6;
       config.rope_width = 4;
       config.ffn_width = 20;
       config.shared_expert_width = 20;
     }},
};

// Null when there is none.
const Preset* Find(std::string_view name) {
  const auto* found = std::find_if(std::begin(kPresets), std::end(kPresets),
                                   [&](const Preset& preset) { return preset.name == name; });
  return found != std::end(kPresets) ? found : nullptr;
}

const Preset& Named(std::string_view name) {
  if (const Preset* found = Find(name)) return *found;
  std::vector<std::string_view> names;
  for (const Preset& preset : kPresets) names.push_back(preset.name);
  Fail("there is no preset \"{}\"; the nearest is \"{}\"", name, NearestName(name, names));
}

}  // namespace

std::span<const Preset> Presets() { return kPresets; }

bool IsPreset(std::string_view name) { return Find(name) != nullptr; }

ModelConfig PresetNamed(std::string_view name) {
  const Preset& preset = Named(name);
  ModelConfig config = preset.base.empty() ? ModelConfig{} : PresetNamed(preset.base);
  preset.change(config);
  return config;
}

}  // namespace terrace
