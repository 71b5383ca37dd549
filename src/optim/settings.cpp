#include "optim/settings.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/toml_text.h"
#include "model/nearest_name.h"

namespace terrace {

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

template <typename T>
const T* SettingsReader::Find(std::string_view key, std::string_view wanted) const {
  const auto found = settings_.find(key);
  if (found == settings_.end()) return nullptr;
  const T* value = std::get_if<T>(&found->second);
  if (value == nullptr) {
    Fail("{}{} = {} has to be {}", prefix_, key, TextOf(found->second), wanted);
  }
  return value;
}

double SettingsReader::Number(std::string_view key, double otherwise, double minimum,
                              double maximum) {
  const double* given = Find<double>(key, "a number");
  const double value = given != nullptr ? *given : otherwise;
  if (!(value >= minimum && value <= maximum)) {
    Fail("{}{} = {} is not within {} .. {}", prefix_, key, value, minimum, maximum);
  }
  complete_.insert_or_assign(std::string(key), value);
  return value;
}

int64_t SettingsReader::Whole(std::string_view key, int64_t otherwise, int64_t minimum,
                              int64_t maximum) {
  const double value = Number(key, static_cast<double>(otherwise), static_cast<double>(minimum),
                              static_cast<double>(maximum));
  if (value != std::floor(value)) Fail("{}{} = {} has to be a whole number", prefix_, key, value);
  return static_cast<int64_t>(value);
}

bool SettingsReader::Flag(std::string_view key, bool otherwise) {
  const bool* given = Find<bool>(key, "true or false");
  const bool value = given != nullptr ? *given : otherwise;
  complete_.insert_or_assign(std::string(key), value);
  return value;
}

std::string_view SettingsReader::Name(std::string_view key, std::string_view otherwise,
                                      const std::vector<std::string_view>& names) {
  const std::string list = fmt::format("{}", fmt::join(names, ", "));
  const std::string wanted = "one of " + list;
  choices_.insert_or_assign(std::string(key), list);
  const std::string* given = Find<std::string>(key, wanted);
  const std::string_view value = given != nullptr ? *given : otherwise;
  if (given != nullptr && std::find(names.begin(), names.end(), value) == names.end()) {
    Fail("{}{} = {} has to be {}", prefix_, key, TextOf(SettingValue(*given)), wanted);
  }
  complete_.insert_or_assign(std::string(key), std::string(value));
  return value;
}

void SettingsReader::Finish(const std::vector<std::string_view>& others) const {
  std::vector<std::string_view> known;
  for (const auto& [key, value] : complete_) known.push_back(key);
  known.insert(known.end(), others.begin(), others.end());
  for (const auto& [key, value] : settings_) {
    if (complete_.contains(key)) continue;
    Fail("{}unknown setting {}, did you mean {}?", prefix_, key, NearestName(key, known));
  }
}

}  // namespace terrace
