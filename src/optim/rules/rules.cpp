// The rules by name. A rule is one file of this folder and one line here.
#include <fmt/ranges.h>

#include "optim/policy.h"

namespace terrace {

#define TERRACE_RULES(RULE)      \
  RULE("skewadam", MakeSkewAdam) \
  RULE("adamw", MakeAdamW)

#define TERRACE_DECLARE(name, make) std::unique_ptr<Rule> make(const RuleSettings& settings);
TERRACE_RULES(TERRACE_DECLARE)
#undef TERRACE_DECLARE

namespace {

struct NamedRule {
  std::string_view name;
  std::unique_ptr<Rule> (*make)(const RuleSettings&);
};
#define TERRACE_ROW(name, make) {name, make},
constexpr NamedRule kRules[] = {TERRACE_RULES(TERRACE_ROW)};
#undef TERRACE_ROW

}  // namespace

std::vector<std::string_view> RuleNames() {
  std::vector<std::string_view> names;
  for (const NamedRule& rule : kRules) names.push_back(rule.name);
  return names;
}

std::unique_ptr<Rule> MakeRule(std::string_view name, const RuleSettings& settings) {
  for (const NamedRule& rule : kRules) {
    if (rule.name == name) return rule.make(settings);
  }
  Fail("policy: no rule is called \"{}\"; known are {}", name, fmt::join(RuleNames(), ", "));
}

}  // namespace terrace
