// Texts on the command line.
#pragma once

#include <CLI/CLI.hpp>
#include <algorithm>
#include <string>
#include <vector>

#include "core/error.h"

namespace terrace {

// For CLI::Option::check.
inline CLI::Validator NotEmpty() {
  const auto check = [](const std::string& text) -> std::string {
    return text.empty() ? "is empty" : "";
  };
  return CLI::Validator(check, "");
}

// An option with names separated by commas; it may be repeated. `names` must outlive the parsing.
// Of an empty one between two commas, which CLI11 would pass over, nobody knows what was meant.
inline CLI::Option* AddNames(CLI::App& command, const std::string& flag,
                             std::vector<std::string>& names, const std::string& doc) {
  const auto add = [flag, &names](const std::vector<std::string>& texts) {
    for (const std::string& text : texts) {
      if (text.empty()) Fail("{}: is empty", flag);
      for (size_t begin = 0; begin <= text.size();) {
        const size_t end = std::min(text.find(',', begin), text.size());
        if (end == begin) Fail("{} {}: a name between commas is empty", flag, text);
        names.push_back(text.substr(begin, end - begin));
        begin = end + 1;
      }
    }
  };
  return command.add_option_function<std::vector<std::string>>(flag, add, doc)
      ->allow_extra_args(false);
}

}  // namespace terrace
