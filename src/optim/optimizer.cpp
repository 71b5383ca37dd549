#include "optim/optimizer.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "core/error.h"
#include "core/parallel.h"
#include "core/rng.h"
#include "optim/kernels/elementwise.h"
#include "optim/rules/rules.h"

namespace terrace {
namespace {

// Sets this use of the seed apart from others.
constexpr uint64_t kRoundingPurpose = 0x726f756e64;
// And the rounding of gradients from that of what they update.
constexpr uint64_t kGradientPurpose = 0x6772616469656e74;

// Tensors up to this size are updated one a thread: several tensors at a time need no barrier
// between the passes of a rule. Larger ones occupy all threads by themselves.
constexpr int64_t kLargeTensor = int64_t{1} << 22;

// The policy's rules, in the order of its entries. Throws Error naming policy and population.
std::vector<std::unique_ptr<Rule>> MakeRules(const Policy& policy) {
  std::vector<std::unique_ptr<Rule>> rules;
  std::array<bool, kPopulations> seen{};
  for (const PolicyEntry& entry : policy.entries) {
    bool& twice = seen[static_cast<int>(entry.population)];
    if (twice) {
      Fail("policy {}: population {} has two rules", policy.name, NameOf(entry.population));
    }
    twice = true;
    try {
      rules.push_back(MakeRule(entry.rule, entry.settings));
    } catch (const Error& error) {
      Fail("policy {}: population {}: {}", policy.name, NameOf(entry.population), error.what());
    }
  }
  return rules;
}

size_t EntryOf(const Policy& policy, const Parameter& parameter) {
  for (size_t entry = 0; entry < policy.entries.size(); ++entry) {
    if (policy.entries[entry].population == parameter.population) return entry;
  }
  Fail("policy {}: population {} has no rule; {} needs one", policy.name,
       NameOf(parameter.population), parameter.name);
}

// The rule's, with population and tensor in its errors.
std::vector<StateSpec> SpecsOf(const Policy& policy, const Rule& rule, const Parameter& parameter) {
  try {
    return rule.State(parameter);
  } catch (const Error& error) {
    Fail("policy {}: population {}: {} {}: {}", policy.name, NameOf(parameter.population),
         parameter.name, parameter.value.shape.ToString(), error.what());
  }
}

bool IsLarge(const Parameter& parameter) { return parameter.value.size() > kLargeTensor; }

}  // namespace

StateBytes StateBytesOf(const Policy& policy, const Parameters& parameters) {
  const std::vector<std::unique_ptr<Rule>> rules = MakeRules(policy);
  StateBytes bytes;
  for (const Parameter& parameter : parameters) {
    if (!parameter.trained()) continue;
    const size_t entry = EntryOf(policy, parameter);
    for (const StateSpec& spec : SpecsOf(policy, *rules[entry], parameter)) {
      if (spec.hidden_decay) continue;
      const int64_t size = spec.shape.size() * BytesOf(spec.dtype);
      bytes.total += size;
      bytes.by_population[static_cast<int>(parameter.population)] += size;
    }
  }
  return bytes;
}

Optimizer::Optimizer(const Policy& policy, const Parameters& parameters, Arena& arena,
                     uint64_t seed)
    : arena_(arena),
      dry_(arena.dry()),
      seed_(MixKeys(seed, kRoundingPurpose)),
      rules_(MakeRules(policy)),
      steps_(parameters.size()) {
  std::map<std::string, int64_t> groups;
  for (const Parameter& parameter : parameters) {
    TERRACE_CHECK(parameter.id == static_cast<int64_t>(served_.size()), "{}: id {} at position {}",
                  parameter.name, parameter.id, served_.size());
    if (!parameter.trained()) {
      served_.emplace_back();
      continue;
    }
    const size_t entry = EntryOf(policy, parameter);
    const std::vector<StateSpec> specs = SpecsOf(policy, *rules_[entry], parameter);
    int64_t& scratch_bytes = IsLarge(parameter) ? large_scratch_bytes_ : small_scratch_bytes_;
    scratch_bytes = std::max(
        scratch_bytes, Arena::Aligned(rules_[entry]->ScratchBytes(parameter, IsLarge(parameter))));
    const PolicyEntry& of_policy = policy.entries[entry];
    const std::string group = rules_[entry]->GroupOf(parameter);
    const int64_t next_group = static_cast<int64_t>(groups.size());
    served_.push_back(
        {.rule = rules_[entry].get(),
         .lr_multiplier = of_policy.lr_multiplier,
         .weight_decay = of_policy.weight_decay,
         .first_view = static_cast<int64_t>(views_.size()),
         .views = static_cast<int64_t>(specs.size()),
         .hidden_decay = specs.empty() ? std::nullopt : specs.back().hidden_decay,
         .group = group.empty() ? -1 : groups.try_emplace(group, next_group).first->second,
         .measured = {}});
    for (const StateSpec& spec : specs) {
      const std::string& name = names_.emplace_back(parameter.name + "." + spec.name);
      const Memory category = spec.hidden_decay ? Memory::kGradients : Memory::kOptimizer;
      const TensorView view = arena.Allocate(category, spec.dtype, spec.shape, name.c_str());
      if (!dry_) std::memset(view.data, 0, view.bytes());
      views_.push_back(view);
    }
    if (const int64_t floats = rules_[entry]->MeasuredFloats(parameter); floats > 0) {
      const std::string& name = names_.emplace_back(parameter.name + ".sums");
      served_.back().measured =
          arena.Allocate(Memory::kGradients, DType::kF32, {floats}, name.c_str());
    }
  }
}

std::byte* Optimizer::Scratch(int64_t bytes) {
  if (bytes == 0) return nullptr;
  return arena_.Allocate(Memory::kScratch, DType::kU8, {bytes}, "optimizer update").data;
}

std::span<const TensorView> Optimizer::StateOf(const Served& served) const {
  return std::span(views_).subspan(served.first_view, served.views);
}

TensorUpdate Optimizer::Prepare(const Update& update, float learning_rate) {
  const Parameter& parameter = *update.parameter;
  Served& served = served_[parameter.id];
  TERRACE_CHECK(served.rule != nullptr, "{}: is not trained", parameter.name);
  const bool measured = std::exchange(served.is_measured, false);
  const int64_t step = ++steps_[parameter.id];
  TERRACE_CHECK(update.gradient.shape == parameter.value.shape, "{}: gradient {} for weight {}",
                parameter.name, update.gradient.shape.ToString(), parameter.value.shape.ToString());
  return {.parameter = &parameter,
          .gradient = update.gradient,
          .state = StateOf(served),
          .context = {.learning_rate = learning_rate * served.lr_multiplier,
                      .weight_decay = served.weight_decay,
                      .gradient_scale = update.gradient_scale,
                      .tensor_step = step,
                      .rounding_key = MixKeys(seed_, parameter.id, step),
                      .measured = measured ? served.measured.as<float>() : nullptr}};
}

UpdateReport Optimizer::Run(const TensorUpdate& update) const {
  if (dry_) return {};
  return served_[update.parameter->id].rule->Apply(*update.parameter, update.gradient, update.state,
                                                   update.context);
}

double Optimizer::Measure(const Parameter& parameter, TensorView gradient) {
  Served& served = served_[parameter.id];
  served.is_measured = !served.measured.empty();
  return served.rule->Measure(parameter, gradient, StateOf(served), steps_[parameter.id] + 1,
                              served.is_measured ? served.measured.as<float>() : nullptr);
}

UpdateReport Optimizer::Apply(const Update& update, float learning_rate) {
  TERRACE_CHECK(served_[update.parameter->id].group < 0, "{} is not updated by itself",
                update.parameter->name);
  const Arena::Frame frame(arena_);
  const bool large = IsLarge(*update.parameter);
  TensorUpdate prepared = Prepare(update, learning_rate);
  prepared.context.scratch = Scratch(large ? large_scratch_bytes_ : small_scratch_bytes_);
  prepared.context.all_threads = large;
  return Run(prepared);
}

PopulationReports Optimizer::Apply(std::span<const Update> updates, float learning_rate) {
  // Whatever is due in this step: memory must not depend on which experts had tokens.
  const Arena::Frame frame(arena_);
  const int64_t threads = MaxThreads();
  std::byte* scratch = Scratch(std::max(large_scratch_bytes_, threads * small_scratch_bytes_));

  std::vector<UpdateReport> reports(updates.size());
  std::vector<TensorUpdate> small;
  std::vector<size_t> positions;  // of small ones in `updates`
  std::map<int64_t, std::vector<TensorUpdate>> groups;
  for (size_t i = 0; i < updates.size(); ++i) {
    TensorUpdate update = Prepare(updates[i], learning_rate);
    const int64_t group = served_[update.parameter->id].group;
    if (group >= 0) {
      groups[group].push_back(update);
    } else if (IsLarge(*update.parameter)) {
      update.context.scratch = scratch;
      reports[i] = Run(update);
    } else {
      small.push_back(update);
      positions.push_back(i);
    }
  }
  for (const auto& [number, group] : groups) {
    if (!dry_) served_[group.front().parameter->id].rule->ApplyTogether(group);
  }
  const int64_t count = static_cast<int64_t>(small.size());
  ParallelFor(count, 1, [&](int64_t i, int64_t) {
    StepContext& context = small[i].context;
    context.all_threads = false;
    if (!dry_) context.scratch = scratch + ThreadNumber() * small_scratch_bytes_;
    // Where threads keep pace, the one after next for this thread.
    if (i + threads < count) context.next_gradient = small[i + threads].gradient;
    reports[positions[i]] = Run(small[i]);
  });

  PopulationReports sums{};
  for (size_t i = 0; i < updates.size(); ++i) {
    sums[static_cast<int>(updates[i].parameter->population)] += reports[i];
  }
  return sums;
}

uint64_t Optimizer::GradientKey(const Parameter& parameter) const {
  return MixKeys(seed_, parameter.id, steps_[parameter.id], kGradientPurpose);
}

TensorView Optimizer::HiddenBuffer(const Parameter& parameter) const {
  const Served& served = served_[parameter.id];
  return served.hidden_decay ? StateOf(served).back() : TensorView{};
}

void Optimizer::DecayHiddenBuffer(const Parameter& parameter) {
  if (dry_) return;
  const TensorView buffer = HiddenBuffer(parameter);
  const uint64_t key = MixKeys(seed_, parameter.id, steps_[parameter.id]);
  ParallelFor(buffer.size(), 4 * kernels::kStripe, [&](int64_t begin, int64_t end) {
    kernels::Scale(buffer, *served_[parameter.id].hidden_decay, begin, end,
                   kernels::MomentumKey(key));
  });
}

float Optimizer::HiddenBufferScale(const Parameter& parameter) const {
  return 1 - served_[parameter.id].hidden_decay.value_or(0);
}

}  // namespace terrace
