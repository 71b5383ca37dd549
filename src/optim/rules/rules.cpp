#include "optim/rules/rules.h"

#include "core/error.h"
#include "core/nearest_name.h"
#include "optim/policy.h"

namespace terrace {

// A rule is one file of this folder and one line here.
#define TERRACE_RULES(RULE)        \
  RULE("skewadam", MakeSkewAdam)   \
  RULE("sage", MakeSage)           \
  RULE("sinkgd", MakeSinkGd)       \
  RULE("adamw", MakeAdamW)         \
  RULE("adamw8bit", MakeAdamW8Bit) \
  RULE("adafactor", MakeAdafactor) \
  RULE("lion", MakeLion)           \
  RULE("muon", MakeMuon)           \
  RULE("galore", MakeGalore)       \
  RULE("sgd", MakeSgd)

#define TERRACE_DECLARE(name, make) std::unique_ptr<Rule> make(SettingsReader& settings);
TERRACE_RULES(TERRACE_DECLARE)
#undef TERRACE_DECLARE

namespace {

struct NamedRule {
  std::string_view name;
  std::unique_ptr<Rule> (*make)(SettingsReader&);
};
#define TERRACE_ROW(name, make) {name, make},
constexpr NamedRule kRules[] = {TERRACE_RULES(TERRACE_ROW)};
#undef TERRACE_ROW

struct MadeRule {
  std::unique_ptr<Rule> rule;
  SettingsReader reader;
};

MadeRule MakeAnyhow(std::string_view name, const Settings& settings) {
  for (const NamedRule& rule : kRules) {
    if (rule.name != name) continue;
    SettingsReader reader(name, settings, EntryKeys());
    std::unique_ptr<Rule> made = rule.make(reader);
    return {std::move(made), std::move(reader)};
  }
  Fail("no rule is called {}, did you mean {}?", name, NearestName(name, RuleNames()));
}

MadeRule Make(std::string_view name, const Settings& settings) {
  MadeRule made = MakeAnyhow(name, settings);
  for (const auto& [key, needed] : made.reader.idle()) {
    Fail("{}: {} has no effect without {}", name, key, needed);
  }
  return made;
}

}  // namespace

std::vector<std::string_view> RuleNames() {
  std::vector<std::string_view> names;
  for (const NamedRule& rule : kRules) names.push_back(rule.name);
  return names;
}

std::unique_ptr<Rule> MakeRule(std::string_view name, const Settings& settings) {
  return Make(name, settings).rule;
}

Settings CompleteSettings(std::string_view rule, const Settings& settings) {
  return Make(rule, settings).reader.complete();
}

std::string SettingsToToml(std::string_view rule, const Settings& settings) {
  return Make(rule, settings).reader.toml();
}

std::map<std::string, std::string> IdleIn(std::string_view rule, const Settings& settings) {
  return MakeAnyhow(rule, settings).reader.idle();
}

}  // namespace terrace
