// Settings as data: what a policy says about a rule, and how a rule reads it.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace terrace {

using SettingValue = std::variant<bool, double, std::string>;
using Settings = std::map<std::string, SettingValue, std::less<>>;

// As TOML: "0.9", "'bf16'".
std::string TextOf(const SettingValue& value);
// As an inline table of TOML: "{ beta1 = 0.9, momentum = 'bf16' }".
std::string TextOf(const Settings& settings);

// Reads the settings of one rule: each call returns the value of a key, or `otherwise` where the
// policy leaves it out, and makes the key known. Errors are thrown as Error that starts with
// `owner`, if it has a name ("skewadam: beta2 = 2 is not within 0 .. 0.9").
class SettingsReader {
 public:
  // `settings` must outlive the reader.
  SettingsReader(std::string_view owner, const Settings& settings)
      : prefix_(owner.empty() ? "" : std::string(owner) + ": "), settings_(settings) {}

  double Number(std::string_view key, double otherwise, double minimum, double maximum);
  int64_t Whole(std::string_view key, int64_t otherwise, int64_t minimum, int64_t maximum);
  bool Flag(std::string_view key, bool otherwise);
  std::string_view Name(std::string_view key, std::string_view otherwise,
                        const std::vector<std::string_view>& names);
  // One of the values, by its name; `otherwise` is among them.
  template <typename E>
  E Choice(std::string_view key, E otherwise,
           std::initializer_list<std::pair<std::string_view, E>> values);

  // Throws Error for a key that nobody has read, with the nearest known one; `others` are keys that
  // somebody else reads and that may have been meant.
  void Finish(const std::vector<std::string_view>& others = {}) const;

  // All keys that were read with their values, also those that the policy leaves out.
  const Settings& complete() const { return complete_; }
  // What the value of a key may be, where there is a list of it: "none, f32, bf16".
  const std::map<std::string, std::string>& choices() const { return choices_; }

 private:
  // Null where the policy leaves it out.
  template <typename T>
  const T* Find(std::string_view key, std::string_view wanted) const;

  std::string prefix_;
  const Settings& settings_;
  Settings complete_;
  std::map<std::string, std::string> choices_;
};

template <typename E>
E SettingsReader::Choice(std::string_view key, E otherwise,
                         std::initializer_list<std::pair<std::string_view, E>> values) {
  std::vector<std::string_view> names;
  std::string_view default_name;
  for (const auto& [name, value] : values) {
    names.push_back(name);
    if (value == otherwise) default_name = name;
  }
  const std::string_view chosen = Name(key, default_name, names);
  for (const auto& [name, value] : values) {
    if (name == chosen) return value;
  }
  return otherwise;
}

}  // namespace terrace
