// The rows of a matrix in parallel blocks, which depend on the shape alone.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/parallel.h"

namespace terrace {

// At most kMostBlocks, since each block may have partial column sums of its own: scratch stays
// O(rows + columns).
struct RowBlocks {
  static constexpr int64_t kMostBlocks = 32;
  static constexpr int64_t kFewestRows = 64;

  explicit RowBlocks(int64_t row_count)
      : rows(row_count),
        block_rows(std::max(kFewestRows, (row_count + kMostBlocks - 1) / kMostBlocks)),
        count((row_count + block_rows - 1) / block_rows) {}

  int64_t rows;
  int64_t block_rows;
  int64_t count;
};

// Body: (block, first row, end row).
template <typename Body>
void ForBlocks(const RowBlocks& blocks, const Body& body) {
  ParallelFor(blocks.count, 1, [&](int64_t block, int64_t) {
    body(block, block * blocks.block_rows, std::min(blocks.rows, (block + 1) * blocks.block_rows));
  });
}

// sums[j] += the partial sums of blocks 1, 2, ..., in that order; block b has its own at
// sums + b * stride, those of block 0 are `sums`.
inline void AddBlocks(const RowBlocks& blocks, int64_t columns, int64_t stride, float* sums) {
  for (int64_t block = 1; block < blocks.count; ++block) {
    for (int64_t j = 0; j < columns; ++j) sums[j] += sums[block * stride + j];
  }
}

}  // namespace terrace
