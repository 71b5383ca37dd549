// A fast 64-bit checksum against damage (not against forgery) of stored tensors.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <span>

#include "core/error.h"
#include "core/rng.h"

namespace terrace {

// Four lanes of 64-bit words, each step a bijection of its lane and of its word: a change confined
// to one word changes the result for certain, any other one with probability 1 - 2^-64.
// Little-endian, as the files are.
class Checksum {
 public:
  static constexpr size_t kStripeBytes = 32;

  // Every part but the last has to be a multiple of kStripeBytes.
  void Update(std::span<const std::byte> part) {
    TERRACE_CHECK(bytes_ % kStripeBytes == 0, "{} bytes so far", bytes_);
    bytes_ += part.size();
    for (; part.size() >= kStripeBytes; part = part.subspan(kStripeBytes)) Add(part.data());
    if (part.empty()) return;
    std::byte last[kStripeBytes] = {};
    std::memcpy(last, part.data(), part.size());
    Add(last);
  }

  uint64_t Value() const { return MixKeys(bytes_, lanes_[0], lanes_[1], lanes_[2], lanes_[3]); }

 private:
  void Add(const std::byte* stripe) {
    uint64_t words[4];
    std::memcpy(words, stripe, kStripeBytes);
    for (int lane = 0; lane < 4; ++lane) {
      lanes_[lane] = std::rotl((lanes_[lane] ^ words[lane]) * 0xd1342543de82ef95u, 29);
    }
  }

  uint64_t lanes_[4] = {1, 2, 3, 4};
  uint64_t bytes_ = 0;
};

inline uint64_t ChecksumOf(std::span<const std::byte> bytes) {
  Checksum checksum;
  checksum.Update(bytes);
  return checksum.Value();
}

}  // namespace terrace
