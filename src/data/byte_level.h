// The spelling of bytes as printable characters that GPT-2's vocabulary files use: printable
// Latin-1 bytes stand for themselves, the 68 others are U+0100 and up in order of value.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace terrace {

// The UTF-8 spelling of any bytes; two bytes at most for each.
std::string ToByteLevel(std::string_view bytes);

// The reverse; nothing when `text` has a character that stands for no byte.
std::optional<std::string> FromByteLevel(std::string_view text);

}  // namespace terrace
