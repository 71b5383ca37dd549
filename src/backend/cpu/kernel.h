// What the operations of the CPU backend share on the host side: checks of the contract, block
// sizes, float64 scratch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <source_location>

#include "core/arena.h"
#include "core/error.h"
#include "core/tensor.h"

namespace terrace {

// Work is cut into blocks of about this many elements: large against the cost of handing out a
// block, small enough to stay in a core's second-level cache.
inline constexpr int64_t kBlockElements = 32768;

inline int64_t RowsPerBlock(int64_t columns) {
  return std::max<int64_t>(1, kBlockElements / std::max<int64_t>(1, columns));
}

inline bool IsBF16(const TensorView& x) { return x.dtype == DType::kBF16; }

// Throw InternalError that names the operation's line and the tensor.
inline void CheckShape(const TensorView& x, const Shape& shape,
                       std::source_location where = std::source_location::current()) {
  if (x.shape == shape) return;
  FailInternally(where, "{} is {}, not {}", x.name, x.shape.ToString(), shape.ToString());
}

inline void CheckSize(const TensorView& x, int64_t size,
                      std::source_location where = std::source_location::current()) {
  if (x.size() == size) return;
  FailInternally(where, "{} has {} elements, not {}", x.name, x.size(), size);
}

inline void CheckMatrix(const TensorView& x,
                        std::source_location where = std::source_location::current()) {
  if (x.shape.rank() == 2) return;
  FailInternally(where, "{} is {}, not a matrix", x.name, x.shape.ToString());
}

inline void CheckDType(const TensorView& x, DType dtype,
                       std::source_location where = std::source_location::current()) {
  if (x.dtype == dtype) return;
  FailInternally(where, "{} is {}, not {}", x.name, NameOf(x.dtype), NameOf(dtype));
}

// float32 or bfloat16.
inline void CheckFloat(const TensorView& x,
                       std::source_location where = std::source_location::current()) {
  if (x.dtype == DType::kF32 || x.dtype == DType::kBF16) return;
  FailInternally(where, "{} is {}, not f32 or bf16", x.name, NameOf(x.dtype));
}

// float64 scratch, null in a dry run. Tensors have no such type: it takes the room of int64.
inline double* AllocateDoubles(Arena& arena, int64_t count, const char* name) {
  return reinterpret_cast<double*>(
      arena.Allocate(Memory::kScratch, DType::kI64, {count}, name).data);
}

}  // namespace terrace
