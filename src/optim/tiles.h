// Work on matrices in tiles that depend on shapes alone, each by one thread: matrix products then
// give the same bits for any number of threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "backend/cpu/matrix_block.h"
#include "core/parallel.h"

namespace terrace {

// [0, size) in parts of `part`, the last one shorter.
struct Parts {
  int64_t size;
  int64_t part;

  int64_t count() const { return (size + part - 1) / part; }
  int64_t First(int64_t index) const { return index * part; }
  int64_t Length(int64_t index) const { return std::min(part, size - First(index)); }
};

// The tiles of a symmetric matrix on and above its diagonal.
struct SymmetricTiles {
  Parts parts;

  int64_t count() const { return parts.count() * (parts.count() + 1) / 2; }
  // Calls body(row part, column part) for the tile of that number.
  template <typename Body>
  void At(int64_t number, const Body& body) const {
    int64_t row = 0;
    for (int64_t in_row = parts.count(); number >= in_row; --in_row, ++row) number -= in_row;
    body(row, row + number);
  }
};

// Calls body(task, slot) for all tasks, with each slot in one thread at a time: a slot may have
// memory of its own.
template <typename Body>
void ForTasks(int64_t tasks, int64_t slots, const Body& body) {
  std::atomic<int64_t> next = 0;
  ParallelFor(std::min(slots, tasks), 1, [&](int64_t slot, int64_t) {
    for (int64_t task = next++; task < tasks; task = next++) body(task, slot);
  });
}

// A value that depends on a matrix's shape, and takes longer to find than to look up: what oneDNN
// asks for, say, which takes as long as a small product, while many tensors have one shape.
// Thread-safe.
template <typename Value>
class ByShape {
 public:
  template <typename Find>
  Value Get(int64_t rows, int64_t columns, const Find& find) {
    const std::lock_guard lock(mutex_);
    const auto [entry, is_new] = values_.try_emplace({rows, columns});
    if (is_new) entry->second = find();
    return entry->second;
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<int64_t, int64_t>, Value> values_;
};

}  // namespace terrace
