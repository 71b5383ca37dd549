#include "data/utf8.h"

#include <cstring>

namespace terrace {

int Utf8Length(std::string_view text) {
  const auto byte = [&](size_t index) -> unsigned {
    return index < text.size() ? static_cast<unsigned char>(text[index]) : 0;
  };
  const auto continues = [&](size_t index) { return (byte(index) & 0xc0) == 0x80; };
  if (text.empty()) return 0;
  const unsigned first = byte(0);
  const unsigned second = byte(1);
  if (first < 0x80) return 1;
  if (first < 0xc2 || first > 0xf4 || !continues(1)) return 0;
  if (first < 0xe0) return 2;
  if (!continues(2)) return 0;
  if (first < 0xf0) {
    const bool overlong = first == 0xe0 && second < 0xa0;
    const bool surrogate = first == 0xed && second >= 0xa0;
    return overlong || surrogate ? 0 : 3;
  }
  const bool overlong = first == 0xf0 && second < 0x90;
  const bool too_large = first == 0xf4 && second >= 0x90;
  return !continues(3) || overlong || too_large ? 0 : 4;
}

int64_t ValidUtf8Bytes(std::string_view text) {
  size_t position = 0;
  while (position < text.size()) {
    // Eight ASCII bytes at a time: most text is little else.
    uint64_t block;
    if (position + sizeof(block) <= text.size()) {
      std::memcpy(&block, text.data() + position, sizeof(block));
      if ((block & 0x8080808080808080u) == 0) {
        position += sizeof(block);
        continue;
      }
    }
    const int length = Utf8Length(text.substr(position));
    if (length == 0) break;
    position += static_cast<size_t>(length);
  }
  return static_cast<int64_t>(position);
}

}  // namespace terrace
