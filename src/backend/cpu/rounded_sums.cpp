#include "backend/cpu/rounded_sums.h"

#include <algorithm>
#include <cstring>

#include "backend/cpu/kernel.h"
#include "core/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/rounded_sums.cpp"
#include <hwy/foreach_target.h>

#include "backend/cpu/units-inl.h"

HWY_BEFORE_NAMESPACE();
namespace terrace {
namespace HWY_NAMESPACE {
namespace {

// Rows [begin, end) of `sums`, which are those of dw from first_row on.
void RoundRows(const TensorView& sums, int64_t first_row, const TensorView& dw, const Adding& add,
               int64_t begin, int64_t end) {
  const int64_t columns = dw.columns();
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = first_row + i;
    kernels::HWY_NAMESPACE::RoundRow(sums.as<float>() + i * columns, 0, columns, columns, row,
                                     add.add, add.rounding_key, dw.as<BF16>() + row * columns);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace terrace
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace terrace {

HWY_EXPORT(RoundRows);

namespace {

constexpr int64_t kTokens = 512;  // of dy that are copied at a time

// copy[N, C] = columns [first, first + C) of dy[N, O].
void CopyColumns(TensorView dy, int64_t first, TensorView copy) {
  const int64_t bytes = copy.columns() * BytesOf(copy.dtype);
  const int64_t stride = dy.columns() * BytesOf(dy.dtype);
  ParallelFor(dy.rows(), RowsPerBlock(copy.columns()), [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      std::memcpy(copy.data + n * bytes, dy.data + n * stride + first * BytesOf(dy.dtype), bytes);
    }
  });
}

}  // namespace

int64_t SliceRows(int64_t columns) {
  // A slice stays in cache between its product and its rounding.
  constexpr int64_t kSliceBytes = int64_t{4} << 20;
  constexpr int64_t kMultiple = 64;
  const int64_t fitting = kSliceBytes / (columns * BytesOf(DType::kF32)) / kMultiple;
  return std::max<int64_t>(1, fitting) * kMultiple;
}

void RoundSums(TensorView sums, int64_t first_row, TensorView dw, Adding add) {
  ParallelFor(sums.rows(), RowsPerBlock(sums.columns()), [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(RoundRows)(sums, first_row, dw, add, begin, end);
  });
}

void LeaveRounded(Backend& backend, TensorView dy, TensorView x, TensorView dw, Adding add) {
  Arena& arena = backend.arena();
  const Arena::Frame frame(arena);
  const int64_t out = dw.rows();     // O
  const int64_t in = dw.columns();   // I
  const int64_t tokens = dy.rows();  // N
  const int64_t slice_rows = std::min(out, SliceRows(in));
  const TensorView sums =
      arena.Allocate(Memory::kScratch, DType::kF32, {slice_rows, in}, "gradient.slice");
  TensorView columns;
  if (slice_rows < out) {
    columns = arena.Allocate(Memory::kScratch, dy.dtype, {kTokens, slice_rows}, "gradient.dy");
  }
  // Slices of one shape take the same scratch: a dry run looks at the first and the last.
  const int64_t last = (out - 1) / slice_rows * slice_rows;
  const int64_t step = backend.dry() ? std::max(last, slice_rows) : slice_rows;
  for (int64_t first = 0; first < out; first += step) {
    const TensorView slice = sums.Rows(0, std::min(slice_rows, out - first));
    if (columns.empty()) {
      backend.LinearBackwardWeight(dy, x, slice, false);
    } else {
      int64_t token = 0;
      do {
        const int64_t count = std::min(kTokens, tokens - token);
        TensorView part = columns;
        part.shape = {count, slice.rows()};
        if (!backend.dry()) CopyColumns(dy.Rows(token, count), first, part);
        backend.LinearBackwardWeight(part, x.Rows(token, count), slice, token > 0);
        token += kTokens;
      } while (token < tokens);
    }
    if (!backend.dry()) RoundSums(slice, first, dw, add);
  }
}

}  // namespace terrace
#endif  // HWY_ONCE
