// Letters as in backend/backend.h; P is max_positions.
#include "model/config.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/error.h"

namespace terrace {
namespace {

// Beyond these a configuration is a slip of the pen, and counting it would take forever.
constexpr double kMaxDimension = INT32_MAX;  // token ids and expert numbers are 32 bits wide
constexpr int64_t kMaxExpertsOfAllLayers = int64_t{1} << 22;
constexpr double kMaxParameters = 1e15;
constexpr Range kScalingFactors = {1e-6, 1e6};

const Names<PositionKind> kPositionNames = {{"learned", PositionKind::kLearned},
                                            {"rope", PositionKind::kRope}};
const Names<NormKind> kNormNames = {{"layernorm", NormKind::kLayerNorm},
                                    {"rmsnorm", NormKind::kRmsNorm}};
const Names<FeedForwardKind> kFeedForwardNames = {{"dense", FeedForwardKind::kDense},
                                                  {"moe", FeedForwardKind::kMoe}};

const Names<AttentionKind> kAttentionNames = {{"gqa", AttentionKind::kGqa},
                                              {"nanowhale-mla", AttentionKind::kNanowhaleMla}};
const Names<RouterScore> kScoreNames = {{"softmax", RouterScore::kSoftmax},
                                        {"sigmoid", RouterScore::kSigmoid},
                                        {"sqrtsoftplus", RouterScore::kSqrtSoftplus}};
const Names<SelectionBias> kSelectionBiasNames = {{"none", SelectionBias::kNone},
                                                  {"fixed", SelectionBias::kFixed},
                                                  {"balancing", SelectionBias::kBalancing}};

void CheckAttention(const ModelConfig& config) {
  if (config.heads % config.kv_heads != 0) {
    Fail("model.kv_heads = {} does not divide model.heads = {}", config.kv_heads, config.heads);
  }
  if (config.head_width == 0 && config.width % config.heads != 0) {
    Fail("model.heads = {} does not divide model.width = {}, and model.head_width is not given",
         config.heads, config.width);
  }
  if (config.positions == PositionKind::kRope) {
    if (config.RopeWidth() % 2 != 0) {
      Fail("model.{} = {} is odd, which model.positions = \"rope\" cannot rotate",
           config.rope_width != 0 ? "rope_width" : "head_width", config.RopeWidth());
    }
    if (config.RopeWidth() > config.HeadWidth()) {
      Fail("model.rope_width = {} is more than model.head_width = {}", config.RopeWidth(),
           config.HeadWidth());
    }
  }
  if (config.HeadWidth() > INT32_MAX / config.heads) {
    Fail("model.heads = {} of width {} are more than {} together", config.heads, config.HeadWidth(),
         INT32_MAX);
  }
  if (config.attention != AttentionKind::kNanowhaleMla) return;

  if (config.kv_heads != 1) {
    Fail("model.kv_heads = {} is not the one head of model.attention = \"nanowhale-mla\"",
         config.kv_heads);
  }
  if (config.query_rank == 0) Fail("model.query_rank = 0, and model.attention is nanowhale-mla");
  if (config.output_rank == 0) Fail("model.output_rank = 0, and model.attention is nanowhale-mla");
  if (config.heads % config.output_groups != 0) {
    Fail("model.output_groups = {} does not divide model.heads = {}", config.output_groups,
         config.heads);
  }
}

void CheckFeedForward(const ModelConfig& config) {
  if (config.HasLayerOf(FeedForwardKind::kDense) && config.ffn_width == 0) {
    Fail("model.ffn_width = 0, and model.ffn has dense layers");
  }
  if (!config.HasLayerOf(FeedForwardKind::kMoe)) return;

  if (config.experts == 0) Fail("model.experts = 0, and model.ffn has MoE layers");
  if (config.ExpertWidth() == 0) Fail("model.expert_width = 0, and model.ffn_width is not given");
  if (config.MoeLayers() > kMaxExpertsOfAllLayers / config.experts) {
    Fail("model.experts = {} in {} layers are more than {} together", config.experts,
         config.MoeLayers(), kMaxExpertsOfAllLayers);
  }
  if (config.router.top_k > config.experts) {
    Fail("model.router.top_k = {} is not within 1 .. model.experts = {}", config.router.top_k,
         config.experts);
  }
}

// So that sizes and sums of sizes stay within 64 bits. In float64, which cannot overflow.
void CheckSize(const ModelConfig& config) {
  const auto size = [](int64_t rows, int64_t columns) {
    return static_cast<double>(rows) * static_cast<double>(columns);
  };
  const double moe_layers = static_cast<double>(config.MoeLayers());
  const double layers = static_cast<double>(config.layers);
  double parameters = 2 * size(config.vocab_size, config.width) +
                      4 * layers * size(config.heads * config.HeadWidth(), config.width) +
                      3 * (layers - moe_layers) * size(config.ffn_width, config.width) +
                      3 * moe_layers * size(config.shared_expert_width, config.width) +
                      3 * moe_layers * static_cast<double>(config.experts) *
                          size(config.ExpertWidth(), config.width);
  if (config.positions == PositionKind::kLearned)
    parameters += size(config.max_positions, config.width);
  if (parameters > kMaxParameters) {
    Fail("the model would have some {:.1e} parameters, more than {:.0e}", parameters,
         kMaxParameters);
  }
}

}  // namespace

int64_t ModelConfig::MoeLayers() const {
  int64_t count = 0;
  for (int64_t layer = 0; layer < layers; ++layer) {
    count += FeedForwardOf(layer) == FeedForwardKind::kMoe;
  }
  return count;
}

bool ModelConfig::HasLayerOf(FeedForwardKind kind) const {
  const int64_t distinct = std::min(layers, std::ssize(ffn));
  return std::find(ffn.begin(), ffn.begin() + distinct, kind) != ffn.begin() + distinct;
}

bool ModelConfig::Has(Population population) const {
  switch (population) {
    case Population::kEmbedding:
    case Population::kAttention:
    case Population::kNorm:
      return true;
    case Population::kHead:
      return !tied_head;
    case Population::kDenseFfn:
      return HasLayerOf(FeedForwardKind::kDense);
    case Population::kExpert:
    case Population::kRouter:
      return HasLayerOf(FeedForwardKind::kMoe);
    case Population::kSharedExpert:
      return shared_expert_width > 0 && HasLayerOf(FeedForwardKind::kMoe);
  }
  return false;
}

Fields FieldsOf(ModelConfig& config) {
  ModelConfig* const model = &config;
  RouterConfig& router = config.router;
  const Needs rope = {[model] { return model->positions == PositionKind::kRope; },
                      "model.positions = \"rope\""};
  const Needs moe = {[model] { return model->HasLayerOf(FeedForwardKind::kMoe); },
                     "\"moe\" in model.ffn"};
  const Needs ffn_width = {
      [model] { return model->HasLayerOf(FeedForwardKind::kDense) || model->expert_width == 0; },
      "\"dense\" in model.ffn, where model.expert_width is given"};
  const Needs mla = {[model] { return model->attention == AttentionKind::kNanowhaleMla; },
                     "model.attention = \"nanowhale-mla\""};
  const Needs balancing = {[model] { return model->selection_bias == SelectionBias::kBalancing; },
                           "model.router.selection_bias = \"balancing\""};
  const Needs softmax = {[model] {
                           return model->HasLayerOf(FeedForwardKind::kMoe) &&
                                  model->router.score == RouterScore::kSoftmax;
                         },
                         "\"moe\" in model.ffn with model.router.score = \"softmax\""};
  const Needs streams = {[model] { return model->HasHyperConnections(); },
                         "model.hyper_connection.streams above 1"};
  HyperConnection& hyper = config.hyper_connection;
  const Range dimension = {1, kMaxDimension}, dimension_or_0 = {0, kMaxDimension};
  const Range experts = {0, static_cast<double>(kMaxExpertsOfAllLayers)};
  return WithPrefix(
      "model.",
      {
          {"vocab_size", &config.vocab_size, "tokens", dimension},
          {"max_positions", &config.max_positions, "longest sequence", dimension},
          {"width", &config.width, "of the residual stream", dimension},
          {"layers", &config.layers, "blocks", {1, 65536}},
          {"heads", &config.heads, "query heads", dimension},
          {"kv_heads", &config.kv_heads, "key/value heads", dimension},
          {"head_width", &config.head_width, "0: width / heads", dimension_or_0},
          {"attention", Choice(config.attention, kAttentionNames), "of every layer"},
          {"query_rank", &config.query_rank, "of the queries' projection", dimension_or_0, mla},
          {"output_groups", &config.output_groups, "of heads, projected apart", dimension, mla},
          {"output_rank", &config.output_rank, "of each group's projection", dimension_or_0, mla},
          {"positions", Choice(config.positions, kPositionNames), "of tokens"},
          {"rope_theta", &config.rope_theta, "base of the rotation angles", kRopeThetas, rope},
          {"rope_width", &config.rope_width, "rotated of each head, the last; 0: all",
           dimension_or_0, rope},
          {"norm", Choice(config.norm, kNormNames), "before each layer"},
          {"norm_epsilon", &config.norm_epsilon, "added to the mean square", kNormEpsilons},
          {"ffn", ChoiceList(config.ffn, kFeedForwardNames), "repeated over layers"},
          {"ffn_width", &config.ffn_width, "of dense layers", dimension_or_0, ffn_width},
          {"experts", &config.experts, "per MoE layer", experts, moe},
          {"expert_width", &config.expert_width, "0: ffn_width", dimension_or_0, moe},
          {"shared_expert_width", &config.shared_expert_width,
           "of an expert for every token; 0: none", dimension_or_0, moe},
          {"tied_head", &config.tied_head, "the head is the embedding"},
          {"init_std", &config.init_std, "of matrices at the start", kInitStds},
          {"router.top_k", &router.top_k, "experts per token", {1, experts.maximum}, moe},
          {"router.score", Choice(router.score, kScoreNames), "of an expert", {}, moe},
          {"router.normalize_weights",
           &router.normalize_weights,
           "combine weights divided by their sum",
           {},
           moe},
          {"router.scaling_factor", &router.scaling_factor, "of the combine weights",
           kScalingFactors, moe},
          {"router.selection_bias",
           Choice(config.selection_bias, kSelectionBiasNames),
           "added to scores where experts are chosen",
           {},
           moe},
          {"router.selection_bias_rate", &config.selection_bias_rate, "its change in a step",
           kCoefficients, balancing},
          {"router.aux_coefficient", &router.aux_coefficient, "of the load-balancing loss",
           kCoefficients, moe},
          {"router.z_coefficient", &router.z_coefficient, "of the router z-loss", kCoefficients,
           softmax},
          {"router.noise_scale", &router.noise_scale, "of N(0, 1) on logits in training",
           kCoefficients, moe},
          {"hyper_connection.streams",
           &hyper.streams,
           "residual streams; 1: a plain one",
           {1, HyperConnection::kMaxStreams}},
          {"hyper_connection.sinkhorn_iterations",
           &hyper.sinkhorn_iterations,
           "that make the mixing matrix doubly stochastic",
           {1, HyperConnection::kMaxIterations},
           streams},
          {"hyper_connection.epsilon", &hyper.epsilon, "added to weights and sums", kNormEpsilons,
           streams},
      });
}

void ModelConfig::Check() const {
  if (ffn.empty()) Fail("model.ffn is empty: it needs at least one of dense, moe");
  ModelConfig bound = *this;
  CheckBounds(FieldsOf(bound));
  CheckAttention(*this);
  CheckFeedForward(*this);
  CheckSize(*this);
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
    Declare(std::move(name), Population::kRouter, DType::kF32, shape, config_.init_std, 0);
  }
  void Bias(std::string name, int64_t experts) {
    Declare(std::move(name), Population::kRouter, DType::kF32, {experts}, 0, 0).contributions = 0;
  }
  // Of a projection within attention: RMSNorm whatever the others are.
  void InnerNorm(std::string name, int64_t width) {
    Declare(std::move(name), Population::kNorm, DType::kF32, {width}, 0, 1);
  }
  // Of a hyper-connection that reads and, with `writes`, writes.
  void HyperConnection(const std::string& name, bool writes) {
    const int64_t streams = config_.hyper_connection.streams;
    const int64_t weights = writes ? streams * (streams + 2) : streams;
    Declare(name + ".weight", Population::kNorm, DType::kF32, {weights, config_.StreamWidth()},
            config_.init_std, 0);
    Declare(name + ".base", Population::kNorm, DType::kF32, {weights}, 0, 0);
    Declare(name + ".scale", Population::kNorm, DType::kF32, {writes ? 3 : 1}, 0, 1);
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

void DeclareAttention(const ModelConfig& config, const std::string& prefix,
                      Declaration& declaration) {
  const int64_t query_width = config.heads * config.HeadWidth();   // H * C
  const int64_t key_width = config.kv_heads * config.HeadWidth();  // G * C
  const int64_t width = config.width;                              // D
  const auto matrix = [&](const char* name, Shape shape) {
    declaration.Matrix(prefix + name, Population::kAttention, shape);
  };
  if (config.attention == AttentionKind::kGqa) {
    matrix("q_proj.weight", {query_width, width});
    matrix("k_proj.weight", {key_width, width});
    matrix("v_proj.weight", {key_width, width});
    declaration.Residual(prefix + "out_proj.weight", Population::kAttention, {width, query_width});
    return;
  }
  const int64_t output_width = config.output_groups * config.output_rank;
  matrix("q_a_proj.weight", {config.query_rank, width});
  declaration.InnerNorm(prefix + "q_norm.weight", config.query_rank);
  matrix("q_b_proj.weight", {query_width, config.query_rank});
  matrix("kv_proj.weight", {key_width, width});
  declaration.InnerNorm(prefix + "kv_norm.weight", key_width);
  matrix("out_a_proj.weight", {output_width, query_width / config.output_groups});
  declaration.Residual(prefix + "out_b_proj.weight", Population::kAttention, {width, output_width});
}

void DeclareLayer(const ModelConfig& config, int64_t layer, Declaration& declaration) {
  const std::string prefix = fmt::format("layers.{}.", layer);
  const int64_t width = config.width;  // D
  declaration.layer = layer;
  if (config.HasHyperConnections()) declaration.HyperConnection(prefix + "hyper1", true);
  declaration.Norm(prefix + "norm1");
  DeclareAttention(config, prefix + "attn.", declaration);
  if (config.HasHyperConnections()) declaration.HyperConnection(prefix + "hyper2", true);
  declaration.Norm(prefix + "norm2");
  if (config.FeedForwardOf(layer) == FeedForwardKind::kDense) {
    declaration.SwiGlu(prefix + "ff", Population::kDenseFfn, config.ffn_width);
  } else {
    declaration.Router(prefix + "ff.router.weight", {config.experts, width});
    if (config.selection_bias != SelectionBias::kNone) {
      declaration.Bias(prefix + "ff.router.bias", config.experts);
    }
    for (int64_t expert = 0; expert < config.experts; ++expert) {
      declaration.expert = expert;
      declaration.SwiGlu(fmt::format("{}ff.experts.{}", prefix, expert), Population::kExpert,
                         config.ExpertWidth());
    }
    declaration.expert = -1;
    if (config.shared_expert_width > 0) {
      declaration.SwiGlu(prefix + "ff.shared_expert", Population::kSharedExpert,
                         config.shared_expert_width);
    }
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
  if (config.HasHyperConnections()) declaration.HyperConnection("hyper_f", false);
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
    if (!parameter.trained()) continue;
    switch (parameter.population) {
      case Population::kExpert:
        expert_parameters += count;
        break;
      case Population::kEmbedding:
        // A tied table multiplies in the head; positions and untied tables are looked up.
        if (parameter.contributions == 2) size.product_parameters += count;
        break;
      case Population::kNorm:
        // Matrices among them are those of hyper-connections.
        if (parameter.value.shape.rank() == 2) size.product_parameters += count;
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
