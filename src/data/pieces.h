// Cuts long documents.
#pragma once

#include <cstdint>
#include <string_view>

namespace terrace {

// Length of the first piece of `text` when pieces have at most `limit` bytes: all of it if it
// fits, else up to the last blank line in the second half of the limit, else the last line end,
// else the last character.
int64_t FirstPieceBytes(std::string_view text, int64_t limit);

}  // namespace terrace
