#include "data/byte_level.h"

#include <array>
#include <cstdint>

namespace terrace {
namespace {

constexpr int kCodePoints = 256 + 68;

constexpr bool StandsForItself(int byte) {
  return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
}

constexpr std::array<uint16_t, 256> kCodePointOfByte = [] {
  std::array<uint16_t, 256> code_points{};
  uint16_t next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    code_points[byte] = StandsForItself(byte) ? static_cast<uint16_t>(byte) : next++;
  }
  return code_points;
}();

constexpr std::array<int16_t, kCodePoints> kByteOfCodePoint = [] {
  std::array<int16_t, kCodePoints> bytes{};
  bytes.fill(-1);
  for (int byte = 0; byte < 256; ++byte) bytes[kCodePointOfByte[byte]] = static_cast<int16_t>(byte);
  return bytes;
}();

}  // namespace

std::string ToByteLevel(std::string_view bytes) {
  std::string text;
  text.reserve(2 * bytes.size());
  for (const char byte : bytes) {
    const unsigned code_point = kCodePointOfByte[static_cast<unsigned char>(byte)];
    if (code_point < 0x80) {
      text.push_back(static_cast<char>(code_point));
    } else {
      text.push_back(static_cast<char>(0xc0 | (code_point >> 6)));
      text.push_back(static_cast<char>(0x80 | (code_point & 0x3f)));
    }
  }
  return text;
}

std::optional<std::string> FromByteLevel(std::string_view text) {
  std::string bytes;
  bytes.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    unsigned code_point = static_cast<unsigned char>(text[i]);
    if (code_point >= 0x80) {
      if ((code_point & 0xe0) != 0xc0 || i + 1 == text.size()) return std::nullopt;
      const unsigned low = static_cast<unsigned char>(text[++i]);
      if ((low & 0xc0) != 0x80) return std::nullopt;
      code_point = ((code_point & 0x1f) << 6) | (low & 0x3f);
    }
    if (code_point >= kCodePoints || kByteOfCodePoint[code_point] < 0) return std::nullopt;
    bytes.push_back(static_cast<char>(kByteOfCodePoint[code_point]));
  }
  return bytes;
}

}  // namespace terrace
