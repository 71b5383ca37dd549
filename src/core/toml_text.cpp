#include "core/toml_text.h"

#include <algorithm>
#include <sstream>

#include "core/error.h"

namespace terrace {

toml::table ParseToml(std::string_view text, std::string_view path) {
  // A key of many parts is a table as deep, and what walks it calls itself for each level.
  constexpr int64_t kMostDots = 4096;
  if (std::count(text.begin(), text.end(), '.') > kMostDots) {
    Fail("{}: more than {} dots are no configuration", path, kMostDots);
  }
  try {
    return toml::parse(text, path);
  } catch (const toml::parse_error& error) {
    std::string description(error.description());
    std::replace(description.begin(), description.end(), '\n', ' ');
    Fail("{}: {}", PlaceOf(error.source()), description);
  }
}

std::string PlaceOf(const toml::source_region& source) {
  return fmt::format("{}:{}", source.path ? *source.path : "", source.begin.line);
}

std::string TextOf(const toml::node& node) {
  std::ostringstream text;
  node.visit([&](const auto& value) { text << value; });
  std::string line = text.str();
  std::replace(line.begin(), line.end(), '\n', ' ');
  return line;
}

std::string QuotedToml(std::string_view text) {
  std::ostringstream quoted;
  quoted << toml::value<std::string>(std::string(text));
  return quoted.str();
}

}  // namespace terrace
