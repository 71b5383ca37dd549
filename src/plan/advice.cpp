#include "plan/advice.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "core/error.h"
#include "optim/rules/rules.h"
#include "plan/estimate.h"

namespace terrace {
namespace {

constexpr size_t kMaxSuggestions = 6;
// A dry run goes through each of them.
constexpr int64_t kMaxMicroBatches = 1024;
constexpr std::string_view kPolicies[] = {"skewadam", "adafactor"};

// One setting of a kind, or several that belong together.
struct Choice {
  std::vector<std::string> settings;
  double cost = 0;
  bool changes_numbers = false;
  std::function<void(RunConfig&)> apply = [](RunConfig&) {};
};
// The first leaves things as they are.
using Choices = std::vector<Choice>;

Choices Recomputation(const RunConfig& config) {
  Choices choices(1);
  if (!config.training.activation_checkpointing) {
    choices.push_back({{"training.activation_checkpointing=true"}, 0, false, [](RunConfig& c) {
                         c.training.activation_checkpointing = true;
                       }});
  }
  return choices;
}

// Whether gradients are rounded while they are summed: then it matters to more than the last digits
// in how many parts a step's sum comes, and when it is rounded.
bool RoundsSums(const RunConfig& config) {
  if (config.model.weight_dtype != DType::kBF16) return false;
  if (config.training.gradient_dtype == DType::kBF16) return true;
  const Policy policy = ResolvedRun(config).policy;
  return std::any_of(policy.entries.begin(), policy.entries.end(), [](const PolicyEntry& entry) {
    const auto momentum = entry.settings.find("momentum");
    return momentum != entry.settings.end() &&
           momentum->second == SettingValue(std::string("hidden_bf16"));
  });
}

Choices Sinks(const RunConfig& config) {
  Choices choices(1);
  const bool global = config.optimizer.clipping.kind == ClippingKind::kGlobalNorm;
  const bool release = config.training.sink == SinkKind::kRelease;
  if (!release) {
    choices.push_back({{"training.sink=release"}, 0, RoundsSums(config), [](RunConfig& c) {
                         c.training.sink = SinkKind::kRelease;
                       }});
  }
  if (!release && global) {
    choices.push_back(
        {{"training.sink=release", "optimizer.clipping=per_tensor"}, 25, true, [](RunConfig& c) {
           c.training.sink = SinkKind::kRelease;
           c.optimizer.clipping.kind = ClippingKind::kPerTensor;
         }});
  }
  return choices;
}

// As many tokens a step and an evaluation, fewer at a time. Routers are balanced over each
// micro-batch, and each draws its noise.
Choices MicroBatches(const RunConfig& config) {
  Choices choices(1);
  const RouterConfig& router = config.model.router;
  const bool routed =
      config.model.MoeLayers() > 0 && (router.aux_coefficient > 0 || router.noise_scale != 0);
  const bool changes_numbers = routed || RoundsSums(config);
  const TrainingConfig& training = config.training;
  for (int64_t parts = 2; training.micro_batch_size % parts == 0; parts *= 2) {
    const int64_t sequences = training.micro_batch_size / parts;
    const int64_t count = training.gradient_accumulation_steps * parts;
    if (count > kMaxMicroBatches) break;
    Choice choice{{fmt::format("training.micro_batch_size={}", sequences),
                   fmt::format("training.gradient_accumulation_steps={}", count)},
                  2 * std::log2(static_cast<double>(parts)),
                  changes_numbers,
                  {}};
    int64_t eval_batches = training.eval_batches;
    if (training.eval_interval > 0) {
      eval_batches *= parts;
      choice.settings.push_back(fmt::format("training.eval_batches={}", eval_batches));
    }
    choice.apply = [=](RunConfig& c) {
      c.training.micro_batch_size = sequences;
      c.training.gradient_accumulation_steps = count;
      c.training.eval_batches = eval_batches;
    };
    choices.push_back(std::move(choice));
  }
  return choices;
}

Choices GradientTypes(const RunConfig& config) {
  Choices choices(1);
  if (config.training.gradient_dtype == DType::kF32) {
    choices.push_back({{"training.gradient_dtype=bf16"}, 15, true, [](RunConfig& c) {
                         c.training.gradient_dtype = DType::kBF16;
                       }});
  }
  return choices;
}

Choices Precisions(const RunConfig& config) {
  Choices choices(1);
  if (config.model.weight_dtype == DType::kF32) {
    choices.push_back({{"training.precision=bf16"}, 60, true, [](RunConfig& c) {
                         c.model.weight_dtype = DType::kBF16;
                       }});
  }
  return choices;
}

// Momentum of bfloat16 in every population whose rule keeps one of float32.
Choices Momenta(const ResolvedRun& run, bool runnable) {
  const RunConfig& config = run.config;
  Choices choices(1);
  std::vector<Population> populations;
  for (const PolicyEntry& entry : run.policy.entries) {
    if (runnable && !config.model.Has(entry.population)) continue;
    const Settings settings = CompleteSettings(entry.rule, entry.settings);
    const auto momentum = settings.find("momentum");
    if (momentum == settings.end()) continue;
    const auto* name = std::get_if<std::string>(&momentum->second);
    if (name != nullptr && *name == "f32") populations.push_back(entry.population);
  }
  if (populations.empty()) return choices;
  Choice choice{{}, 15, true, {}};
  for (const Population population : populations) {
    Settings over = config.optimizer.populations[static_cast<size_t>(population)];
    over["momentum"] = std::string("bf16");
    choice.settings.push_back(
        fmt::format("optimizer.populations.{}={}", NameOf(population), TextOf(over)));
  }
  choice.apply = [populations](RunConfig& c) {
    for (const Population population : populations) {
      c.optimizer.populations[static_cast<size_t>(population)]["momentum"] = std::string("bf16");
    }
  };
  choices.push_back(std::move(choice));
  return choices;
}

Choices Policies(const RunConfig& config) {
  Choices choices(1);
  for (const std::string_view name : kPolicies) {
    if (config.optimizer.policy == name) continue;
    choices.push_back({{fmt::format("optimizer.policy={}", name)}, 100, true, [name](RunConfig& c) {
                         c.optimizer.policy = name;
                       }});
  }
  return choices;
}

struct Combination {
  std::vector<size_t> chosen;  // by kind
  double cost = 0;
};

class Search {
 public:
  Search(const ResolvedRun& run, bool runnable) : config_(run.config) {
    const RunConfig& config = run.config;
    // The policy comes first: what is laid over one does not fit another.
    kinds_ = {Policies(config),
              Sinks(config),
              GradientTypes(config),
              Precisions(config),
              Momenta(run, runnable),
              runnable ? Recomputation(config) : Choices(1),
              runnable ? MicroBatches(config) : Choices(1)};
    Combination combination;
    combination.chosen.resize(kinds_.size());
    Enumerate(combination, 0);
    for (Combination& c : combinations_) c.cost = CostOf(c);
    std::stable_sort(combinations_.begin(), combinations_.end(),
                     [](const Combination& a, const Combination& b) { return a.cost < b.cost; });
  }

  Advice Run(int64_t budget_bytes, const Planner& planner) {
    DropHopeless(budget_bytes, planner);
    for (const Combination& combination : combinations_) {
      const bool contained =
          std::any_of(found_.begin(), found_.end(),
                      [&](const Combination& less) { return Contains(combination, less); });
      if (contained) continue;
      if (found_.size() == kMaxSuggestions) break;
      const std::optional<Suggestion> suggestion = Plan(combination, planner);
      if (!suggestion || suggestion->peak_bytes > budget_bytes) continue;
      found_.push_back(combination);
      advice_.fitting.push_back(*suggestion);
    }
    return std::move(advice_);
  }

 private:
  void Enumerate(Combination& combination, size_t kind) {
    if (kind == kinds_.size()) {
      const bool changed = std::any_of(combination.chosen.begin(), combination.chosen.end(),
                                       [](size_t choice) { return choice != 0; });
      // Momentum is the present policy's.
      if (changed && (combination.chosen[kPolicy] == 0 || combination.chosen[kMomentum] == 0)) {
        combinations_.push_back(combination);
      }
      return;
    }
    for (size_t i = 0; i < kinds_[kind].size(); ++i) {
      combination.chosen[kind] = i;
      Enumerate(combination, kind + 1);
    }
    combination.chosen[kind] = 0;
  }

  // Whether `a` makes all the changes of `b`, or a stronger one of the kind that has an order.
  static bool Contains(const Combination& a, const Combination& b) {
    for (size_t i = 0; i < a.chosen.size(); ++i) {
      const bool same =
          i == kMicroBatches ? a.chosen[i] >= b.chosen[i] : a.chosen[i] == b.chosen[i];
      if (!same && b.chosen[i] != 0) return false;
    }
    return true;
  }

  // Nothing where a policy or a sink refuses.
  std::optional<Suggestion> Plan(const Combination& combination, const Planner& planner) {
    const auto [known, is_new] = plans_.try_emplace(combination.chosen);
    if (!is_new) return known->second;
    Suggestion suggestion = SuggestionOf(combination);
    try {
      const ResolvedRun changed(Apply(combination));
      suggestion.peak_bytes = planner(changed);
    } catch (const Error&) {
      return std::nullopt;
    }
    ++advice_.planned;
    if (!advice_.smallest || suggestion.peak_bytes < advice_.smallest->peak_bytes) {
      advice_.smallest = suggestion;
    }
    return known->second = suggestion;
  }

  // Few plans instead of hundreds that cannot fit.
  void DropHopeless(int64_t budget_bytes, const Planner& planner) {
    for (size_t policy = 0; policy < kinds_[kPolicy].size(); ++policy) {
      for (size_t sink = 0; sink < kinds_[kSink].size(); ++sink) {
        bool hope = false;
        for (size_t i = 0; i < 4 && !hope; ++i) {
          Combination most;
          for (const Choices& choices : kinds_) most.chosen.push_back(choices.size() - 1);
          most.chosen[kPolicy] = policy;
          most.chosen[kSink] = sink;
          if (policy != 0) most.chosen[kMomentum] = 0;
          if (i % 2 == 1) most.chosen[kRecomputation] = 0;
          if (i >= 2) most.chosen[kMicroBatches] = 0;
          const std::optional<Suggestion> suggestion = Plan(most, planner);
          hope = suggestion && suggestion->peak_bytes <= budget_bytes;
        }
        if (hope) continue;
        std::erase_if(combinations_, [&](const Combination& combination) {
          return combination.chosen[kPolicy] == policy && combination.chosen[kSink] == sink;
        });
      }
    }
  }

  RunConfig Apply(const Combination& combination) const {
    RunConfig changed = config_;
    for (size_t i = 0; i < kinds_.size(); ++i) kinds_[i][combination.chosen[i]].apply(changed);
    return changed;
  }

  double CostOf(const Combination& combination) const {
    double cost = 100 * (RelativeCompute(Apply(combination)) / RelativeCompute(config_) - 1);
    for (size_t i = 0; i < kinds_.size(); ++i) {
      cost += kinds_[i][combination.chosen[i]].cost + (combination.chosen[i] != 0 ? 1 : 0);
    }
    return cost;
  }

  Suggestion SuggestionOf(const Combination& combination) const {
    Suggestion suggestion;
    suggestion.relative_compute = RelativeCompute(Apply(combination)) / RelativeCompute(config_);
    for (size_t i = 0; i < kinds_.size(); ++i) {
      const Choice& choice = kinds_[i][combination.chosen[i]];
      suggestion.settings.insert(suggestion.settings.end(), choice.settings.begin(),
                                 choice.settings.end());
      suggestion.changes_numbers |= choice.changes_numbers;
    }
    return suggestion;
  }

  // Of kinds_.
  static constexpr size_t kPolicy = 0, kSink = 1, kMomentum = 4, kRecomputation = 5,
                          kMicroBatches = 6;

  const RunConfig& config_;
  std::vector<Choices> kinds_;
  std::vector<Combination> combinations_;
  std::vector<Combination> found_;
  std::map<std::vector<size_t>, std::optional<Suggestion>> plans_;
  Advice advice_;
};

}  // namespace

Advice Advise(const ResolvedRun& run, int64_t budget_bytes, const Planner& planner, bool runnable) {
  return Search(run, runnable).Run(budget_bytes, planner);
}

}  // namespace terrace
