#include "data/pieces.h"

namespace terrace {

int64_t FirstPieceBytes(std::string_view text, int64_t limit) {
  if (static_cast<int64_t>(text.size()) <= limit) return static_cast<int64_t>(text.size());
  const std::string_view head = text.substr(0, static_cast<size_t>(limit));
  const size_t half = head.size() / 2;
  for (const std::string_view boundary : {"\n\n", "\n"}) {
    const size_t found = head.rfind(boundary);
    if (found != std::string_view::npos && found >= half) {
      return static_cast<int64_t>(found + boundary.size());
    }
  }
  // A character has up to three continuation bytes.
  size_t end = head.size();
  while (end + 3 > head.size() && end > 1 &&
         (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) {
    --end;
  }
  return static_cast<int64_t>(end);
}

}  // namespace terrace
