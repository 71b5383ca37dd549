// A policy says which update rule, with which settings, serves each population. It is plain data,
// written in TOML: a new policy is a new text, not new code.
//
//   learning_rate = 3e-4           # peak, where a run's configuration names none
//   base = "skewadam"              # optional: a ready-made policy to start from
//   [default]                      # for all populations
//   rule = "skewadam"
//   weight_decay = 0.05
//   [router]                       # for one
//   second_moment = "exact"
//
// A population's settings are those of the base, under those of [default], under its own. A table
// that names another rule drops the settings of the rule before it, but not lr_multiplier and
// weight_decay, which all rules share.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "core/settings.h"
#include "model/parameter.h"

namespace terrace {

// Of learning rates and of weight decay, wherever they are set. No bounds that anybody would want
// to cross.
inline constexpr Range kLearningRates = {1e-30, 1e3};
inline constexpr Range kWeightDecays = {0, 1e3};

struct PolicyEntry {
  Population population = {};
  std::string rule = {};    // a name of RuleNames()
  float lr_multiplier = 1;  // of the schedule's learning rate
  float weight_decay = 0;   // decoupled; multiplied by the learning rate
  Settings settings = {};   // of the rule
};
// Rule, multiplier and decay: what is set beside the rule's own settings.
Fields FieldsOf(PolicyEntry& entry);
std::vector<std::string_view> EntryKeys();

struct Policy {
  std::string name;
  float learning_rate = 0;  // peak, where a configuration names none
  std::vector<PolicyEntry> entries = {};
};

// A policy as written, before anything is laid over anything.
struct PolicyTables {
  std::string base;  // empty: none
  std::optional<float> learning_rate;
  Settings all;  // [default]
  std::array<Settings, kPopulations> populations;

  bool operator==(const PolicyTables&) const = default;
};
Fields FieldsOf(PolicyTables& tables);

// Throws Error on one line, with file, line and the nearest known key. `path` is for errors.
PolicyTables ParsePolicy(std::string_view text, std::string_view path);

// An error of one population's entry. What it says names policy, population and setting; which
// tensors it concerns is known to whoever knows the model.
class PolicyError : public Error {
 public:
  PolicyError(const std::string& text, Population population)
      : Error(text), population_(population) {}
  Population population() const { return population_; }

 private:
  Population population_;
};

// What becomes of a population's settings that have no effect beside its others. Those that it
// takes from [default] or from the base are dropped in any case: they are meant for other
// populations.
enum class IdleSettings : uint8_t { kRefuse, kDrop };

// Throws Error, for whatever a rule cannot honour PolicyError.
Policy ResolvePolicy(std::string_view name, const PolicyTables& tables,
                     IdleSettings idle = IdleSettings::kRefuse);

// Lays `over`, keys of PolicyEntry and of its rule, over a population's entry. Throws PolicyError
// naming the setting.
void Override(Policy& policy, Population population, const Settings& over,
              IdleSettings idle = IdleSettings::kRefuse);

// The resolved policy as TOML, with all settings and the state of a matrix by population. Reads
// back as the same policy.
std::string ToToml(const Policy& policy);

// --- Ready-made policies (policies.cpp) ----------------------------------------------------------
struct ReadyPolicy {
  std::string_view name;
  std::string_view summary;  // one line
  std::string_view text;     // TOML
};
const std::vector<ReadyPolicy>& ReadyPolicies();

std::vector<std::string_view> PolicyNames();
// As written, or resolved. Each throws Error naming the known ones.
PolicyTables PolicyTablesNamed(std::string_view name);
Policy PolicyNamed(std::string_view name);

// Names of files end so; anything else is a ready-made policy.
inline bool IsPolicyFile(std::string_view name) { return name.ends_with(".toml"); }
// Throws Error when the file cannot be read.
PolicyTables ReadPolicyFile(const std::string& path);

}  // namespace terrace
