// A 64-bit hash of bytes that is part of file formats: it never changes.
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

#include "core/rng.h"

namespace terrace {

// Of bytes given in any number of parts; where the parts are cut does not matter as long as each
// but the last is a multiple of 8 bytes.
class Hasher {
 public:
  void Add(std::string_view bytes) {
    bytes_ += bytes.size();
    for (; bytes.size() >= 8; bytes.remove_prefix(8)) AddWord(bytes.data(), 8);
    if (!bytes.empty()) AddWord(bytes.data(), bytes.size());
  }
  uint64_t value() const { return MixKeys(state_, bytes_); }

 private:
  void AddWord(const char* data, size_t size) {
    uint64_t word = 0;
    std::memcpy(&word, data, size);
    state_ = Mix(state_ ^ word) + 0x9e3779b97f4a7c15u;
  }

  uint64_t state_ = 0;
  uint64_t bytes_ = 0;
};

inline uint64_t HashOf(std::string_view bytes) {
  Hasher hasher;
  hasher.Add(bytes);
  return hasher.value();
}

}  // namespace terrace
