// UTF-8 in byte strings that need not be UTF-8.
#pragma once

#include <cstdint>
#include <string_view>

namespace terrace {

// Length in bytes, 1 to 4, of the well-formed sequence that `text` starts with (RFC 3629: no
// overlong forms, no surrogates, at most U+10FFFF); 0 when there is none.
int Utf8Length(std::string_view text);

// Bytes of the longest well-formed prefix.
int64_t ValidUtf8Bytes(std::string_view text);

}  // namespace terrace
