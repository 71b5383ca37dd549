// Named settings of a struct as data: one table serves parsing, --set, writing and errors.
#pragma once

#include <toml++/toml.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "core/error.h"
#include "optim/settings.h"

namespace terrace {

// A value, or several, out of a closed list of names.
struct ChoiceTarget {
  std::vector<std::string_view> names;
  bool list = false;
  std::function<std::vector<size_t>()> get;  // indices into `names`
  std::function<void(const std::vector<size_t>&)> set;
};

struct Field {
  // Settings are an open table, whose keys their reader knows.
  using Target = std::variant<int64_t*, float*, std::optional<float>*, bool*, std::string*,
                              ChoiceTarget, Settings*>;

  std::string key;  // "model.width"
  Target target;
  const char* doc;  // one line
  double minimum = -std::numeric_limits<double>::infinity();
  double maximum = std::numeric_limits<double>::infinity();
};

template <typename E>
using Names = std::vector<std::pair<std::string_view, E>>;

template <typename E>
ChoiceTarget Choice(E& value, const Names<E>& names) {
  ChoiceTarget target;
  for (const auto& [name, unused] : names) target.names.push_back(name);
  target.get = [&value, names] {
    std::vector<size_t> indices;
    for (size_t i = 0; i < names.size(); ++i) {
      if (names[i].second == value) indices.push_back(i);
    }
    return indices;
  };
  target.set = [&value, names](const std::vector<size_t>& indices) {
    value = names[indices.at(0)].second;
  };
  return target;
}

template <typename E>
ChoiceTarget ChoiceList(std::vector<E>& values, const Names<E>& names) {
  ChoiceTarget target;
  for (const auto& [name, unused] : names) target.names.push_back(name);
  target.list = true;
  target.get = [&values, names] {
    std::vector<size_t> indices;
    for (E value : values) {
      for (size_t i = 0; i < names.size(); ++i) {
        if (names[i].second == value) indices.push_back(i);
      }
    }
    return indices;
  };
  target.set = [&values, names](const std::vector<size_t>& indices) {
    values.clear();
    for (size_t index : indices) values.push_back(names[index].second);
  };
  return target;
}

// Sets the fields that `table` names. Throws Error for an unknown key (with the nearest valid
// one), a wrong type or an impossible value: "run.toml:7: ...".
void ApplyTable(const std::vector<Field>& fields, const toml::table& table);

// Sets one field from "key=value", the value in TOML (quotes around text may be left out).
void ApplyAssignment(const std::vector<Field>& fields, std::string_view assignment);

// The value as TOML; empty for an optional field without one, and for no settings.
std::string ValueText(const Field& field);

// All fields as a TOML file, each with its doc as a comment; those without a value commented out.
std::string ToToml(const std::vector<Field>& fields);

}  // namespace terrace
