#include "train/config.h"

#include <algorithm>

#include "core/atomic_file.h"
#include "core/error.h"
#include "core/toml_text.h"
#include "data/quoted.h"
#include "data/utf8.h"
#include "model/presets.h"
#include "optim/rules/rules.h"

namespace terrace {
namespace {

constexpr double kUnbounded = std::numeric_limits<double>::infinity();
constexpr double kMaxStepTokens = 1e11;

// The names that the kinds have themselves.
template <typename E>
Names<E> NamesOf(std::initializer_list<E> kinds) {
  Names<E> names;
  for (E kind : kinds) names.emplace_back(NameOf(kind), kind);
  return names;
}
const Names<SinkKind> kSinkNames = NamesOf({SinkKind::kAccumulate, SinkKind::kRelease});
const Names<ScheduleKind> kScheduleNames = NamesOf(
    {ScheduleKind::kConstant, ScheduleKind::kLinear, ScheduleKind::kCosine, ScheduleKind::kWsd});
const Names<ClippingKind> kClippingNames =
    NamesOf({ClippingKind::kNone, ClippingKind::kGlobalNorm, ClippingKind::kPerTensor});
const Names<DType> kPrecisionNames = {{"f32", DType::kF32}, {"bf16", DType::kBF16}};

// Names of earlier releases, accepted for one more.
constexpr RenamedSetting kRenamed[] = {
    {"training.micro_batch", "training.micro_batch_size"},
    {"training.micro_batches", "training.gradient_accumulation_steps"},
    {"model.init_deviation", "model.init_std"},
};

// Key prefixes of what makes a run the run it is: continued under other values it would be a
// different one.
constexpr std::string_view kFixedOnResume[] = {
    "model.",
    "training.micro_batch_size",
    "training.gradient_accumulation_steps",
    "training.sequence_length",
    "training.seed",
    "training.precision",
    "training.gradient_dtype",
    "optimizer.policy",
};

// The first and the last line of a config.toml that a run keeps: one that was cut off lacks the
// last.
constexpr std::string_view kFirstLine =
    "# The configuration of a run. The last line says that nothing is missing.\n";
constexpr std::string_view kLastLine = "# complete\n";
// Earlier releases wrote every setting and no such lines. No file by hand has all of these.
constexpr std::string_view kEverySavedConfigHas[] = {
    "model.attention",     "model.router.score", "data.folder",
    "training.steps",      "training.threads",   "optimizer.policy",
    "optimizer.min_ratio", "optimizer.max_norm", "policy.base"};
// By which the last line of such a file begins: the last population's setting.
constexpr std::string_view kLastLinesBefore[] = {"norm = ", "# norm = "};

// Below a folder whose name is no UTF-8 a path stays relative, since TOML can hold nothing else.
void MakeAbsolute(std::string_view key, std::string& path) {
  if (path.empty()) return;
  const auto is_utf8 = [](const std::string& text) {
    return ValidUtf8Bytes(text) == std::ssize(text);
  };
  if (!is_utf8(path)) {
    Fail(
        "{} = {}: is not UTF-8, as a configuration has to be; give the folder another name, or "
        "reach it through a link",
        key, Quoted(path));
  }
  const std::string absolute = std::filesystem::absolute(path).lexically_normal().string();
  if (is_utf8(absolute)) path = absolute;
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

// With one expert a token whose weight is divided by itself, no loss depends on the router. A run
// that has been started so goes on as it is.
void CheckRouterLearns(const ModelConfig& model) {
  if (!model.Has(Population::kRouter) || model.experts == 1) return;
  if (model.router.top_k != 1 || !model.router.normalize_weights) return;
  Fail(
      "model.router.top_k = 1 with normalized weights gives the router no gradient of the loss: "
      "set "
      "model.router.normalize_weights = false");
}

// Takes in the policy's file and checks the whole; errors of a policy name the tensors they
// concern.
void Complete(RunConfig& config, const WrittenSettings& written) {
  try {
    TakePolicyFile(config);
    CheckBounds(FieldsOf(config), written);
    if (!config.saved) CheckRouterLearns(config.model);
    ResolvedRun{config};
  } catch (const PolicyError& error) {
    throw Error(error.what() + TensorsOf(config.model, error.population()));
  }
}

// Keys that are written in `config`, but have no effect there.
std::vector<std::string> IdleKeys(RunConfig& config, const WrittenSettings& written) {
  std::vector<std::string> keys;
  for (const Field& field : FieldsOf(config)) {
    if (written.places.contains(field.key) && !field.HasEffect()) keys.push_back(field.key);
  }
  return keys;
}

// A --set may take the effect from what a file says, as it may take its value. `in_file` are the
// idle keys of the file as it is.
void CheckEffects(RunConfig& config, const WrittenSettings& written,
                  const std::vector<std::string>& in_file) {
  for (const Field& field : FieldsOf(config)) {
    const auto found = written.places.find(field.key);
    if (found == written.places.end() || field.HasEffect()) continue;
    const auto& [place, assigned] = found->second;
    if (assigned || std::find(in_file.begin(), in_file.end(), field.key) != in_file.end()) {
      Fail("{}: {} has no effect without {}", place, field.key, field.needs.what);
    }
  }
}

struct Read {
  RunConfig config;
  WrittenSettings written;
};
Read ReadTable(const toml::table& table, const std::vector<std::string>& assignments) {
  const auto apply = [&](RunConfig& config) {
    WrittenSettings written;
    const Fields fields = FieldsOf(config);
    ApplyTable(fields, table, written, kRenamed);
    for (const std::string& assignment : assignments) {
      ApplyAssignment(fields, assignment, written, kRenamed);
    }
    return written;
  };
  Read read;
  read.written = apply(read.config);
  if (!read.config.preset.empty()) {
    RunConfig from_preset;
    from_preset.model = PresetNamed(read.config.preset);
    apply(from_preset);
    read.config = from_preset;
    read.config.preset.clear();
  }
  return read;
}

bool HasEverything(const toml::table& table) {
  return std::all_of(std::begin(kEverySavedConfigHas), std::end(kEverySavedConfigHas),
                     [&](std::string_view key) { return bool(table.at_path(key)); });
}

// Of a config.toml by an earlier release.
void CheckWhole(const toml::table& table, std::string_view text, const std::string& name) {
  while (text.ends_with('\n')) text.remove_suffix(1);
  const std::string_view last = text.substr(text.rfind('\n') + 1);
  const bool ends_well =
      std::any_of(std::begin(kLastLinesBefore), std::end(kLastLinesBefore),
                  [&](std::string_view begin) { return last.starts_with(begin); });
  if (!HasEverything(table) || !ends_well) Fail("{}: is no whole configuration of a run", name);
}

RunConfig ReadConfig(const std::filesystem::path& path, const std::vector<std::string>& assignments,
                     bool kept_by_run) {
  const std::string name = path.string();
  const std::string text = ReadFile(path);
  const bool marked = text.starts_with(kFirstLine);
  if (marked && !text.ends_with(kLastLine)) Fail("{}: is cut off: its last line is missing", name);
  const toml::table table = ParseToml(text, name);
  if (kept_by_run && !marked) CheckWhole(table, text, name);
  const bool saved = kept_by_run || marked || HasEverything(table);

  const auto fail = [&](const std::string& error) {
    // Errors that have a place begin with it.
    if (error.starts_with(name + ":") || error.starts_with("--set ")) throw Error(error);
    Fail("{}{}: {}", name, assignments.empty() ? "" : " with --set", error);
  };
  try {
    Read file = ReadTable(table, {});
    const std::vector<std::string> idle =
        saved ? std::vector<std::string>{} : IdleKeys(file.config, file.written);
    auto [config, written] = ReadTable(table, assignments);
    config.saved = saved;
    config.saved_earlier = saved && !marked;
    if (!saved) config.notices = written.notices;
    MakeAbsolute("data.folder", config.data.folder);
    if (config.data.tokenizer != "bytes") MakeAbsolute("data.tokenizer", config.data.tokenizer);
    Complete(config, written);
    CheckEffects(config, written, idle);
    if (config.data.folder.empty()) Fail("data.folder is missing");
    return config;
  } catch (const Error& error) {
    fail(error.what());
    throw;
  }
}

bool MayHave(const RunConfig& config, Population population) {
  return config.stand_in || config.model.Has(population);
}

// The policy with what the configuration lays over it.
Policy PolicyOf(const RunConfig& config) {
  const OptimizerConfig& optimizer = config.optimizer;
  const bool own = optimizer.policy == kOwnPolicy;
  const IdleSettings idle = config.saved ? IdleSettings::kDrop : IdleSettings::kRefuse;
  const std::string own_name(optimizer.policy_file.empty() ? kOwnPolicy : optimizer.policy_file);
  Policy policy =
      own ? ResolvePolicy(own_name, config.policy, idle) : PolicyNamed(optimizer.policy);
  for (PolicyEntry& entry : policy.entries) {
    entry.weight_decay = optimizer.weight_decay.value_or(entry.weight_decay);
  }
  for (int i = 0; i < kPopulations; ++i) {
    const Settings& over = optimizer.populations[static_cast<size_t>(i)];
    if (over.empty() || !MayHave(config, Population(i))) continue;
    try {
      Override(policy, Population(i), over, idle);
    } catch (const PolicyError& error) {
      throw PolicyError(
          fmt::format("optimizer.populations.{}: {}", NameOf(Population(i)), error.what()),
          Population(i));
    }
  }
  return policy;
}

Schedule ScheduleOf(const RunConfig& config, const Policy& policy) {
  const OptimizerConfig& optimizer = config.optimizer;
  const int64_t steps = config.training.steps;
  const bool decays = optimizer.schedule == ScheduleKind::kWsd;
  if (decays && optimizer.warmup_fraction + optimizer.decay_fraction > 1) {
    Fail(
        "optimizer.warmup_fraction = {} and optimizer.decay_fraction = {} are more than 1 together",
        optimizer.warmup_fraction, optimizer.decay_fraction);
  }
  Schedule schedule = {
      .kind = optimizer.schedule,
      .peak = optimizer.learning_rate.value_or(policy.learning_rate),
      .steps = steps,
      .warmup_steps = StepsOfFraction(optimizer.warmup_fraction, steps),
      .min_ratio = optimizer.schedule == ScheduleKind::kConstant ? 1 : optimizer.min_ratio};
  // Two fractions that make a whole may both be rounded up.
  if (decays) {
    schedule.decay_steps =
        std::min(StepsOfFraction(optimizer.decay_fraction, steps), steps - schedule.warmup_steps);
  }
  schedule.Check();
  return schedule;
}

void CheckTraining(const RunConfig& config) {
  const TrainingConfig& training = config.training;
  if (training.sequence_length > config.model.max_positions) {
    Fail("training.sequence_length = {} exceeds model.max_positions = {}", training.sequence_length,
         config.model.max_positions);
  }
  const double tokens = static_cast<double>(training.micro_batch_size) *
                        static_cast<double>(training.sequence_length) *
                        static_cast<double>(training.gradient_accumulation_steps);
  if (tokens > kMaxStepTokens) {
    Fail(
        "training.micro_batch_size x sequence_length x gradient_accumulation_steps = {} tokens a "
        "step are more than {}",
        tokens, kMaxStepTokens);
  }
}

}  // namespace

std::string_view NameOf(SinkKind kind) {
  return kind == SinkKind::kRelease ? "release" : "accumulate";
}

Fields FieldsOf(RunConfig& config) {
  RunConfig* const run = &config;
  DataConfig& data = config.data;
  TrainingConfig& training = config.training;
  OptimizerConfig& optimizer = config.optimizer;
  const Needs evaluation = {[run] { return run->training.eval_interval > 0; },
                            "training.eval_interval above 0"};
  const Needs bf16_weights = {[run] { return run->model.weight_dtype == DType::kBF16; },
                              "training.precision = \"bf16\""};
  const Needs wsd = {[run] { return run->optimizer.schedule == ScheduleKind::kWsd; },
                     "optimizer.schedule = \"wsd\""};
  const Needs decay = {[run] {
                         const ScheduleKind kind = run->optimizer.schedule;
                         return kind == ScheduleKind::kWsd ? run->optimizer.decay_fraction > 0
                                                           : kind != ScheduleKind::kConstant;
                       },
                       "a schedule that decays (linear, cosine, or wsd with a decay_fraction)"};
  const Needs clipping = {[run] { return run->optimizer.clipping.kind != ClippingKind::kNone; },
                          "optimizer.clipping = \"global_norm\" or \"per_tensor\""};
  const Needs own = {
      [run] { return run->optimizer.policy == kOwnPolicy || IsPolicyFile(run->optimizer.policy); },
      "optimizer.policy = \"own\""};

  Fields fields;
  const auto add = [&](Fields more) {
    for (Field& field : more) fields.push_back(std::move(field));
  };
  add({{"model.preset", &config.preset, "a model by name, which the other keys change"}});
  add(FieldsOf(config.model));
  add({
      {"data.folder", &data.folder, "token shards"},
      {"data.tokenizer", &data.tokenizer, "empty: the one in the data folder"},

      {"training.steps", &training.steps, "optimizer steps", {1, 1e12}},
      {"training.micro_batch_size", &training.micro_batch_size, "sequences at once", {1, 1e6}},
      {"training.sequence_length",
       &training.sequence_length,
       "tokens per sequence",
       {1, INT32_MAX}},
      {"training.gradient_accumulation_steps",
       &training.gradient_accumulation_steps,
       "micro-batches per step",
       {1, 10'000}},
      {"training.seed", &training.seed, "of weights, batches, noise and rounding", {0, 9e18}},
      {"training.precision", Choice(config.model.weight_dtype, kPrecisionNames), "of weights"},
      {"training.sink", Choice(training.sink, kSinkNames),
       "gradients of a whole step, or one tensor's at a time"},
      {"training.gradient_dtype",
       Choice(training.gradient_dtype, kPrecisionNames),
       "of accumulated gradients",
       {},
       bf16_weights},
      {"training.activation_checkpointing", &training.activation_checkpointing,
       "keep block inputs only and recompute the rest"},
      {"training.eval_interval", &training.eval_interval, "steps; 0: never", {0, 1e12}},
      {"training.eval_batches",
       &training.eval_batches,
       "of micro_batch_size sequences",
       {1, 1e9},
       evaluation},
      {"training.checkpoint_interval",
       &training.checkpoint_interval,
       "steps; 0: at the end only",
       {0, 1e12}},
      {"training.keep", &training.keep, "checkpoints kept", {1, 1e9}},
      {"training.threads", &training.threads, "0: as many as run at once", {0, 4096}},

      {"optimizer.policy", &optimizer.policy,
       "which rule and state each population gets: a name, a .toml file, or own (see [policy])"},
      {"optimizer.learning_rate", &optimizer.learning_rate, "peak; the policy's own if left out",
       kLearningRates},
      {"optimizer.schedule", Choice(optimizer.schedule, kScheduleNames), "of the learning rate"},
      {"optimizer.warmup_fraction", &optimizer.warmup_fraction, "of all steps", {0, 1}},
      {"optimizer.decay_fraction",
       &optimizer.decay_fraction,
       "of all steps, at the end",
       {0, 1},
       wsd},
      {"optimizer.min_ratio", &optimizer.min_ratio, "of learning_rate, at the end", {0, 1}, decay},
      {"optimizer.clipping", Choice(optimizer.clipping.kind, kClippingNames), "of gradients"},
      {"optimizer.max_norm",
       &optimizer.clipping.max_norm,
       "of gradients",
       {1e-12, kUnbounded},
       clipping},
      {"optimizer.weight_decay", &optimizer.weight_decay, "over the policy's own", kWeightDecays},
  });
  for (int i = 0; i < kPopulations; ++i) {
    const Population population{static_cast<uint8_t>(i)};
    add({{fmt::format("optimizer.populations.{}", NameOf(population)),
          &optimizer.populations[static_cast<size_t>(i)],
          "over the policy, e.g. { weight_decay = 0 }",
          {},
          {[run, population] { return MayHave(*run, population); },
           "parameters of this population in the model"}}});
  }
  Fields policy = WithPrefix("policy.", FieldsOf(config.policy));
  for (Field& field : policy) field.needs = own;
  add(std::move(policy));
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
  return ReadConfig(path, assignments, false);
}

RunConfig LoadSavedConfig(const std::filesystem::path& path,
                          const std::vector<std::string>& assignments) {
  return ReadConfig(path, assignments, true);
}

std::string SavedConfigText(RunConfig config) {
  return fmt::format("{}{}{}", kFirstLine, ToToml(FieldsOf(config)), kLastLine);
}

RunConfig ConfigOfModel(const ModelConfig& model, const std::vector<std::string>& assignments,
                        bool stand_in) {
  RunConfig config;
  config.stand_in = stand_in;
  config.model = model;
  config.training.sequence_length = std::min(config.training.sequence_length, model.max_positions);
  WrittenSettings written;
  const Fields fields = FieldsOf(config);
  for (const std::string& assignment : assignments) {
    ApplyAssignment(fields, assignment, written, kRenamed);
  }
  config.notices = written.notices;
  Complete(config, written);
  CheckEffects(config, written, {});
  return config;
}

ResolvedRun::ResolvedRun(RunConfig config_of_run) : config(std::move(config_of_run)) {
  config.model.Check();
  CheckBounds(FieldsOf(config));
  CheckTraining(config);
  policy = PolicyOf(config);
  schedule = ScheduleOf(config, policy);
}

void CheckSameRun(ResolvedRun old_run, ResolvedRun new_run) {
  const Fields old_fields = FieldsOf(old_run.config);
  const Fields new_fields = FieldsOf(new_run.config);
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
  CheckSameRules(old_run.policy, new_run.policy);
}

}  // namespace terrace
