#include "train/fields.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <sstream>

#include "core/toml_text.h"
#include "model/nearest_name.h"
#include "optim/settings_toml.h"

namespace terrace {
namespace {

template <typename... Functions>
struct Overloaded : Functions... {
  using Functions::operator()...;
};

[[noreturn]] void FailType(const Field& field, const toml::node& node, std::string_view wanted) {
  Fail("{} = {} has to be {}", field.key, TextOf(node), wanted);
}

void CheckBounds(const Field& field, double value) {
  if (value >= field.minimum && value <= field.maximum) return;
  if (std::isinf(field.maximum)) Fail("{} = {} is below {}", field.key, value, field.minimum);
  Fail("{} = {} is not within {} .. {}", field.key, value, field.minimum, field.maximum);
}

float FloatOf(const Field& field, const toml::node& node) {
  const std::optional<double> value = node.value<double>();
  if (!node.is_number() || !value.has_value() || !std::isfinite(*value)) {
    FailType(field, node, "a number");
  }
  CheckBounds(field, *value);
  return static_cast<float>(*value);
}

size_t IndexOf(const Field& field, const ChoiceTarget& choice, const toml::node& node) {
  const std::optional<std::string_view> name = node.value<std::string_view>();
  const auto found = std::find(choice.names.begin(), choice.names.end(), name.value_or(""));
  if (!name.has_value() || found == choice.names.end()) {
    FailType(field, node, fmt::format("one of {}", fmt::join(choice.names, ", ")));
  }
  return static_cast<size_t>(found - choice.names.begin());
}

void SetChoice(const Field& field, const ChoiceTarget& choice, const toml::node& node) {
  std::vector<size_t> indices;
  if (const toml::array* array = node.as_array(); array != nullptr && choice.list) {
    for (const toml::node& item : *array) indices.push_back(IndexOf(field, choice, item));
    if (indices.empty()) FailType(field, node, "a list of at least one name");
  } else {
    indices.push_back(IndexOf(field, choice, node));
  }
  choice.set(indices);
}

// `name` is empty for all settings at once, as a table.
void SetSetting(const Field& field, std::string_view name, const toml::node& node,
                Settings& settings) {
  if (!name.empty()) {
    settings[std::string(name)] = SettingOf(fmt::format("{}.{}", field.key, name), node);
    return;
  }
  if (!node.is_table()) FailType(field, node, "a table");
  for (const auto& [key, value] : *node.as_table()) SetSetting(field, key.str(), value, settings);
}

// `key` is the field's, or that of one of its settings.
void SetField(const Field& field, std::string_view key, const toml::node& node) {
  std::visit(Overloaded{
                 [&](int64_t* target) {
                   if (!node.is_integer()) FailType(field, node, "a whole number");
                   const int64_t value = node.as_integer()->get();
                   CheckBounds(field, static_cast<double>(value));
                   *target = value;
                 },
                 [&](float* target) { *target = FloatOf(field, node); },
                 [&](std::optional<float>* target) { *target = FloatOf(field, node); },
                 [&](bool* target) {
                   if (!node.is_boolean()) FailType(field, node, "true or false");
                   *target = node.as_boolean()->get();
                 },
                 [&](std::string* target) {
                   if (!node.is_string()) FailType(field, node, "text in quotes");
                   *target = node.as_string()->get();
                 },
                 [&](const ChoiceTarget& choice) { SetChoice(field, choice, node); },
                 [&](Settings* target) {
                   const size_t start = std::min(key.size(), field.key.size() + 1);
                   SetSetting(field, key.substr(start), node, *target);
                 },
             },
             field.target);
}

// The value of an assignment: TOML, or bare text, as a shell leaves it.
std::unique_ptr<toml::node> AssignedValue(const Field& field, const std::string& text) {
  const bool wants_text = std::holds_alternative<std::string*>(field.target) ||
                          std::holds_alternative<ChoiceTarget>(field.target);
  auto bare = std::make_unique<toml::value<std::string>>(text);
  try {
    toml::table table = ParseToml("value = " + text, "--set");
    std::unique_ptr<toml::node> node;
    table.get("value")->visit([&](auto& value) {
      node = std::make_unique<std::decay_t<decltype(value)>>(std::move(value));
    });
    if (!wants_text || node->is_string() || node->is_array()) return node;
  } catch (const Error&) {
  }
  return bare;
}

// The key or table that an unknown key most likely means: one of the same last part, or else the
// one spelled most alike.
std::string Nearest(const std::vector<Field>& fields, std::string_view key) {
  const std::string_view last_part = key.substr(key.rfind('.') + 1);
  std::vector<std::string_view> candidates;
  for (const Field& field : fields) {
    const std::string_view candidate = field.key;
    if (candidate.substr(candidate.rfind('.') + 1) == last_part) return field.key;
    candidates.push_back(candidate);
    candidates.push_back(candidate.substr(0, candidate.rfind('.')));
  }
  return std::string(NearestName(key, candidates));
}

// A field of settings serves all keys below its own.
bool IsSettings(const Field& field) { return std::holds_alternative<Settings*>(field.target); }

bool IsTable(const std::vector<Field>& fields, const std::string& key) {
  return std::any_of(fields.begin(), fields.end(), [&](const Field& field) {
    return field.key.starts_with(key + ".") || (IsSettings(field) && field.key == key);
  });
}

const Field& FindField(const std::vector<Field>& fields, const std::string& key) {
  const auto found = std::find_if(fields.begin(), fields.end(), [&](const Field& field) {
    return field.key == key || (IsSettings(field) && key.starts_with(field.key + "."));
  });
  if (found != fields.end()) return *found;
  if (key.empty()) Fail("the key is empty");
  if (IsTable(fields, key)) Fail("{} is a table of settings, not a setting", key);
  Fail("unknown key {}, did you mean {}?", key, Nearest(fields, key));
}

void ApplyBelow(const std::vector<Field>& fields, const std::string& prefix,
                const toml::table& table) {
  for (const auto& [name, node] : table) {
    const std::string key = prefix + std::string(name.str());
    if (node.is_table() && IsTable(fields, key)) {
      ApplyBelow(fields, key + ".", *node.as_table());
      continue;
    }
    try {
      SetField(FindField(fields, key), key, node);
    } catch (const Error& error) {
      Fail("{}: {}", PlaceOf(name.source()), error.what());
    }
  }
}

}  // namespace

void ApplyTable(const std::vector<Field>& fields, const toml::table& table) {
  ApplyBelow(fields, "", table);
}

void ApplyAssignment(const std::vector<Field>& fields, std::string_view assignment) {
  const size_t equals = assignment.find('=');
  if (equals == std::string_view::npos) Fail("--set {}: write key=value", assignment);
  try {
    const std::string key(assignment.substr(0, equals));
    const Field& field = FindField(fields, key);
    SetField(field, key, *AssignedValue(field, std::string(assignment.substr(equals + 1))));
  } catch (const Error& error) {
    Fail("--set {}: {}", assignment, error.what());
  }
}

std::string ValueText(const Field& field) {
  return std::visit(
      Overloaded{
          [](const int64_t* value) { return fmt::format("{}", *value); },
          [](const float* value) { return fmt::format("{}", *value); },
          [](const std::optional<float>* value) {
            return value->has_value() ? fmt::format("{}", **value) : std::string();
          },
          [](const bool* value) { return fmt::format("{}", *value); },
          [](const Settings* value) { return value->empty() ? std::string() : TextOf(*value); },
          [](const std::string* value) { return QuotedToml(*value); },
          [](const ChoiceTarget& choice) {
            std::vector<std::string> names;
            for (size_t index : choice.get()) names.push_back(QuotedToml(choice.names[index]));
            return choice.list ? fmt::format("[{}]", fmt::join(names, ", ")) : names.at(0);
          },
      },
      field.target);
}

std::string ToToml(const std::vector<Field>& fields) {
  std::string text;
  std::string table;
  for (const Field& field : fields) {
    const std::string value = ValueText(field);
    const size_t dot = field.key.rfind('.');
    if (field.key.substr(0, dot) != table) {
      table = field.key.substr(0, dot);
      text += fmt::format("{}[{}]\n", text.empty() ? "" : "\n", table);
    }
    text += fmt::format("{}{} = {}  # {}\n", value.empty() ? "# " : "", field.key.substr(dot + 1),
                        value, field.doc);
  }
  return text;
}

}  // namespace terrace
