// The rules by name.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "optim/rule.h"
#include "optim/settings.h"

namespace terrace {

std::vector<std::string_view> RuleNames();

// Throws Error for an unknown name, and for a setting that the rule does not have or cannot honour.
std::unique_ptr<Rule> MakeRule(std::string_view name, const Settings& settings);

// `settings` with the rule's own values for those left out. Throws as MakeRule.
Settings CompleteSettings(std::string_view rule, const Settings& settings);
// By key of these, what its value may be, where there is a list of it: "none, f32, bf16".
std::map<std::string, std::string> ChoicesOf(std::string_view rule, const Settings& settings);

}  // namespace terrace
