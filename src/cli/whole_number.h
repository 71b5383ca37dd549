// Whole numbers on the command line.
#pragma once

#include <CLI/CLI.hpp>
#include <charconv>
#include <limits>
#include <string>

#include "core/error.h"

namespace terrace {

// For CLI::Option::transform: refuses what is not a whole number within minimum .. maximum, where
// CLI11 would clamp it, or read it as octal.
template <typename T>
CLI::Validator WholeNumber(T minimum, T maximum = std::numeric_limits<T>::max()) {
  const auto check = [minimum, maximum](std::string& text) -> std::string {
    T value{};
    const char* end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data(), end, value);
    if (error != std::errc() || rest != end || value < minimum || value > maximum) {
      return fmt::format("{} is not a whole number within {} .. {}", text, minimum, maximum);
    }
    text = std::to_string(value);
    return {};
  };
  return CLI::Validator(check, "");
}

}  // namespace terrace
