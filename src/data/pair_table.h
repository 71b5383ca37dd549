// From a pair of neighbouring tokens to their merge.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "core/rng.h"

namespace terrace {

// An immutable-after-building hash table with open addressing: the innermost look-up of encoding.
class PairTable {
 public:
  struct Merge {
    int32_t rank = -1;  // position in the list of merges, the lowest first; -1: no merge
    int32_t result = -1;
  };

  PairTable() : PairTable(0) {}
  explicit PairTable(int64_t count)
      : slots_(std::bit_ceil(static_cast<uint64_t>(2 * count + 1))), mask_(slots_.size() - 1) {}

  // False when the pair is there already. At most `count` pairs may be inserted.
  bool Insert(int32_t left, int32_t right, Merge merge) {
    Slot& slot = slots_[SlotOf(left, right)];
    if (slot.merge.rank >= 0) return false;
    slot = {KeyOf(left, right), merge};
    return true;
  }

  Merge Find(int32_t left, int32_t right) const { return slots_[SlotOf(left, right)].merge; }

 private:
  struct Slot {
    uint64_t key = 0;
    Merge merge;
  };

  static uint64_t KeyOf(int32_t left, int32_t right) {
    return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
  }
  // The slot that holds the pair, or the free one where it belongs.
  uint64_t SlotOf(int32_t left, int32_t right) const {
    const uint64_t key = KeyOf(left, right);
    uint64_t index = Mix(key) & mask_;
    while (slots_[index].merge.rank >= 0 && slots_[index].key != key) index = (index + 1) & mask_;
    return index;
  }

  std::vector<Slot> slots_;
  uint64_t mask_;
};

}  // namespace terrace
