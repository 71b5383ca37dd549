#include "optim/optimizer.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "core/parallel.h"
#include "core/rng.h"
#include "optim/rules/rules.h"

namespace terrace {
namespace {

// Sets this use of the seed apart from others.
constexpr uint64_t kRoundingPurpose = 0x726f756e64;

// Tensors up to this size are updated one a thread: several tensors at a time need no barrier
// between the passes of a rule. Larger ones occupy all threads by themselves.
constexpr int64_t kLargeTensor = int64_t{1} << 22;

int64_t AlignedBytes(int64_t bytes) {
  return (bytes + Arena::kAlignment - 1) / Arena::kAlignment * Arena::kAlignment;
}

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
std::vector<StateSpec> StateOf(const Policy& policy, const Rule& rule, const Parameter& parameter) {
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
    const size_t entry = EntryOf(policy, parameter);
    for (const StateSpec& spec : StateOf(policy, *rules[entry], parameter)) {
      if (spec.gradient_decay) continue;
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
  for (const Parameter& parameter : parameters) {
    TERRACE_CHECK(parameter.id == static_cast<int64_t>(served_.size()), "{}: id {} at position {}",
                  parameter.name, parameter.id, served_.size());
    const size_t entry = EntryOf(policy, parameter);
    const std::vector<StateSpec> specs = StateOf(policy, *rules_[entry], parameter);
    int64_t& scratch_bytes = IsLarge(parameter) ? large_scratch_bytes_ : small_scratch_bytes_;
    scratch_bytes = std::max(
        scratch_bytes, AlignedBytes(rules_[entry]->ScratchBytes(parameter, IsLarge(parameter))));
    const PolicyEntry& of_policy = policy.entries[entry];
    served_.push_back({rules_[entry].get(), of_policy.lr_multiplier, of_policy.weight_decay,
                       static_cast<int64_t>(views_.size()), static_cast<int64_t>(specs.size())});
    for (const StateSpec& spec : specs) {
      const std::string& name = names_.emplace_back(parameter.name + "." + spec.name);
      const Memory category = spec.gradient_decay ? Memory::kGradients : Memory::kOptimizer;
      const TensorView view = arena.Allocate(category, spec.dtype, spec.shape, name.c_str());
      if (!dry_) std::memset(view.data, 0, view.bytes());
      views_.push_back(view);
    }
  }
}

std::byte* Optimizer::Scratch(int64_t bytes) {
  if (bytes == 0) return nullptr;
  return arena_.Allocate(Memory::kScratch, DType::kU8, {bytes}, "optimizer update").data;
}

UpdateReport Optimizer::Apply(const Update& update, float learning_rate) {
  const Arena::Frame frame(arena_);
  const bool large = IsLarge(*update.parameter);
  std::byte* scratch = Scratch(large ? large_scratch_bytes_ : small_scratch_bytes_);
  return Apply(update, learning_rate, {scratch, large}, {});
}

UpdateReport Optimizer::Apply(const Update& update, float learning_rate, const Place& place,
                              TensorView next_gradient) {
  const Parameter& parameter = *update.parameter;
  const Served& served = served_[parameter.id];
  const int64_t step = ++steps_[parameter.id];
  if (dry_) return {};
  TERRACE_CHECK(update.gradient.shape == parameter.value.shape, "{}: gradient {} for weight {}",
                parameter.name, update.gradient.shape.ToString(), parameter.value.shape.ToString());
  const StepContext context{.learning_rate = learning_rate * served.lr_multiplier,
                            .weight_decay = served.weight_decay,
                            .gradient_scale = update.gradient_scale,
                            .tensor_step = step,
                            .rounding_key = MixKeys(seed_, parameter.id, step),
                            .next_gradient = next_gradient,
                            .scratch = place.scratch,
                            .all_threads = place.all_threads};
  return served.rule->Apply(parameter, update.gradient,
                            std::span(views_).subspan(served.first_view, served.views), context);
}

PopulationReports Optimizer::Apply(std::span<const Update> updates, float learning_rate) {
  // Whatever is due in this step: memory must not depend on which experts had tokens.
  const Arena::Frame frame(arena_);
  const int64_t threads = MaxThreads();
  std::byte* scratch = Scratch(std::max(large_scratch_bytes_, threads * small_scratch_bytes_));

  std::vector<UpdateReport> reports(updates.size());
  std::vector<int64_t> small;
  for (size_t i = 0; i < updates.size(); ++i) {
    if (IsLarge(*updates[i].parameter)) {
      reports[i] = Apply(updates[i], learning_rate, {scratch, true}, {});
    } else {
      small.push_back(static_cast<int64_t>(i));
    }
  }
  const int64_t count = static_cast<int64_t>(small.size());
  ParallelFor(count, 1, [&](int64_t i, int64_t) {
    // Where threads keep pace, the one after next for this thread.
    const int64_t next = i + threads;
    std::byte* own = dry_ ? nullptr : scratch + omp_get_thread_num() * small_scratch_bytes_;
    reports[small[i]] = Apply(updates[small[i]], learning_rate, {own, false},
                              next < count ? updates[small[next]].gradient : TensorView{});
  });

  PopulationReports sums{};
  for (size_t i = 0; i < updates.size(); ++i) {
    UpdateReport& sum = sums[static_cast<int>(updates[i].parameter->population)];
    sum.floored += reports[i].floored;
    sum.entries += reports[i].entries;
  }
  return sums;
}

}  // namespace terrace
