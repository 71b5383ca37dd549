#include "plan/hugging_face_model.h"

#include <algorithm>
#include <array>
#include <cfloat>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "core/atomic_file.h"
#include "core/counted.h"
#include "core/error.h"

namespace terrace {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxFileBytes = 4 << 20;
constexpr int kMaxDepth = 32;
constexpr int64_t kMaxDimension = INT32_MAX;
constexpr int64_t kMaxLayers = 4096;
constexpr int64_t kMaxExperts = 65536;
// Of all layers: a dry run declares each of them.
constexpr int64_t kMaxPlannedExperts = 65536;
constexpr int64_t kMaxParameters = int64_t{1} << 50;

// A value for an error, short and on one line.
std::string Short(const Json& value) {
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  if (text.size() > 40) text = text.substr(0, 37) + "...";
  return text;
}

// Like Json::parse, but a key twice and deep nesting are errors.
Json ParseStrict(std::string_view text) {
  std::vector<std::set<std::string>> keys;
  const auto check = [&](int depth, Json::parse_event_t event, Json& value) {
    if (depth > kMaxDepth) Fail("nested deeper than {}", kMaxDepth);
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && !keys.back().insert(value.get<std::string>()).second) {
      Fail("the key {} stands there twice", Short(value));
    }
    return true;
  };
  try {
    return Json::parse(text, check);
  } catch (const Json::parse_error& error) {
    Fail("not JSON (byte {})", error.byte);
  } catch (const Json::out_of_range&) {
    Fail("a number is beyond what a float64 holds");
  }
}

// Values by key; errors name it.
class Reader {
 public:
  explicit Reader(const Json& json) : json_(json) {}

  // Null counts as left out.
  bool Has(const char* key) const {
    const auto found = json_.find(key);
    return found != json_.end() && !found->is_null();
  }
  int64_t Whole(const char* key, int64_t least, int64_t most) const {
    if (!Has(key)) Fail("{} is missing", key);
    const Json& value = json_.at(key);
    const bool whole = value.is_number_integer() &&
                       (!value.is_number_unsigned() || value.get<uint64_t>() <= INT64_MAX);
    if (!whole || value.get<int64_t>() < least || value.get<int64_t>() > most) {
      Fail("{} = {} is not a whole number within {} .. {}", key, Short(value), least, most);
    }
    return value.get<int64_t>();
  }
  int64_t Whole(const char* key, int64_t least, int64_t most, int64_t otherwise) const {
    return Has(key) ? Whole(key, least, most) : otherwise;
  }
  int64_t Dimension(const char* key) const { return Whole(key, 1, kMaxDimension); }
  float Number(const char* key, const Range& range, float otherwise) const {
    if (!Has(key)) return otherwise;
    const Json& value = json_.at(key);
    if (!value.is_number() || !(value.get<double>() >= range.minimum &&
                                value.get<double>() <= std::min<double>(range.maximum, FLT_MAX))) {
      Fail("{} = {} is not a number within {} .. {}", key, Short(value), range.minimum,
           range.maximum);
    }
    return value.get<float>();
  }
  // Of every family, whether it can be run or not.
  float RopeTheta() const { return Number("rope_theta", kRopeThetas, 1e6f); }
  float NormEpsilon() const { return Number("rms_norm_eps", kNormEpsilons, 1e-5f); }
  float InitStd() const { return Number("initializer_range", kInitStds, 0.02f); }
  float AuxCoefficient() const { return Number("router_aux_loss_coef", kCoefficients, 0.001f); }
  bool Flag(const char* key, bool otherwise) const {
    if (!Has(key)) return otherwise;
    if (!json_.at(key).is_boolean()) {
      Fail("{} = {} is neither true nor false", key, Short(json_.at(key)));
    }
    return json_.at(key).get<bool>();
  }
  std::string Text(const char* key, const std::string& otherwise) const {
    if (!Has(key)) return otherwise;
    if (!json_.at(key).is_string()) Fail("{} = {} is not text", key, Short(json_.at(key)));
    return json_.at(key).get<std::string>();
  }
  // Numbers of layers.
  std::set<int64_t> Layers(const char* key, int64_t layers) const {
    std::set<int64_t> numbers;
    if (!Has(key)) return numbers;
    const Json& list = json_.at(key);
    if (!list.is_array()) Fail("{} = {} is not a list", key, Short(list));
    for (const Json& value : list) {
      if (!value.is_number_integer() || value.get<int64_t>() < 0 ||
          value.get<int64_t>() >= layers) {
        Fail("{}: {} is not the number of one of {}", key, Short(value), Counted(layers, "layer"));
      }
      numbers.insert(value.get<int64_t>());
    }
    return numbers;
  }

 private:
  const Json& json_;
};

// What all families share.
struct Common {
  int64_t width, layers, vocab_size, heads, kv_heads, head_width;
  bool tied, bias;

  explicit Common(const Reader& read)
      : width(read.Dimension("hidden_size")),
        layers(read.Whole("num_hidden_layers", 1, kMaxLayers)),
        vocab_size(read.Dimension("vocab_size")),
        heads(read.Whole("num_attention_heads", 1, kMaxExperts)),
        kv_heads(read.Whole("num_key_value_heads", 1, kMaxExperts, heads)),
        head_width(read.Whole("head_dim", 1, kMaxDimension, width / heads)),
        tied(read.Flag("tie_word_embeddings", false)),
        bias(read.Flag("attention_bias", false)) {
    if (!read.Has("head_dim") && width % heads != 0) {
      Fail("num_attention_heads = {} does not divide hidden_size = {}", heads, width);
    }
    if (heads % kv_heads != 0) {
      Fail("num_key_value_heads = {} does not divide num_attention_heads = {}", kv_heads, heads);
    }
    // All tensors' dimensions are below 2^31 then, and their sizes within 64 bits.
    if (head_width > kMaxDimension / heads) {
      Fail("{} of {} {} wider than {}", Counted(heads, "head"), head_width,
           ForCount(heads, "is", "are"), kMaxDimension);
    }
    const std::string activation = read.Text("hidden_act", "silu");
    if (activation != "silu") Fail("hidden_act = \"{}\" is not silu (SwiGLU)", activation);
    read.RopeTheta();
    read.NormEpsilon();
    read.InitStd();
    read.AuxCoefficient();
  }
};

struct Experts {
  int64_t count, top_k, width;
};

class Declaration {
 public:
  Declaration(HuggingFaceModel& model, const Common& common) : model_(model), common_(common) {
    model.width = common.width;
    model.layers = common.layers;
  }

  void Matrix(std::string name, Population population, int64_t rows, int64_t columns,
              int64_t count) {
    Add({std::move(name), population, {rows, columns}, count, count});
  }
  void Norm(std::string name, int64_t width, int64_t count) {
    Add({std::move(name), Population::kNorm, {width}, count, count, false, true});
  }
  void Bias(std::string name, int64_t width, int64_t count) {
    if (common_.bias) {
      Add({std::move(name), Population::kNorm, {width}, count, count, false, true});
    }
  }
  void Router(int64_t experts, int64_t count) {
    Add({"layers.*.router",
         Population::kRouter,
         {experts, common_.width},
         count,
         count,
         true,
         true});
  }
  void SwiGlu(const std::string& prefix, Population population, int64_t width, int64_t count) {
    Active(prefix, population, width, count, count);
  }
  void RoutedExperts(const Experts& experts, int64_t layers) {
    Active("layers.*.experts.*", Population::kExpert, experts.width, experts.count * layers,
           experts.top_k * layers);
  }
  void Ends() {
    Add({"embed_tokens",
         Population::kEmbedding,
         {common_.vocab_size, common_.width},
         1,
         1,
         common_.tied});
    if (!common_.tied) {
      Matrix("lm_head", Population::kHead, common_.vocab_size, common_.width, 1);
    }
    Norm("norm", common_.width, 1);
  }
  void LayerNorms() {
    Norm("layers.*.input_layernorm", common_.width, common_.layers);
    Norm("layers.*.post_attention_layernorm", common_.width, common_.layers);
  }
  // Grouped-query attention.
  void Attention() {
    const auto [width, layers, vocab, heads, kv_heads, head_width, tied, bias] = common_;
    const int64_t query_width = heads * head_width, key_width = kv_heads * head_width;
    const std::string prefix = "layers.*.self_attn.";
    Matrix(prefix + "q_proj", Population::kAttention, query_width, width, layers);
    Matrix(prefix + "k_proj", Population::kAttention, key_width, width, layers);
    Matrix(prefix + "v_proj", Population::kAttention, key_width, width, layers);
    Matrix(prefix + "o_proj", Population::kAttention, width, query_width, layers);
    Bias(prefix + "q_proj.bias", query_width, layers);
    Bias(prefix + "k_proj.bias", key_width, layers);
    Bias(prefix + "v_proj.bias", key_width, layers);
    Bias(prefix + "o_proj.bias", width, layers);
    model_.size.attention_width_sum = layers * query_width;
  }

 private:
  void Active(const std::string& prefix, Population population, int64_t width, int64_t count,
              int64_t active) {
    Add({prefix + ".gate_proj", population, {width, common_.width}, count, active});
    Add({prefix + ".up_proj", population, {width, common_.width}, count, active});
    Add({prefix + ".down_proj", population, {common_.width, width}, count, active});
  }

  void Add(DeclaredTensor tensor) {
    if (tensor.count == 0) return;
    ModelSize& size = model_.size;
    // Dimensions are below 2^31, so that only the last product and the sum may be too large.
    const double all = static_cast<double>(tensor.shape.size()) * static_cast<double>(tensor.count);
    if (all + static_cast<double>(size.parameters) > static_cast<double>(kMaxParameters)) {
      Fail("more than {} parameters ({}: {} of {})", kMaxParameters, tensor.name, tensor.count,
           tensor.shape.ToString());
    }
    size.parameters += tensor.shape.size() * tensor.count;
    size.active_parameters += tensor.shape.size() * tensor.active;
    if (tensor.in_product) size.product_parameters += tensor.shape.size() * tensor.active;
    model_.tensors.push_back(std::move(tensor));
  }

  HuggingFaceModel& model_;
  const Common& common_;
};

Experts ReadExperts(const Reader& read, const char* count, const char* width) {
  const int64_t experts = read.Whole(count, 1, kMaxExperts);
  return {experts, read.Whole("num_experts_per_tok", 1, experts), read.Dimension(width)};
}

void SetExperts(HuggingFaceModel& model, const Experts& experts) {
  model.experts = experts.count;
  model.top_k = experts.top_k;
}

void ReadMixtral(const Reader& read, HuggingFaceModel& model) {
  const Common common(read);
  const Experts experts = ReadExperts(read, "num_local_experts", "intermediate_size");
  SetExperts(model, experts);
  Declaration declare(model, common);
  declare.Ends();
  declare.LayerNorms();
  declare.Attention();
  declare.Router(experts.count, common.layers);
  declare.RoutedExperts(experts, common.layers);
  if (common.bias) {
    model.not_runnable = "biases of attention";
    return;
  }
  if (common.layers * experts.count > kMaxPlannedExperts) {
    model.not_runnable = fmt::format("more than {} experts", kMaxPlannedExperts);
    return;
  }
  ModelConfig config;
  config.vocab_size = common.vocab_size;
  config.max_positions = model.max_positions;
  config.width = common.width;
  config.layers = common.layers;
  config.heads = common.heads;
  config.kv_heads = common.kv_heads;
  config.head_width = common.head_width;
  config.rope_theta = read.RopeTheta();
  config.norm_epsilon = read.NormEpsilon();
  config.ffn = {FeedForwardKind::kMoe};
  config.ffn_width = experts.width;
  config.experts = experts.count;
  config.router.top_k = experts.top_k;
  config.router.normalize_weights = true;
  config.router.aux_coefficient = read.AuxCoefficient();
  config.tied_head = common.tied;
  config.weight_dtype = model.weight_dtype;
  config.init_std = read.InitStd();
  try {
    config.Check();
  } catch (const Error& error) {
    model.not_runnable = error.what();
    return;
  }
  model.config = config;
}

void ReadOlmoe(const Reader& read, HuggingFaceModel& model) {
  const Common common(read);
  const Experts experts = ReadExperts(read, "num_experts", "intermediate_size");
  SetExperts(model, experts);
  Declaration declare(model, common);
  declare.Ends();
  declare.LayerNorms();
  declare.Attention();
  declare.Norm("layers.*.self_attn.q_norm", common.heads * common.head_width, common.layers);
  declare.Norm("layers.*.self_attn.k_norm", common.kv_heads * common.head_width, common.layers);
  declare.Router(experts.count, common.layers);
  declare.RoutedExperts(experts, common.layers);
  model.not_runnable = "norms of queries and keys";
}

void ReadQwen3Moe(const Reader& read, HuggingFaceModel& model) {
  const Common common(read);
  const Experts experts = ReadExperts(read, "num_experts", "moe_intermediate_size");
  SetExperts(model, experts);
  const int64_t step = read.Whole("decoder_sparse_step", 1, kMaxLayers, 1);
  const std::set<int64_t> dense = read.Layers("mlp_only_layers", common.layers);
  int64_t moe_layers = 0;
  for (int64_t layer = 0; layer < common.layers; ++layer) {
    moe_layers += (layer + 1) % step == 0 && !dense.contains(layer);
  }
  Declaration declare(model, common);
  declare.Ends();
  declare.LayerNorms();
  declare.Attention();
  declare.Norm("layers.*.self_attn.q_norm", common.head_width, common.layers);
  declare.Norm("layers.*.self_attn.k_norm", common.head_width, common.layers);
  declare.Router(experts.count, moe_layers);
  declare.RoutedExperts(experts, moe_layers);
  if (moe_layers < common.layers) {
    declare.SwiGlu("layers.*.mlp", Population::kDenseFfn, read.Dimension("intermediate_size"),
                   common.layers - moe_layers);
  }
  model.not_runnable = "norms of queries and keys";
}

// Multi-head latent attention: queries and keys/values go through narrow latents with norms.
void DeclareLatentAttention(const Reader& read, const Common& common, HuggingFaceModel& model,
                            Declaration& declare) {
  const int64_t layers = common.layers, heads = common.heads, width = common.width;
  const int64_t kv_rank = read.Dimension("kv_lora_rank");
  const int64_t rope_width = read.Dimension("qk_rope_head_dim");
  const int64_t query_width = read.Dimension("qk_nope_head_dim") + rope_width;
  const int64_t value_width = read.Dimension("v_head_dim");
  const int64_t key_value_width = query_width - rope_width + value_width;
  const int64_t longest = std::max(query_width, key_value_width);
  if (longest > kMaxDimension / heads) {
    Fail("{} of {} {} wider than {}", Counted(heads, "head"), longest, ForCount(heads, "is", "are"),
         kMaxDimension);
  }
  const std::string prefix = "layers.*.self_attn.";
  const auto matrix = [&](const char* name, int64_t rows, int64_t columns) {
    declare.Matrix(prefix + name, Population::kAttention, rows, columns, layers);
  };
  if (read.Has("q_lora_rank")) {
    const int64_t rank = read.Dimension("q_lora_rank");
    matrix("q_a_proj", rank, width);
    declare.Bias(prefix + "q_a_proj.bias", rank, layers);
    declare.Norm(prefix + "q_a_layernorm", rank, layers);
    matrix("q_b_proj", heads * query_width, rank);
  } else {
    matrix("q_proj", heads * query_width, width);
  }
  matrix("kv_a_proj_with_mqa", kv_rank + rope_width, width);
  declare.Bias(prefix + "kv_a_proj_with_mqa.bias", kv_rank + rope_width, layers);
  declare.Norm(prefix + "kv_a_layernorm", kv_rank, layers);
  matrix("kv_b_proj", heads * key_value_width, kv_rank);
  matrix("o_proj", width, heads * value_width);
  declare.Bias(prefix + "o_proj.bias", width, layers);
  // Scores are products of query_width, outputs of value_width.
  model.size.attention_width_sum = layers * heads * (query_width + value_width) / 2;
}

void ReadDeepSeek(const Reader& read, HuggingFaceModel& model) {
  const Common common(read);
  const Experts experts = ReadExperts(read, "n_routed_experts", "moe_intermediate_size");
  SetExperts(model, experts);
  const int64_t shared = read.Whole("n_shared_experts", 0, kMaxExperts, 0);
  const int64_t first_moe = read.Whole("first_k_dense_replace", 0, common.layers, 0);
  const int64_t step = read.Whole("moe_layer_freq", 1, kMaxLayers, 1);
  int64_t moe_layers = 0;
  for (int64_t layer = first_moe; layer < common.layers; ++layer) moe_layers += layer % step == 0;
  Declaration declare(model, common);
  declare.Ends();
  declare.LayerNorms();
  DeclareLatentAttention(read, common, model, declare);
  declare.Router(experts.count, moe_layers);
  // Chooses experts, but has no gradient in the original: an update of its own balances the load.
  const bool has_bias = model.family == "deepseek_v3" || read.Text("topk_method", "") == "noaux_tc";
  if (has_bias && moe_layers > 0) {
    model.tensors.push_back({"layers.*.router.e_score_correction_bias",
                             Population::kRouter,
                             {experts.count},
                             moe_layers,
                             moe_layers,
                             false,
                             true,
                             false});
    model.size.parameters += experts.count * moe_layers;
    model.size.active_parameters += experts.count * moe_layers;
  }
  declare.RoutedExperts(experts, moe_layers);
  if (shared > 0) {
    const int64_t width = experts.width > kMaxDimension / shared ? 0 : experts.width * shared;
    if (width == 0) Fail("n_shared_experts = {} of {} are too wide", shared, experts.width);
    declare.SwiGlu("layers.*.shared_experts", Population::kSharedExpert, width, moe_layers);
  }
  if (moe_layers < common.layers) {
    declare.SwiGlu("layers.*.mlp", Population::kDenseFfn, read.Dimension("intermediate_size"),
                   common.layers - moe_layers);
  }
  model.not_runnable = "multi-head latent attention and shared experts";
}

struct Family {
  std::string_view type;          // model_type
  std::string_view architecture;  // where model_type is missing
  void (*read)(const Reader&, HuggingFaceModel&);
};
constexpr Family kFamilies[] = {
    {"mixtral", "MixtralForCausalLM", ReadMixtral},
    {"olmoe", "OlmoeForCausalLM", ReadOlmoe},
    {"qwen3_moe", "Qwen3MoeForCausalLM", ReadQwen3Moe},
    {"deepseek_v3", "DeepseekV3ForCausalLM", ReadDeepSeek},
    {"deepseek_v2", "DeepseekV2ForCausalLM", ReadDeepSeek},
};

const Family& FamilyOf(const Reader& read, const Json& json) {
  const std::string type = read.Text("model_type", "");
  std::string architecture;
  if (const auto found = json.find("architectures");
      found != json.end() && found->is_array() && !found->empty() && found->front().is_string()) {
    architecture = found->front().get<std::string>();
  }
  for (const Family& family : kFamilies) {
    if (type.empty() ? architecture == family.architecture : type == family.type) return family;
  }
  const Json named = type.empty() ? Json(architecture) : Json(type);
  Fail("model_type = {} is not one of mixtral, olmoe, qwen3_moe, deepseek_v3, deepseek_v2",
       Short(named));
}

}  // namespace

HuggingFaceModel ParseHuggingFaceModel(std::string_view text, const std::string& name) {
  try {
    if (text.size() > kMaxFileBytes) {
      Fail("{} bytes are more than a config.json has ({})", text.size(), kMaxFileBytes);
    }
    const Json json = ParseStrict(text);
    if (!json.is_object()) Fail("not a JSON object");
    const Reader read(json);
    const Family& family = FamilyOf(read, json);
    HuggingFaceModel model;
    model.family = family.type;
    model.max_positions = read.Whole("max_position_embeddings", 1, kMaxDimension, 2048);
    const std::string dtype = read.Text("torch_dtype", read.Text("dtype", "bfloat16"));
    model.weight_dtype = dtype == "float32" ? DType::kF32 : DType::kBF16;
    family.read(read, model);
    return model;
  } catch (const Error& error) {
    Fail("{}: {}", name, error.what());
  }
}

HuggingFaceModel ReadHuggingFaceModel(const std::string& path) {
  std::error_code error;
  if (std::filesystem::exists(path, error) && !std::filesystem::is_regular_file(path, error)) {
    Fail("{}: not a file", path);
  }
  if (const auto bytes = std::filesystem::file_size(path, error); !error && bytes > kMaxFileBytes) {
    Fail("{}: {} bytes are more than a config.json has ({})", path, bytes, kMaxFileBytes);
  }
  return ParseHuggingFaceModel(ReadFile(path), path);
}

}  // namespace terrace
