// A policy says which update rule, with which settings, serves each population. It is plain data:
// a new policy is a new table, not new code.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "model/parameter.h"
#include "optim/rule.h"

namespace terrace {

// What eps means for a floored second moment v: max(v, eps), as published, or max(v, eps * mean
// of v), which does not depend on the scale of the gradients.
enum class EpsMode : uint8_t { kAbsolute, kRelative };

// kFactored serves matrices by row and column means; tensors of other ranks stay exact.
enum class SecondMoment : uint8_t { kFactored, kExact };

// Every rule reads these and throws Error at the start for a value it cannot honour.
struct RuleSettings {
  float lr_multiplier = 1;  // of the schedule's learning rate
  float weight_decay = 0;   // decoupled; multiplied by the learning rate
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  EpsMode eps_mode = EpsMode::kAbsolute;
  bool momentum = true;
  SecondMoment second_moment = SecondMoment::kFactored;
  float rms_clip = 1;  // largest root mean square of an update before the learning rate; 0: none
};

struct PolicyEntry {
  Population population;
  std::string rule;  // a name of RuleNames()
  RuleSettings settings;
};

struct Policy {
  std::string name;
  float learning_rate;  // peak, where a configuration names none
  std::vector<PolicyEntry> entries;
};

// The ready-made policies: "skewadam", "adamw". Throws Error naming the known ones.
Policy PolicyNamed(std::string_view name);
std::vector<std::string_view> PolicyNames();

// A rule from its name. Throws Error for an unknown name or settings that it cannot honour.
std::unique_ptr<Rule> MakeRule(std::string_view name, const RuleSettings& settings);
std::vector<std::string_view> RuleNames();

}  // namespace terrace
