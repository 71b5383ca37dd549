#include "train/config.h"

#include <algorithm>

#include "core/atomic_file.h"
#include "core/error.h"
#include "core/toml_text.h"
#include "model/presets.h"
#include "optim/rules/rules.h"

namespace terrace {
namespace {

constexpr double kUnbounded = std::numeric_limits<double>::infinity();

const Names<AttentionKind> kAttentionNames = {{"gqa", AttentionKind::kGqa}};
const Names<PositionKind> kPositionNames = {{"learned", PositionKind::kLearned},
                                            {"rope", PositionKind::kRope}};
const Names<NormKind> kNormNames = {{"layernorm", NormKind::kLayerNorm},
                                    {"rmsnorm", NormKind::kRmsNorm}};
const Names<FeedForwardKind> kFeedForwardNames = {{"dense", FeedForwardKind::kDense},
                                                  {"moe", FeedForwardKind::kMoe}};
const Names<RouterScore> kScoreNames = {{"softmax", RouterScore::kSoftmax}};
// The names that the kinds have themselves.
template <typename E>
Names<E> NamesOf(std::initializer_list<E> kinds) {
  Names<E> names;
  for (E kind : kinds) names.emplace_back(NameOf(kind), kind);
  return names;
}
const Names<SinkKind> kSinkNames = {{"accumulate", SinkKind::kAccumulate},
                                    {"release", SinkKind::kRelease}};
const Names<ScheduleKind> kScheduleNames = NamesOf(
    {ScheduleKind::kConstant, ScheduleKind::kLinear, ScheduleKind::kCosine, ScheduleKind::kWsd});
const Names<ClippingKind> kClippingNames =
    NamesOf({ClippingKind::kNone, ClippingKind::kGlobalNorm, ClippingKind::kPerTensor});
const Names<DType> kPrecisionNames = {{"f32", DType::kF32}, {"bf16", DType::kBF16}};

// Key prefixes of what makes a run the run it is: continued under other values it would be a
// different one.
constexpr std::string_view kFixedOnResume[] = {
    "model.",
    "data.folder",
    "training.micro_batch",  // micro_batches too
    "training.sequence_length",
    "training.seed",
    "training.precision",
    "training.gradient_dtype",
    "optimizer.policy",
};

void MakeAbsolute(std::string& path) {
  if (!path.empty()) path = std::filesystem::absolute(path).lexically_normal().string();
}

// Learning rates and weight decay may change in the course of a run; rules and their settings,
// which decide what state means, may not.
void CheckSameRules(const Policy& old_policy, const Policy& new_policy) {
  const auto text_of = [](const Policy& policy, Population population) -> std::string {
    for (const PolicyEntry& entry : policy.entries) {
      if (entry.population != population) continue;
      return fmt::format("{} {}", entry.rule, TextOf(CompleteSettings(entry.rule, entry.settings)));
    }
    return "no rule";
  };
  for (int i = 0; i < kPopulations; ++i) {
    const std::string old_text = text_of(old_policy, Population(i));
    const std::string new_text = text_of(new_policy, Population(i));
    if (old_text != new_text) {
      Fail("cannot resume with population {} under {}: the run has {}", NameOf(Population(i)),
           new_text, old_text);
    }
  }
}

// A run keeps the policy itself, whatever becomes of the file.
void TakePolicyFile(RunConfig& config) {
  std::string& policy = config.optimizer.policy;
  if (!IsPolicyFile(policy)) return;
  if (config.policy != PolicyTables{}) {
    Fail("optimizer.policy = {} and the tables of [policy] exclude each other", policy);
  }
  config.policy = ReadPolicyFile(policy);
  config.optimizer.policy_file = policy;
  policy = kOwnPolicy;
}

// Takes in the policy's file and checks the whole; errors of a policy name the tensors they
// concern.
void Complete(RunConfig& config) {
  try {
    TakePolicyFile(config);
    CheckConfig(config);
  } catch (const PolicyError& error) {
    throw Error(error.what() + TensorsOf(config.model, error.population()));
  }
}

}  // namespace

std::vector<Field> FieldsOf(RunConfig& config) {
  ModelConfig& model = config.model;
  RouterConfig& router = model.router;
  DataConfig& data = config.data;
  TrainingConfig& training = config.training;
  OptimizerConfig& optimizer = config.optimizer;
  std::vector<Field> fields = {
      // key, target, doc, minimum, maximum
      {"model.preset", &config.preset, "a model by name, which the other keys change"},
      {"model.vocab_size", &model.vocab_size, "tokens", 1, INT32_MAX},
      {"model.max_positions", &model.max_positions, "longest sequence", 1, INT32_MAX},
      {"model.width", &model.width, "of the residual stream", 1, INT32_MAX},
      {"model.layers", &model.layers, "blocks", 1, 100'000},
      {"model.heads", &model.heads, "query heads", 1, 1'000'000},
      {"model.kv_heads", &model.kv_heads, "key/value heads", 1, 1'000'000},
      {"model.head_width", &model.head_width, "0: width / heads", 0, INT32_MAX},
      {"model.attention", Choice(model.attention, kAttentionNames), "gqa"},
      {"model.positions", Choice(model.positions, kPositionNames), "learned or rope"},
      {"model.rope_theta", &model.rope_theta, "base of the rotation angles", 1, 1e12},
      {"model.norm", Choice(model.norm, kNormNames), "layernorm or rmsnorm"},
      {"model.norm_epsilon", &model.norm_epsilon, "added to the mean square", 0, 1},
      {"model.ffn", ChoiceList(model.ffn, kFeedForwardNames), "dense or moe, repeated over layers"},
      {"model.ffn_width", &model.ffn_width, "of dense layers", 1, INT32_MAX},
      {"model.experts", &model.experts, "per MoE layer", 0, 1'000'000},
      {"model.expert_width", &model.expert_width, "0: ffn_width", 0, INT32_MAX},
      {"model.tied_head", &model.tied_head, "the head is the embedding"},
      {"model.init_deviation", &model.init_deviation, "of matrices at the start", 0, 10},
      {"model.router.score", Choice(router.score, kScoreNames), "softmax"},
      {"model.router.top_k", &router.top_k, "experts per token", 1, 1'000'000},
      {"model.router.normalize_weights", &router.normalize_weights,
       "combine weights divided by their sum"},
      {"model.router.aux_coefficient", &router.aux_coefficient, "of the load-balancing loss", 0,
       kUnbounded},
      {"model.router.z_coefficient", &router.z_coefficient, "of the router z-loss", 0, kUnbounded},
      {"model.router.noise_scale", &router.noise_scale, "of N(0, 1) on logits in training", 0,
       kUnbounded},

      {"data.folder", &data.folder, "token shards"},
      {"data.tokenizer", &data.tokenizer, "empty: the one in the data folder"},

      {"training.steps", &training.steps, "optimizer steps", 1, 1e12},
      {"training.micro_batch", &training.micro_batch, "sequences at once", 1, 1'000'000},
      {"training.sequence_length", &training.sequence_length, "tokens per sequence", 1, INT32_MAX},
      {"training.micro_batches", &training.micro_batches, "accumulated per step", 1, 10'000},
      {"training.seed", &training.seed, "of weights, batches, noise and rounding", 0, 9e18},
      {"training.precision", Choice(model.weight_dtype, kPrecisionNames),
       "of weights: f32 or bf16"},
      {"training.sink", Choice(training.sink, kSinkNames),
       "accumulate: gradients of a whole step; release: one tensor's at a time"},
      {"training.gradient_dtype", Choice(training.gradient_dtype, kPrecisionNames),
       "of accumulated gradients: f32 or bf16"},
      {"training.activation_checkpointing", &training.activation_checkpointing,
       "keep block inputs only and recompute the rest"},
      {"training.eval_interval", &training.eval_interval, "steps; 0: never", 0, 1e12},
      {"training.eval_batches", &training.eval_batches, "of micro_batch sequences", 1, 1e9},
      {"training.checkpoint_interval", &training.checkpoint_interval, "steps; 0: at the end only",
       0, 1e12},
      {"training.keep", &training.keep, "checkpoints kept", 1, 1e9},
      {"training.threads", &training.threads, "0: as many as run at once", 0, 4096},

      {"optimizer.policy", &optimizer.policy,
       "which rule and state each population gets: a name, a .toml file, or own (see [policy])"},
      {"optimizer.learning_rate", &optimizer.learning_rate, "peak; the policy's own if left out", 0,
       1e3},
      {"optimizer.schedule", Choice(optimizer.schedule, kScheduleNames),
       "constant, linear, cosine or wsd"},
      {"optimizer.warmup_fraction", &optimizer.warmup_fraction, "of all steps", 0, 1},
      {"optimizer.decay_fraction", &optimizer.decay_fraction, "of all steps, at the end (wsd)", 0,
       1},
      {"optimizer.min_ratio", &optimizer.min_ratio, "of learning_rate, at the end", 0, 1},
      {"optimizer.clipping", Choice(optimizer.clipping.kind, kClippingNames),
       "none, global_norm or per_tensor"},
      {"optimizer.max_norm", &optimizer.clipping.max_norm, "of gradients, where clipping is on",
       1e-12, kUnbounded},
      {"optimizer.weight_decay", &optimizer.weight_decay, "over the policy's own", 0, 1e3},
  };
  const auto add_populations = [&](std::string_view table, auto& populations, const char* doc) {
    for (int i = 0; i < kPopulations; ++i) {
      fields.push_back({fmt::format("{}.{}", table, NameOf(Population(i))),
                        &populations[static_cast<size_t>(i)], doc});
    }
  };
  add_populations("optimizer.populations", optimizer.populations,
                  "over the policy, e.g. { weight_decay = 0 }");
  fields.push_back({"policy.base", &config.policy.base,
                    "of optimizer.policy = own: a ready-made policy to start from"});
  fields.push_back({"policy.learning_rate", &config.policy.learning_rate,
                    "peak, unless optimizer.learning_rate is set", 0, 1e3});
  fields.push_back({"policy.default", &config.policy.all, "rule and settings of all populations"});
  add_populations("policy", config.policy.populations, "over policy.default");
  return fields;
}

std::string TensorsOf(const ModelConfig& model, Population population) {
  try {
    model.Check();
  } catch (const Error&) {
    return {};  // an error at a time
  }
  for (const Parameter& parameter : ParametersOf(model)) {
    if (parameter.population == population) {
      return fmt::format(" (population of {})", parameter.name);
    }
  }
  return {};
}

RunConfig LoadConfig(const std::filesystem::path& path,
                     const std::vector<std::string>& assignments) {
  const std::string name = path.string();
  std::error_code absent;
  if (!std::filesystem::exists(path, absent) && IsPreset(name)) {
    Fail(
        "{}: a preset, but what is trained is a .toml file, with preset = \"{}\" under [model] and "
        "the folder of the data under [data]",
        name, name);
  }
  const toml::table table = ParseToml(ReadFile(path), path.string());
  const auto apply = [&](RunConfig& config) {
    const std::vector<Field> fields = FieldsOf(config);
    ApplyTable(fields, table);
    for (const std::string& assignment : assignments) ApplyAssignment(fields, assignment);
  };
  const auto fail = [&](const std::string& text) {
    Fail("{}{}: {}", path.string(), assignments.empty() ? "" : " with --set", text);
  };
  RunConfig config;
  apply(config);
  try {
    if (!config.preset.empty()) {
      RunConfig from_preset;
      from_preset.model = PresetNamed(config.preset);
      apply(from_preset);
      config = from_preset;
      config.preset.clear();
    }
    MakeAbsolute(config.data.folder);
    if (config.data.tokenizer != "bytes") MakeAbsolute(config.data.tokenizer);
    Complete(config);
    if (config.data.folder.empty()) Fail("data.folder is missing");
  } catch (const Error& error) {
    fail(error.what());
  }
  return config;
}

RunConfig ConfigOfModel(const ModelConfig& model, const std::vector<std::string>& assignments) {
  RunConfig config;
  config.model = model;
  config.training.sequence_length = std::min(config.training.sequence_length, model.max_positions);
  const std::vector<Field> fields = FieldsOf(config);
  for (const std::string& assignment : assignments) ApplyAssignment(fields, assignment);
  Complete(config);
  return config;
}

void CheckConfig(const RunConfig& config) {
  const TrainingConfig& training = config.training;
  config.model.Check();
  if (training.sequence_length > config.model.max_positions) {
    Fail("training.sequence_length = {} exceeds model.max_positions = {}", training.sequence_length,
         config.model.max_positions);
  }
  const double tokens = static_cast<double>(training.micro_batch) *
                        static_cast<double>(training.sequence_length) *
                        static_cast<double>(training.micro_batches);
  if (tokens > 1e11) {
    Fail("training.micro_batch x sequence_length x micro_batches = {} tokens a step", tokens);
  }
  PolicyOf(config);
  ScheduleOf(config).Check();
}

Policy PolicyOf(const RunConfig& config) {
  const OptimizerConfig& optimizer = config.optimizer;
  const bool own = optimizer.policy == kOwnPolicy;
  if (!own && config.policy != PolicyTables{}) {
    Fail("[policy] is not used by optimizer.policy = \"{}\" (but by \"{}\")", optimizer.policy,
         kOwnPolicy);
  }
  const std::string own_name(optimizer.policy_file.empty() ? kOwnPolicy : optimizer.policy_file);
  Policy policy = own ? ResolvePolicy(own_name, config.policy) : PolicyNamed(optimizer.policy);
  for (PolicyEntry& entry : policy.entries) {
    entry.weight_decay = optimizer.weight_decay.value_or(entry.weight_decay);
  }
  for (int i = 0; i < kPopulations; ++i) {
    const Settings& over = optimizer.populations[static_cast<size_t>(i)];
    if (over.empty()) continue;
    try {
      Override(policy, Population(i), over);
    } catch (const PolicyError& error) {
      throw PolicyError(
          fmt::format("optimizer.populations.{}: {}", NameOf(Population(i)), error.what()),
          Population(i));
    }
  }
  return policy;
}

Schedule ScheduleOf(const RunConfig& config) {
  const OptimizerConfig& optimizer = config.optimizer;
  const int64_t steps = config.training.steps;
  return {
      .kind = optimizer.schedule,
      .peak = optimizer.learning_rate ? *optimizer.learning_rate : PolicyOf(config).learning_rate,
      .steps = steps,
      .warmup_steps = StepsOfFraction(optimizer.warmup_fraction, steps),
      .decay_steps = StepsOfFraction(optimizer.decay_fraction, steps),
      .min_ratio = optimizer.min_ratio};
}

void CheckSameRun(RunConfig old_config, RunConfig new_config) {
  const std::vector<Field> old_fields = FieldsOf(old_config);
  const std::vector<Field> new_fields = FieldsOf(new_config);
  for (size_t i = 0; i < old_fields.size(); ++i) {
    const bool fixed =
        std::any_of(std::begin(kFixedOnResume), std::end(kFixedOnResume),
                    [&](std::string_view prefix) { return old_fields[i].key.starts_with(prefix); });
    const std::string old_value = ValueText(old_fields[i]);
    const std::string new_value = ValueText(new_fields[i]);
    if (fixed && old_value != new_value) {
      Fail("cannot resume with {} = {}: the run has {}", old_fields[i].key, new_value, old_value);
    }
  }
  CheckSameRules(PolicyOf(old_config), PolicyOf(new_config));
}

}  // namespace terrace
