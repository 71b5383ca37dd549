#include "optim/policy.h"

#include <algorithm>

#include "core/atomic_file.h"
#include "core/toml_text.h"
#include "optim/rules/rules.h"

namespace terrace {
namespace {

bool IsEntryKey(std::string_view key) {
  const std::vector<std::string_view> keys = EntryKeys();
  return std::find(keys.begin(), keys.end(), key) != keys.end();
}

// Settings laid over an entry, which is not checked against its rule yet.
void Lay(PolicyEntry& entry, const Settings& over) {
  Settings own;
  for (const auto& [key, value] : over) {
    if (IsEntryKey(key)) own.emplace(key, value);
  }
  const std::string rule = entry.rule;
  SettingsReader("", own).Read(FieldsOf(entry));
  if (!rule.empty() && rule != entry.rule) entry.settings.clear();
  for (const auto& [key, value] : over) {
    if (!IsEntryKey(key)) entry.settings.insert_or_assign(key, value);
  }
}

PolicyEntry* EntryOf(Policy& policy, Population population) {
  for (PolicyEntry& entry : policy.entries) {
    if (entry.population == population) return &entry;
  }
  return nullptr;
}

// Drops what has no effect beside the entry's other settings, and refuses what of it is `own`.
void Settle(PolicyEntry& entry, const Settings& own, IdleSettings idle) {
  if (entry.rule.empty()) Fail("rule is missing");
  for (const auto& [key, needed] : IdleIn(entry.rule, entry.settings)) {
    if (idle == IdleSettings::kRefuse && own.contains(key)) {
      Fail("{}: {} has no effect without {}", entry.rule, key, needed);
    }
    entry.settings.erase(key);
  }
}

// A setting of [default] that no population has a use for.
void CheckDefault(std::string_view name, const PolicyTables& tables,
                  const std::vector<PolicyEntry>& entries) {
  for (const auto& [key, value] : tables.all) {
    if (IsEntryKey(key)) continue;
    const bool used = std::any_of(entries.begin(), entries.end(), [&](const PolicyEntry& entry) {
      return entry.settings.contains(key);
    });
    if (!used)
      Fail("policy {}: default: {} = {} has no effect in any population", name, key, TextOf(value));
  }
}

// "momentum f32, second_moment f32"
std::string StateText(const PolicyEntry& entry) {
  Parameter matrix;
  matrix.population = entry.population;
  matrix.value.shape = {2, 3};
  matrix.value.dtype = DType::kBF16;
  std::string text;
  for (const StateSpec& spec : MakeRule(entry.rule, entry.settings)->State(matrix)) {
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", spec.name, NameOf(spec.dtype));
  }
  return text.empty() ? "none" : text;
}

}  // namespace

Fields FieldsOf(PolicyEntry& entry) {
  return {
      {"rule", OneOf(entry.rule, RuleNames()), "of the update"},
      {"lr_multiplier", &entry.lr_multiplier, "of the learning rate", {0, 1e6}},
      {"weight_decay", &entry.weight_decay, "decoupled, times the learning rate", kWeightDecays}};
}

std::vector<std::string_view> EntryKeys() { return {"rule", "lr_multiplier", "weight_decay"}; }

Fields FieldsOf(PolicyTables& tables) {
  Fields fields = {{"base", OneOf(tables.base, PolicyNames()), "a ready-made policy to start from"},
                   {"learning_rate", &tables.learning_rate,
                    "peak, unless a run's configuration has one", kLearningRates},
                   {"default", &tables.all, "rule and settings of all populations"}};
  for (int i = 0; i < kPopulations; ++i) {
    fields.push_back({std::string(NameOf(Population(i))),
                      &tables.populations[static_cast<size_t>(i)], "over default"});
  }
  return fields;
}

PolicyTables ParsePolicy(std::string_view text, std::string_view path) {
  PolicyTables tables;
  WrittenSettings written;
  ApplyTable(FieldsOf(tables), ParseToml(text, path), written);
  CheckBounds(FieldsOf(tables), written);
  return tables;
}

Policy ResolvePolicy(std::string_view name, const PolicyTables& tables, IdleSettings idle) {
  Policy policy;
  if (!tables.base.empty()) policy = PolicyNamed(tables.base);
  policy.name = name;
  if (tables.learning_rate) policy.learning_rate = *tables.learning_rate;
  if (!tables.learning_rate && tables.base.empty()) {
    Fail("policy {}: learning_rate is missing", name);
  }
  std::vector<PolicyEntry> entries;
  for (int i = 0; i < kPopulations; ++i) {
    const Population population{static_cast<uint8_t>(i)};
    const Settings& own = tables.populations[static_cast<size_t>(i)];
    const PolicyEntry* base = EntryOf(policy, population);
    PolicyEntry entry = base != nullptr ? *base : PolicyEntry{.population = population};
    try {
      Lay(entry, tables.all);
      Lay(entry, own);
      // Nobody may need a population that has no rule.
      if (entry.rule.empty() && own.empty()) continue;
      Settle(entry, own, idle);
    } catch (const Error& error) {
      throw PolicyError(
          fmt::format("policy {}: population {}: {}", name, NameOf(population), error.what()),
          population);
    }
    entries.push_back(std::move(entry));
  }
  if (idle == IdleSettings::kRefuse) CheckDefault(name, tables, entries);
  policy.entries = std::move(entries);
  return policy;
}

void Override(Policy& policy, Population population, const Settings& over, IdleSettings idle) {
  PolicyEntry* entry = EntryOf(policy, population);
  if (entry == nullptr) entry = &policy.entries.emplace_back(PolicyEntry{population});
  try {
    Lay(*entry, over);
    Settle(*entry, over, idle);
  } catch (const Error& error) {
    throw PolicyError(error.what(), population);
  }
}

std::string ToToml(const Policy& policy) {
  std::string text = fmt::format("learning_rate = {}\n", policy.learning_rate);
  for (PolicyEntry entry : policy.entries) {
    text += fmt::format("\n[{}]  # state of a matrix: {}\n{}{}", NameOf(entry.population),
                        StateText(entry), ToToml(FieldsOf(entry)),
                        SettingsToToml(entry.rule, entry.settings));
  }
  return text;
}

PolicyTables ReadPolicyFile(const std::string& path) { return ParsePolicy(ReadFile(path), path); }

}  // namespace terrace
