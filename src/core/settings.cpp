#include "core/settings.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "core/error.h"
#include "core/nearest_name.h"
#include "core/toml_text.h"

namespace terrace {
namespace {

template <typename... Functions>
struct Overloaded : Functions... {
  using Functions::operator()...;
};

// A value that may become a field's, and how it was written.
struct Given {
  std::variant<std::monostate, bool, int64_t, double, std::string> value;  // empty: of no such type
  std::string text;
};

Given GivenOf(const toml::node& node) {
  Given given{{}, TextOf(node)};
  if (const auto* flag = node.as_boolean()) given.value = flag->get();
  if (const auto* whole = node.as_integer()) given.value = whole->get();
  if (const auto* number = node.as_floating_point()) given.value = number->get();
  if (const auto* text = node.as_string()) given.value = text->get();
  return given;
}

Given GivenOf(const SettingValue& value) {
  Given given{{}, TextOf(value)};
  std::visit([&](const auto& v) { given.value = v; }, value);
  return given;
}

[[noreturn]] void FailType(const Field& field, const std::string& text, std::string_view wanted) {
  Fail("{} = {} has to be {}", field.key, text, wanted);
}

double NumberOf(const Field& field, const Given& given) {
  double value = NAN;
  if (const auto* whole = std::get_if<int64_t>(&given.value)) value = static_cast<double>(*whole);
  if (const auto* number = std::get_if<double>(&given.value)) value = *number;
  if (!std::isfinite(value)) FailType(field, given.text, "a number");
  return value;
}

int64_t WholeOf(const Field& field, const Given& given) {
  if (const auto* whole = std::get_if<int64_t>(&given.value)) return *whole;
  constexpr double kExact = 9007199254740992.0;  // up to here every whole number is a double
  const auto* number = std::get_if<double>(&given.value);
  if (number == nullptr || *number != std::floor(*number) || std::abs(*number) > kExact) {
    FailType(field, given.text, "a whole number");
  }
  return static_cast<int64_t>(*number);
}

std::string_view NameOf(const Field& field, const ChoiceTarget& choice, const Given& given) {
  const auto* name = std::get_if<std::string>(&given.value);
  if (name != nullptr) {
    if (name->empty() && choice.optional) return {};
    const auto found = std::find(choice.names.begin(), choice.names.end(), *name);
    if (found != choice.names.end()) return *found;
  }
  FailType(field, given.text, fmt::format("one of {}", fmt::join(choice.names, ", ")));
}

// Of all but settings.
void SetField(const Field& field, const Given& given) {
  std::visit(Overloaded{
                 [&](int64_t* target) { *target = WholeOf(field, given); },
                 [&](float* target) { *target = static_cast<float>(NumberOf(field, given)); },
                 [&](double* target) { *target = NumberOf(field, given); },
                 [&](std::optional<float>* target) {
                   *target = static_cast<float>(NumberOf(field, given));
                 },
                 [&](bool* target) {
                   const auto* flag = std::get_if<bool>(&given.value);
                   if (flag == nullptr) FailType(field, given.text, "true or false");
                   *target = *flag;
                 },
                 [&](std::string* target) {
                   const auto* text = std::get_if<std::string>(&given.value);
                   if (text == nullptr) FailType(field, given.text, "text in quotes");
                   // The system would take a path to end there.
                   if (text->find('\0') != std::string::npos) {
                     FailType(field, given.text, "text without NUL characters");
                   }
                   *target = *text;
                 },
                 [&](const ChoiceTarget& choice) { choice.set({NameOf(field, choice, given)}); },
                 [&](Settings*) { FailType(field, given.text, "a table"); },
             },
             field.target);
}

void SetList(const Field& field, const ChoiceTarget& choice, const toml::array& array) {
  std::vector<std::string_view> names;
  for (const toml::node& item : array) names.push_back(NameOf(field, choice, GivenOf(item)));
  if (names.empty()) FailType(field, TextOf(array), "a list of at least one name");
  choice.set(names);
}

// `name` is empty for all settings at once, as a table.
void SetSetting(const Field& field, std::string_view name, const toml::node& node,
                Settings& settings) {
  if (!name.empty()) {
    settings[std::string(name)] = SettingOf(fmt::format("{}.{}", field.key, name), node);
    return;
  }
  if (!node.is_table()) FailType(field, TextOf(node), "a table");
  for (const auto& [key, value] : *node.as_table()) SetSetting(field, key.str(), value, settings);
}

// `key` is the field's, or that of one of its settings.
void SetField(const Field& field, std::string_view key, const toml::node& node) {
  if (Settings* const* settings = std::get_if<Settings*>(&field.target)) {
    const size_t start = std::min(key.size(), field.key.size() + 1);
    return SetSetting(field, key.substr(start), node, **settings);
  }
  const auto* choice = std::get_if<ChoiceTarget>(&field.target);
  if (choice != nullptr && choice->list && node.is_array()) {
    return SetList(field, *choice, *node.as_array());
  }
  SetField(field, GivenOf(node));
}

// The value of an assignment: TOML, or bare text, as a shell leaves it.
std::unique_ptr<toml::node> AssignedValue(const Field& field, const std::string& text) {
  const bool wants_text = std::holds_alternative<std::string*>(field.target) ||
                          std::holds_alternative<ChoiceTarget>(field.target);
  std::unique_ptr<toml::node> node;
  try {
    toml::table table = ParseToml("value = " + text, "--set");
    if (table.size() == 1) {
      table.begin()->second.visit([&](auto& value) {
        node = std::make_unique<std::decay_t<decltype(value)>>(std::move(value));
      });
    }
  } catch (const Error&) {
    return std::make_unique<toml::value<std::string>>(text);
  }
  if (node == nullptr) Fail("one setting at a time; the next needs a --set of its own");
  if (!wants_text || node->is_string() || node->is_array()) return node;
  return std::make_unique<toml::value<std::string>>(text);
}

// The key or table that an unknown key most likely means: one of the same last part, or else the
// one spelled most alike.
std::string Nearest(const Fields& fields, std::string_view key) {
  const std::string_view last_part = key.substr(key.rfind('.') + 1);
  std::vector<std::string_view> candidates;
  for (const Field& field : fields) {
    const std::string_view candidate = field.key;
    if (candidate.substr(candidate.rfind('.') + 1) == last_part) return field.key;
    candidates.push_back(candidate);
    if (const size_t dot = candidate.rfind('.'); dot != std::string_view::npos) {
      candidates.push_back(candidate.substr(0, dot));
    }
  }
  return std::string(NearestName(key, candidates));
}

// A field of settings serves all keys below its own.
bool IsSettings(const Field& field) { return std::holds_alternative<Settings*>(field.target); }

bool IsTable(const Fields& fields, const std::string& key) {
  return std::any_of(fields.begin(), fields.end(), [&](const Field& field) {
    return field.key.starts_with(key + ".") || (IsSettings(field) && field.key == key);
  });
}

const Field& FindField(const Fields& fields, const std::string& key) {
  const auto found = std::find_if(fields.begin(), fields.end(), [&](const Field& field) {
    return field.key == key || (IsSettings(field) && key.starts_with(field.key + "."));
  });
  if (found != fields.end()) return *found;
  if (key.empty()) Fail("the key is empty");
  if (IsTable(fields, key)) Fail("{} is a table of settings, not a setting", key);
  Fail("unknown key {}, did you mean {}?", key, Nearest(fields, key));
}

// The present name of a setting.
std::string PresentKey(const std::string& key, const std::string& place,
                       std::span<const RenamedSetting> renamed, WrittenSettings& written) {
  for (const RenamedSetting& setting : renamed) {
    if (setting.old_key != key) continue;
    written.notices.push_back(
        fmt::format("{}: {} is called {} now; the next release will refuse the old name",
                    place.starts_with("--set") ? "--set" : place, key, setting.new_key));
    return std::string(setting.new_key);
  }
  return key;
}

void ApplyBelow(const Fields& fields, const std::string& prefix, const toml::table& table,
                std::span<const RenamedSetting> renamed, WrittenSettings& written) {
  for (const auto& [name, node] : table) {
    const std::string written_key = prefix + std::string(name.str());
    if (node.is_table() && IsTable(fields, written_key)) {
      ApplyBelow(fields, written_key + ".", *node.as_table(), renamed, written);
      continue;
    }
    const std::string place = PlaceOf(name.source());
    try {
      const std::string key = PresentKey(written_key, place, renamed, written);
      const Field& field = FindField(fields, key);
      const bool is_new =
          written.places.insert_or_assign(field.key, WrittenSettings::Place{place, false}).second;
      if (!is_new && !IsSettings(field)) Fail("{} is given under its old name too", key);
      SetField(field, key, node);
    } catch (const Error& error) {
      Fail("{}: {}", place, error.what());
    }
  }
}

// Also of a field without effect.
std::string WrittenText(const Field& field) {
  return std::visit(
      Overloaded{
          [](const int64_t* value) { return fmt::format("{}", *value); },
          [](const float* value) { return fmt::format("{}", *value); },
          [](const double* value) { return fmt::format("{}", *value); },
          [](const std::optional<float>* value) {
            return value->has_value() ? fmt::format("{}", **value) : std::string();
          },
          [](const bool* value) { return fmt::format("{}", *value); },
          [](const Settings* value) { return value->empty() ? std::string() : TextOf(*value); },
          [](const std::string* value) { return QuotedToml(*value); },
          [](const ChoiceTarget& choice) {
            std::vector<std::string> names;
            for (const std::string_view name : choice.get()) names.push_back(QuotedToml(name));
            if (choice.list) return fmt::format("[{}]", fmt::join(names, ", "));
            return names.empty() ? std::string() : names.front();
          },
      },
      field.target);
}

// Null for what has no number.
std::optional<double> NumberIn(const Field& field) {
  return std::visit(
      Overloaded{
          [](int64_t* value) -> std::optional<double> { return static_cast<double>(*value); },
          [](float* value) -> std::optional<double> { return *value; },
          [](double* value) -> std::optional<double> { return *value; },
          [](std::optional<float>* value) -> std::optional<double> { return *value; },
          [](const auto&) -> std::optional<double> { return std::nullopt; },
      },
      field.target);
}

bool IsFloat(const Field& field) {
  return std::holds_alternative<float*>(field.target) ||
         std::holds_alternative<std::optional<float>*>(field.target);
}

void CheckRange(const Field& field) {
  const std::optional<double> value = NumberIn(field);
  if (!value) return;
  auto [minimum, maximum] = field.range;
  if (IsFloat(field)) {  // the value was rounded
    minimum = static_cast<float>(minimum);
    maximum = static_cast<float>(maximum);
  }
  if (std::isfinite(*value) && *value >= minimum && *value <= maximum) return;
  const std::string text = WrittenText(field);
  if (std::isinf(maximum)) {
    Fail("{} = {} is not a finite number of at least {}", field.key, text, field.range.minimum);
  }
  Fail("{} = {} is not within {} .. {}", field.key, text, field.range.minimum, field.range.maximum);
}

SettingValue ValueIn(const Field& field) {
  if (const std::optional<double> number = NumberIn(field)) return *number;
  if (bool* const* flag = std::get_if<bool*>(&field.target)) return **flag;
  if (std::string* const* text = std::get_if<std::string*>(&field.target)) return **text;
  const auto names = std::get<ChoiceTarget>(field.target).get();
  return std::string(names.empty() ? "" : names.front());
}

// What a comment says of a field.
std::string Comment(const Field& field) {
  std::string text = field.doc;
  if (const auto* choice = std::get_if<ChoiceTarget>(&field.target)) {
    text += fmt::format("{}{}", text.empty() ? "" : ": ", fmt::join(choice->names, ", "));
  }
  if (!field.HasEffect()) text += fmt::format("; no effect without {}", field.needs.what);
  return text;
}

}  // namespace

std::string TextOf(const SettingValue& value) {
  if (const std::string* text = std::get_if<std::string>(&value)) return QuotedToml(*text);
  if (const bool* flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  return fmt::format("{}", std::get<double>(value));
}

std::string TextOf(const Settings& settings) {
  std::string text;
  for (const auto& [key, value] : settings) {
    text += fmt::format("{}{} = {}", text.empty() ? "{ " : ", ", key, TextOf(value));
  }
  return text.empty() ? "{}" : text + " }";
}

ChoiceTarget OneOf(std::string& text, std::vector<std::string_view> names) {
  ChoiceTarget target;
  target.names = std::move(names);
  target.optional = true;
  target.get = [&text] {
    return text.empty() ? std::vector<std::string_view>{} : std::vector<std::string_view>{text};
  };
  target.set = [&text](const std::vector<std::string_view>& chosen) { text = chosen.at(0); };
  return target;
}

Fields WithPrefix(std::string_view prefix, Fields fields) {
  for (Field& field : fields) field.key.insert(0, prefix);
  return fields;
}

void ApplyTable(const Fields& fields, const toml::table& table, WrittenSettings& written,
                std::span<const RenamedSetting> renamed) {
  ApplyBelow(fields, "", table, renamed, written);
}

void ApplyAssignment(const Fields& fields, std::string_view assignment, WrittenSettings& written,
                     std::span<const RenamedSetting> renamed) {
  const size_t equals = assignment.find('=');
  if (equals == std::string_view::npos) Fail("--set {}: write key=value", assignment);
  const std::string place = fmt::format("--set {}", assignment);
  try {
    std::string_view written_key = assignment.substr(0, equals);
    while (written_key.ends_with(' ')) written_key.remove_suffix(1);
    const std::string key = PresentKey(std::string(written_key), place, renamed, written);
    const std::string text(assignment.substr(equals + 1));
    const Field& field = FindField(fields, key);
    SetField(field, key, *AssignedValue(field, text));
    written.places.insert_or_assign(field.key, WrittenSettings::Place{place, true});
  } catch (const Error& error) {
    Fail("{}: {}", place, error.what());
  }
}

void CheckBounds(const Fields& fields, const WrittenSettings& written) {
  for (const Field& field : fields) {
    if (!field.HasEffect()) continue;
    const auto place = written.places.find(field.key);
    try {
      CheckRange(field);
    } catch (const Error& error) {
      if (place == written.places.end()) throw;
      Fail("{}: {}", place->second.text, error.what());
    }
  }
}

void SettingsReader::Read(const Fields& fields) {
  std::vector<std::string_view> known;
  for (const Field& field : fields) known.push_back(field.key);
  for (const auto& [key, value] : settings_) {
    if (std::find(known.begin(), known.end(), key) != known.end()) continue;
    known.insert(known.end(), others_.begin(), others_.end());
    Fail("{}unknown setting {}, did you mean {}?", prefix_, key, NearestName(key, known));
  }
  try {
    for (const Field& field : fields) {
      if (const auto given = settings_.find(field.key); given != settings_.end()) {
        SetField(field, GivenOf(given->second));
      }
    }
    CheckBounds(fields);
  } catch (const Error& error) {
    Fail("{}{}", prefix_, error.what());
  }
  for (const Field& field : fields) {
    if (field.HasEffect()) {
      complete_.insert_or_assign(field.key, ValueIn(field));
    } else if (settings_.contains(field.key)) {
      idle_.emplace(field.key, field.needs.what);
    }
  }
  toml_ = ToToml(fields);
}

SettingValue SettingOf(std::string_view key, const toml::node& node) {
  if (const auto* flag = node.as_boolean()) return flag->get();
  if (const auto* text = node.as_string()) return text->get();
  if (const auto* number = node.as_floating_point()) return number->get();
  if (const auto* number = node.as_integer()) return static_cast<double>(number->get());
  Fail("{} = {} has to be a number, text in quotes, true or false", key, TextOf(node));
}

std::string ValueText(const Field& field) {
  return field.HasEffect() ? WrittenText(field) : std::string();
}

std::string ToToml(const Fields& fields) {
  std::string text;
  std::string table;
  for (const Field& field : fields) {
    const bool has_value = !ValueText(field).empty();
    const size_t dot = field.key.rfind('.');
    const std::string own_table = dot == std::string::npos ? "" : field.key.substr(0, dot);
    if (own_table != table) {
      table = own_table;
      text += fmt::format("{}[{}]\n", text.empty() ? "" : "\n", table);
    }
    const std::string key = field.key.substr(dot == std::string::npos ? 0 : dot + 1);
    text += fmt::format("{}{} = {}  # {}\n", has_value ? "" : "# ", key, WrittenText(field),
                        Comment(field));
  }
  return text;
}

}  // namespace terrace
