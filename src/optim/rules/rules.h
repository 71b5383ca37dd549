// The rules by name.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "core/settings.h"
#include "optim/rule.h"

namespace terrace {

std::vector<std::string_view> RuleNames();

// Throws Error for an unknown name, and for a setting that the rule does not have, cannot honour,
// or that has no effect beside the others.
std::unique_ptr<Rule> MakeRule(std::string_view name, const Settings& settings);

// `settings` with the rule's own values for those left out. Throws as MakeRule.
Settings CompleteSettings(std::string_view rule, const Settings& settings);
// These as lines of TOML, each with its meaning.
std::string SettingsToToml(std::string_view rule, const Settings& settings);
// Those that have no effect beside the others: what they would need, by key. Throws for all else.
std::map<std::string, std::string> IdleIn(std::string_view rule, const Settings& settings);

}  // namespace terrace
