// Blocks of matrices in memory, and how they are copied, converted and transposed. One thread each;
// what calls these splits the work.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/cpu/matmul.h"
#include "core/tensor.h"

namespace terrace {

// A row-major matrix, or a block of one, in memory.
struct MatrixBlock {
  std::byte* data;
  DType dtype;
  int64_t stride;  // elements from one row to the next

  // Of a block without memory, one without memory: plans have no other.
  MatrixBlock At(int64_t row, int64_t column) const {
    if (data == nullptr) return *this;
    return {data + (row * stride + column) * BytesOf(dtype), dtype, stride};
  }
  Operand AsOperand(bool transposed = false) const { return {data, dtype, stride, transposed}; }
};
inline MatrixBlock MatrixOf(TensorView view) { return {view.data, view.dtype, view.columns()}; }
// From that element on, in one row.
inline MatrixBlock RangeOf(TensorView view, int64_t begin) {
  return MatrixBlock{view.data, view.dtype, view.size()}.At(0, begin);
}

// to[i, j] = from[i, j]; float32 or bfloat16, to which it rounds to nearest.
void CopyBlock(const MatrixBlock& from, int64_t rows, int64_t columns, const MatrixBlock& to);

// to[j, i] = from[i, j]; of one dtype, or from bfloat16 to float32.
void Transpose(const MatrixBlock& from, int64_t rows, int64_t columns, const MatrixBlock& to);

}  // namespace terrace
