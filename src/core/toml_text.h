// TOML in and out, with errors on one line.
#pragma once

#include <toml++/toml.h>

#include <string>
#include <string_view>

namespace terrace {

// As toml::parse. Throws Error "run.toml:7: ...".
toml::table ParseToml(std::string_view text, std::string_view path);

// "run.toml:7"
std::string PlaceOf(const toml::source_region& source);

// A value on one line, for errors.
std::string TextOf(const toml::node& node);

// As a TOML string.
std::string QuotedToml(std::string_view text);

}  // namespace terrace
