// Settings by name. A table of fields, bound to the members of a struct, serves whatever has
// settings: a run's configuration, a policy, an update rule. A setting's name, meaning, bounds and
// choices stand in its field and nowhere else, its default in the struct; reading TOML and --set,
// checks, errors and writing follow from them.
#pragma once

#include <toml++/toml.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace terrace {

// --- Settings as written, before anybody knows what they mean

using SettingValue = std::variant<bool, double, std::string>;
using Settings = std::map<std::string, SettingValue, std::less<>>;

// As TOML: "0.9", "'bf16'".
std::string TextOf(const SettingValue& value);
// As an inline table of TOML: "{ beta1 = 0.9, momentum = 'bf16' }".
std::string TextOf(const Settings& settings);

// --- Fields

// A value, or several, out of a closed list of names.
struct ChoiceTarget {
  std::vector<std::string_view> names;
  bool list = false;      // several
  bool optional = false;  // or none, written ""
  std::function<std::vector<std::string_view>()> get;
  std::function<void(const std::vector<std::string_view>&)> set;
};

template <typename E>
using Names = std::vector<std::pair<std::string_view, E>>;

struct Range {
  double minimum = -std::numeric_limits<double>::infinity();
  double maximum = std::numeric_limits<double>::infinity();  // values are finite all the same
};

// What a setting has no effect without.
struct Needs {
  std::function<bool()> met = nullptr;  // null: nothing
  const char* what = "";                // "model.positions = \"rope\""
};

struct Field {
  // Settings are an open table, whose keys somebody else knows.
  using Target = std::variant<int64_t*, float*, double*, std::optional<float>*, bool*, std::string*,
                              ChoiceTarget, Settings*>;

  std::string key;  // "model.width"
  Target target;
  const char* doc;  // one line
  Range range = {};
  Needs needs = {};

  bool HasEffect() const { return needs.met == nullptr || needs.met(); }
};
using Fields = std::vector<Field>;

// `names` has the name of every value.
template <typename E>
ChoiceTarget ChoiceList(std::vector<E>& values, const Names<E>& names) {
  ChoiceTarget target;
  for (const auto& [name, unused] : names) target.names.push_back(name);
  target.list = true;
  target.get = [&values, names] {
    std::vector<std::string_view> chosen;
    for (const E& value : values) {
      for (const auto& [name, named] : names) {
        if (named == value) chosen.push_back(name);
      }
    }
    return chosen;
  };
  target.set = [&values, names](const std::vector<std::string_view>& chosen) {
    values.clear();
    for (const std::string_view choice : chosen) {
      for (const auto& [name, named] : names) {
        if (name == choice) values.push_back(named);
      }
    }
  };
  return target;
}

template <typename E>
ChoiceTarget Choice(E& value, const Names<E>& names) {
  ChoiceTarget target;
  for (const auto& [name, unused] : names) target.names.push_back(name);
  target.get = [&value, names] {
    std::vector<std::string_view> chosen;
    for (const auto& [name, named] : names) {
      if (named == value) chosen.push_back(name);
    }
    return chosen;
  };
  target.set = [&value, names](const std::vector<std::string_view>& chosen) {
    for (const auto& [name, named] : names) {
      if (name == chosen.at(0)) value = named;
    }
  };
  return target;
}

// A text that is one of `names`, or empty for none.
ChoiceTarget OneOf(std::string& text, std::vector<std::string_view> names);

// The fields with `prefix` before their keys.
Fields WithPrefix(std::string_view prefix, Fields fields);

// --- Reading

// A setting that had another name: both are read, the old one with a notice.
struct RenamedSetting {
  std::string_view old_key;
  std::string_view new_key;
};

// What was set, and where.
struct WrittenSettings {
  struct Place {
    std::string text;       // "run.toml:7", "--set model.width=3"
    bool assigned = false;  // by --set
  };
  std::map<std::string, Place> places;  // by the field's key
  std::vector<std::string> notices;     // one line each
};

// Sets the fields that `table` names. Throws Error for an unknown key (with the nearest valid one)
// and for a wrong type: "run.toml:7: ...". Bounds are CheckBounds' to check, since a setting that
// has no effect has none.
void ApplyTable(const Fields& fields, const toml::table& table, WrittenSettings& written,
                std::span<const RenamedSetting> renamed = {});

// Sets one field from "key=value", the value in TOML (quotes around text may be left out).
void ApplyAssignment(const Fields& fields, std::string_view assignment, WrittenSettings& written,
                     std::span<const RenamedSetting> renamed = {});

// Throws Error naming the first field with an effect whose value is out of bounds, and where it was
// set, if it was.
void CheckBounds(const Fields& fields, const WrittenSettings& written = {});

// Reads the settings of one rule or the like, as a policy has them. Errors start with `owner`, if
// it has a name: "skewadam: beta2 = 2 is not within 0 .. 0.9".
class SettingsReader {
 public:
  // `settings` must outlive the reader. `others` are keys that somebody else reads, and that may be
  // meant by an unknown one.
  SettingsReader(std::string_view owner, const Settings& settings,
                 std::vector<std::string_view> others = {})
      : prefix_(owner.empty() ? "" : std::string(owner) + ": "),
        settings_(settings),
        others_(std::move(others)) {}

  // Sets all fields that are given. To be called once, with every field there is. Throws Error for
  // unknown keys, wrong types and values.
  void Read(const Fields& fields);

  // All settings that have an effect, also those that are not given.
  const Settings& complete() const { return complete_; }
  // Given settings that have none: what they would need, by key.
  const std::map<std::string, std::string>& idle() const { return idle_; }
  // The fields as ToToml has them.
  const std::string& toml() const { return toml_; }

 private:
  std::string prefix_;
  const Settings& settings_;
  std::vector<std::string_view> others_;
  Settings complete_;
  std::map<std::string, std::string> idle_;
  std::string toml_;
};

// Throws Error "KEY = ... has to be ..." for what no setting can be.
SettingValue SettingOf(std::string_view key, const toml::node& node);

// --- Writing

// The value as TOML; empty for a field without effect, an optional one without a value, and no
// settings. Two structs whose texts are equal mean the same.
std::string ValueText(const Field& field);

// All fields as a TOML file, each with its meaning as a comment; those without a text are commented
// out.
std::string ToToml(const Fields& fields);

}  // namespace terrace
