#include "optim/policy.h"

#include <algorithm>

#include "core/atomic_file.h"
#include "core/toml_text.h"
#include "model/nearest_name.h"
#include "optim/rules/rules.h"
#include "optim/settings_toml.h"

namespace terrace {
namespace {

// No bounds that anybody would want to cross.
constexpr double kLargestLearningRate = 1e3;
constexpr double kLargestMultiplier = 1e6;
constexpr double kLargestDecay = 1e3;

// The table that a top-level key names; null for none.
Settings* TableNamed(PolicyTables& tables, std::string_view key) {
  if (key == "default") return &tables.all;
  for (int i = 0; i < kPopulations; ++i) {
    if (key == NameOf(Population(i))) return &tables.populations[static_cast<size_t>(i)];
  }
  return nullptr;
}

[[noreturn]] void FailUnknown(std::string_view key) {
  std::vector<std::string_view> known = {"learning_rate", "base", "default"};
  for (int i = 0; i < kPopulations; ++i) known.push_back(NameOf(Population(i)));
  Fail("unknown key {}, did you mean {}?", key, NearestName(key, known));
}

void ParseKey(std::string_view key, const toml::node& node, PolicyTables& tables) {
  if (key == "learning_rate" || key == "base") {
    const Settings settings = {{std::string(key), SettingOf(key, node)}};
    SettingsReader reader("", settings);
    if (key == "base") {
      tables.base = reader.Name(key, "", PolicyNames());
    } else {
      tables.learning_rate = static_cast<float>(reader.Number(key, 0, 0, kLargestLearningRate));
    }
    return;
  }
  Settings* settings = TableNamed(tables, key);
  if (settings == nullptr) FailUnknown(key);
  const toml::table* table = node.as_table();
  if (table == nullptr) Fail("{} = {} has to be a table", key, TextOf(node));
  for (const auto& [name, value] : *table) {
    (*settings)[std::string(name.str())] = SettingOf(fmt::format("{}.{}", key, name.str()), value);
  }
}

// Settings laid over an entry, which is not checked against its rule yet.
void Lay(PolicyEntry& entry, const Settings& over) {
  SettingsReader reader("", over);
  const std::string_view rule = reader.Name("rule", entry.rule, RuleNames());
  if (!entry.rule.empty() && rule != entry.rule) entry.settings.clear();
  entry.rule = rule;
  entry.lr_multiplier = static_cast<float>(
      reader.Number("lr_multiplier", entry.lr_multiplier, 0, kLargestMultiplier));
  entry.weight_decay =
      static_cast<float>(reader.Number("weight_decay", entry.weight_decay, 0, kLargestDecay));
  for (const auto& [key, value] : over) {
    if (std::find(std::begin(kEntryKeys), std::end(kEntryKeys), key) == std::end(kEntryKeys)) {
      entry.settings.insert_or_assign(key, value);
    }
  }
}

PolicyEntry* EntryOf(Policy& policy, Population population) {
  for (PolicyEntry& entry : policy.entries) {
    if (entry.population == population) return &entry;
  }
  return nullptr;
}

void Check(const PolicyEntry& entry) {
  if (entry.rule.empty()) Fail("rule is missing");
  MakeRule(entry.rule, entry.settings);
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

SettingValue SettingOf(std::string_view key, const toml::node& node) {
  if (const auto* flag = node.as_boolean()) return flag->get();
  if (const auto* text = node.as_string()) return text->get();
  if (const auto* number = node.as_floating_point()) return number->get();
  if (const auto* number = node.as_integer()) return static_cast<double>(number->get());
  Fail("{} = {} has to be a number, text in quotes, true or false", key, TextOf(node));
}

PolicyTables ParsePolicy(std::string_view text, std::string_view path) {
  PolicyTables tables;
  for (const auto& [key, node] : ParseToml(text, path)) {
    try {
      ParseKey(key.str(), node, tables);
    } catch (const Error& error) {
      Fail("{}: {}", PlaceOf(key.source()), error.what());
    }
  }
  return tables;
}

Policy ResolvePolicy(std::string_view name, const PolicyTables& tables) {
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
      Check(entry);
    } catch (const Error& error) {
      throw PolicyError(
          fmt::format("policy {}: population {}: {}", name, NameOf(population), error.what()),
          population);
    }
    entries.push_back(std::move(entry));
  }
  policy.entries = std::move(entries);
  return policy;
}

void Override(Policy& policy, Population population, const Settings& over) {
  PolicyEntry* entry = EntryOf(policy, population);
  if (entry == nullptr) entry = &policy.entries.emplace_back(PolicyEntry{population});
  try {
    Lay(*entry, over);
    Check(*entry);
  } catch (const Error& error) {
    throw PolicyError(error.what(), population);
  }
}

std::string ToToml(const Policy& policy) {
  std::string text = fmt::format("learning_rate = {}\n", policy.learning_rate);
  for (const PolicyEntry& entry : policy.entries) {
    text += fmt::format(
        "\n[{}]  # state of a matrix: {}\nrule = {}\nlr_multiplier = {}\nweight_decay = {}\n",
        NameOf(entry.population), StateText(entry), QuotedToml(entry.rule), entry.lr_multiplier,
        entry.weight_decay);
    const auto choices = ChoicesOf(entry.rule, entry.settings);
    for (const auto& [key, value] : CompleteSettings(entry.rule, entry.settings)) {
      const auto choice = choices.find(key);
      text += fmt::format("{} = {}{}\n", key, TextOf(value),
                          choice == choices.end() ? "" : "  # of " + choice->second);
    }
  }
  return text;
}

PolicyTables ReadPolicyFile(const std::string& path) { return ParsePolicy(ReadFile(path), path); }

}  // namespace terrace
