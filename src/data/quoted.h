// Text of unknown origin within messages.
#pragma once

#include <string>
#include <string_view>

namespace terrace {

// As a JSON string, in quotes: one printable line whatever the bytes.
std::string Quoted(std::string_view text);

}  // namespace terrace
