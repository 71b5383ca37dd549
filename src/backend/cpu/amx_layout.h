// How products on AMX lay out what they pack, and their scratch.
//
// A left tile holds 16 rows of 32 values along k; a right tile 16 pairs along k of 16 columns, row
// p being [2p, 0], [2p + 1, 0], [2p, 1], [2p + 1, 1] ... Both operands are packed into panels of 32
// rows or columns: for every 32 of k two tiles, one after the other. What lies beyond a matrix is
// packed as zeros.
#pragma once

#include <cstdint>

#include "backend/cpu/amx_products.h"
#include "core/dtype.h"

namespace terrace {

inline constexpr int64_t kTileRows = 16;
inline constexpr int64_t kTileBytes = 1024;
inline constexpr int64_t kTileRowBytes = 64;
inline constexpr int64_t kPanel = 2 * kTileRows;  // rows or columns of c in a panel
inline constexpr int64_t kDepthStep = 32;         // of k, in a tile
inline constexpr int64_t kStepBytes = 2 * kTileBytes;
inline constexpr int64_t kBlockBytes = kPanel * kPanel * static_cast<int64_t>(sizeof(float));

// Sums of float32 results lie where they will stay, unless the result is written transposed.
inline bool SumsInPlace(const Product& product) {
  return product.c.dtype == DType::kF32 && AmxKindOf(product) != AmxKind::kForward;
}

// Whether scratch has to keep the sums of a whole group from one depth to the next. Gradients of
// weights do not ask for k, which is a number of tokens there.
inline bool KeepsSums(const Product& product, const AmxBlocking& blocking) {
  if (SumsInPlace(product)) return false;
  return AmxKindOf(product) == AmxKind::kWeightGradient || product.k > blocking.depth;
}

// Where parts of the scratch begin, in bytes.
struct AmxScratch {
  int64_t streamed, sums, turned, end;
};

inline AmxScratch AmxScratchOf(const Product& product, const AmxBlocking& blocking) {
  constexpr int64_t kInput = 2, kSum = 4;  // bytes
  const int64_t streamed = blocking.block * blocking.depth * kInput;
  const int64_t sums = streamed + blocking.panel * blocking.depth * kInput;
  const int64_t turned =
      sums + (KeepsSums(product, blocking) ? blocking.block * blocking.group * kSum : kBlockBytes);
  return {streamed, sums, turned, turned + kBlockBytes};
}

}  // namespace terrace
