// Letters as in backend/backend.h; P is max_positions.
#include "model/config.h"

#include <cmath>
#include <utility>

#include "core/error.h"

namespace terrace {
namespace {

// Beyond these a configuration is a slip of the pen, and counting it would take forever.
constexpr int64_t kMaxDimension = INT32_MAX;  // token ids and expert numbers are 32 bits wide
constexpr int64_t kMaxLayers = 65536;
constexpr int64_t kMaxExpertsOfAllLayers = int64_t{1} << 22;

bool HasLayerOf(const ModelConfig& config, FeedForwardKind kind) {
  for (int64_t layer = 0; layer < config.layers && layer < std::ssize(config.ffn); ++layer) {
    if (config.FeedForwardOf(layer) == kind) return true;
  }
  return false;
}

void CheckRange(const char* key, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most) {
    Fail("model.{} = {} is not between {} and {}", key, value, least, most);
  }
}

void CheckRange(const char* key, float value, float least) {
  if (!(value >= least) || !std::isfinite(value)) {
    Fail("model.{} = {} is not a finite number of at least {}", key, value, least);
  }
}

void CheckAttention(const ModelConfig& config) {
  CheckRange("heads", config.heads, 1, kMaxDimension);
  CheckRange("kv_heads", config.kv_heads, 1, kMaxDimension);
  CheckRange("head_width", config.head_width, 0, kMaxDimension);
  if (config.heads % config.kv_heads != 0) {
    Fail("model.kv_heads = {} does not divide model.heads = {}", config.kv_heads, config.heads);
  }
  if (config.head_width == 0 && config.width % config.heads != 0) {
    Fail("model.heads = {} does not divide model.width = {}, and model.head_width is not given",
         config.heads, config.width);
  }
  if (config.positions == PositionKind::kRope) {
    if (config.HeadWidth() % 2 != 0) {
      Fail("model.head_width = {} is odd, which model.positions = \"rope\" cannot rotate",
           config.HeadWidth());
    }
    if (!(config.rope_theta > 0) || !std::isfinite(config.rope_theta)) {
      Fail("model.rope_theta = {} is not a positive number", config.rope_theta);
    }
  }
}

void CheckFeedForward(const ModelConfig& config) {
  if (config.ffn.empty()) Fail("model.ffn is empty: it needs at least one of dense, moe");
  CheckRange("expert_width", config.expert_width, 0, kMaxDimension);
  CheckRange("ffn_width", config.ffn_width, HasLayerOf(config, FeedForwardKind::kDense) ? 1 : 0,
             kMaxDimension);
  if (!HasLayerOf(config, FeedForwardKind::kMoe)) return;

  CheckRange("experts", config.experts, 1, kMaxDimension);
  if (config.ExpertWidth() == 0) Fail("model.expert_width = 0, and model.ffn_width is not given");
  if (config.MoeLayers() > kMaxExpertsOfAllLayers / config.experts) {
    Fail("model.experts = {} in {} layers are more than {} together", config.experts,
         config.MoeLayers(), kMaxExpertsOfAllLayers);
  }
  if (config.router.top_k < 1 || config.router.top_k > config.experts) {
    Fail("model.router.top_k = {} is not between 1 and model.experts = {}", config.router.top_k,
         config.experts);
  }
  CheckRange("router.aux_coefficient", config.router.aux_coefficient, 0.0f);
  CheckRange("router.z_coefficient", config.router.z_coefficient, 0.0f);
  CheckRange("router.noise_scale", config.router.noise_scale, 0.0f);
}

}  // namespace

int64_t ModelConfig::MoeLayers() const {
  int64_t count = 0;
  for (int64_t layer = 0; layer < layers; ++layer) {
    count += FeedForwardOf(layer) == FeedForwardKind::kMoe;
  }
  return count;
}

void ModelConfig::Check() const {
  CheckRange("vocab_size", vocab_size, 1, kMaxDimension);
  CheckRange("max_positions", max_positions, 1, kMaxDimension);
  CheckRange("width", width, 1, kMaxDimension);
  CheckRange("layers", layers, 1, kMaxLayers);
  CheckAttention(*this);
  CheckFeedForward(*this);
  if (!(norm_epsilon > 0) || !std::isfinite(norm_epsilon)) {
    Fail("model.norm_epsilon = {} is not a positive number", norm_epsilon);
  }
  CheckRange("init_std", init_std, 0.0f);
  if (weight_dtype != DType::kF32 && weight_dtype != DType::kBF16) {
    Fail("training.precision = \"{}\" is not one of f32, bf16", NameOf(weight_dtype));
  }
}

namespace {

// Collects parameters; ids are their order.
class Declaration {
 public:
  explicit Declaration(const ModelConfig& config)
      : config_(config),
        residual_std_(config.init_std / std::sqrt(2.0f * static_cast<float>(config.layers))) {}

  Parameter& Matrix(std::string name, Population population, Shape shape) {
    return Declare(std::move(name), population, config_.weight_dtype, shape, config_.init_std, 0);
  }
  // A projection into the residual stream.
  Parameter& Residual(std::string name, Population population, Shape shape) {
    return Declare(std::move(name), population, config_.weight_dtype, shape, residual_std_, 0);
  }
  void Router(std::string name, Shape shape) {
    Declare(std::move(name), Population::kRouter, DType::kF32, shape, 0, 0);
  }
  void Norm(const std::string& name) {
    Declare(name + ".weight", Population::kNorm, DType::kF32, {config_.width}, 0, 1);
    if (config_.norm == NormKind::kLayerNorm) {
      Declare(name + ".bias", Population::kNorm, DType::kF32, {config_.width}, 0, 0);
    }
  }
  void SwiGlu(const std::string& prefix, Population population, int64_t ffn_width) {
    Matrix(prefix + ".gate_proj.weight", population, {ffn_width, config_.width});
    Matrix(prefix + ".up_proj.weight", population, {ffn_width, config_.width});
    Residual(prefix + ".down_proj.weight", population, {config_.width, ffn_width}).neuron_axis = 1;
  }

  int64_t layer = -1;  // of the parameters declared next
  int64_t expert = -1;

  std::vector<Parameter> Take() { return std::move(parameters_); }

 private:
  Parameter& Declare(std::string name, Population population, DType dtype, Shape shape,
                     float stddev, float constant) {
    Parameter& parameter = parameters_.emplace_back();
    parameter.name = std::move(name);
    parameter.population = population;
    parameter.value.dtype = dtype;
    parameter.value.shape = shape;
    parameter.id = std::ssize(parameters_) - 1;
    parameter.layer = layer;
    parameter.expert = expert;
    parameter.init_std = stddev;
    parameter.init_constant = constant;
    return parameter;
  }

  const ModelConfig& config_;
  float residual_std_;
  std::vector<Parameter> parameters_;
};

void DeclareLayer(const ModelConfig& config, int64_t layer, Declaration& declaration) {
  const std::string prefix = fmt::format("layers.{}.", layer);
  const int64_t query_width = config.heads * config.HeadWidth();   // H * C
  const int64_t key_width = config.kv_heads * config.HeadWidth();  // G * C
  const int64_t width = config.width;                              // D
  declaration.layer = layer;
  declaration.Norm(prefix + "norm1");
  declaration.Matrix(prefix + "attn.q_proj.weight", Population::kAttention, {query_width, width});
  declaration.Matrix(prefix + "attn.k_proj.weight", Population::kAttention, {key_width, width});
  declaration.Matrix(prefix + "attn.v_proj.weight", Population::kAttention, {key_width, width});
  declaration.Residual(prefix + "attn.out_proj.weight", Population::kAttention,
                       {width, query_width});
  declaration.Norm(prefix + "norm2");
  if (config.FeedForwardOf(layer) == FeedForwardKind::kDense) {
    declaration.SwiGlu(prefix + "ff", Population::kDenseFfn, config.ffn_width);
  } else {
    declaration.Router(prefix + "ff.router.weight", {config.experts, width});
    for (int64_t expert = 0; expert < config.experts; ++expert) {
      declaration.expert = expert;
      declaration.SwiGlu(fmt::format("{}ff.experts.{}", prefix, expert), Population::kExpert,
                         config.ExpertWidth());
    }
    declaration.expert = -1;
  }
  declaration.layer = -1;
}

}  // namespace

std::vector<Parameter> ParametersOf(const ModelConfig& config) {
  Declaration declaration(config);
  Parameter& embedding = declaration.Matrix("tok_emb.weight", Population::kEmbedding,
                                            {config.vocab_size, config.width});
  if (config.tied_head) embedding.contributions = 2;
  if (config.positions == PositionKind::kLearned) {
    declaration.Matrix("pos_emb.weight", Population::kEmbedding,
                       {config.max_positions, config.width});
  }
  for (int64_t layer = 0; layer < config.layers; ++layer) DeclareLayer(config, layer, declaration);
  declaration.Norm("norm_f");
  if (!config.tied_head) {
    declaration.Matrix("lm_head.weight", Population::kHead, {config.vocab_size, config.width});
  }
  return declaration.Take();
}

ModelSize SizeOf(const ModelConfig& config) {
  ModelSize size;
  int64_t expert_parameters = 0;
  for (const Parameter& parameter : ParametersOf(config)) {
    const int64_t count = parameter.value.size();
    size.parameters += count;
    switch (parameter.population) {
      case Population::kExpert:
        expert_parameters += count;
        break;
      case Population::kEmbedding:
        // A tied table multiplies in the head; positions and untied tables are looked up.
        if (parameter.contributions == 2) size.product_parameters += count;
        break;
      case Population::kNorm:
        break;
      default:
        size.product_parameters += count;
    }
  }
  const int64_t active_expert_parameters =
      expert_parameters == 0 ? 0 : expert_parameters / config.experts * config.router.top_k;
  size.active_parameters = size.parameters - expert_parameters + active_expert_parameters;
  size.product_parameters += active_expert_parameters;
  size.attention_width_sum = config.layers * config.heads * config.HeadWidth();
  return size;
}

double ModelSize::FlopsPerToken(int64_t sequence_length) const {
  return 6.0 * static_cast<double>(product_parameters) +
         6.0 * static_cast<double>(attention_width_sum) * static_cast<double>(sequence_length);
}

}  // namespace terrace
