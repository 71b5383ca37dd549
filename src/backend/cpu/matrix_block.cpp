#include "backend/cpu/matrix_block.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/matrix_block.cpp"
#include <hwy/foreach_target.h>

#include "backend/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace terrace {
namespace HWY_NAMESPACE {
namespace {

template <typename From, typename To>
void ConvertRowOf(const std::byte* from, std::byte* to, int64_t count) {
  const auto* source = reinterpret_cast<const From*>(from);
  auto* target = reinterpret_cast<To*>(to);
  ForLanes(count, [=](auto d, int64_t i)
                      HWY_ATTR { StoreLanes(LoadLanes(d, source + i), d, target + i); });
}

void ConvertRow(DType dtype, const std::byte* from, std::byte* to, int64_t count) {
  (dtype == DType::kBF16 ? ConvertRowOf<BF16, float> : ConvertRowOf<float, BF16>)(from, to, count);
}

#if HWY_TARGET != HWY_SCALAR
using BlockTag = hn::CappedTag<float, 8>;

// Columns [column, column + 4) of as many rows as there are lanes: four rows of the result.
template <typename From>
HWY_INLINE void TransposeStrip(const From* from, int64_t from_stride, float* to,
                               int64_t to_stride) {
  const BlockTag d;
  const hn::Repartition<double, BlockTag> pairs;
  const hn::CappedTag<float, 4> four;
  const auto load = [&](int64_t row) HWY_ATTR {
    const auto low = LoadLanes(four, from + row * from_stride);
    if constexpr (hn::MaxLanes(BlockTag()) == 8) {
      return hn::Combine(d, LoadLanes(four, from + (row + 4) * from_stride), low);
    } else {
      return low;
    }
  };
  const auto r0 = load(0), r1 = load(1), r2 = load(2), r3 = load(3);
  // In each block of four lanes: first two rows of the result as pairs, then the other two.
  const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(d, r0, r1));
  const auto low23 = hn::BitCast(pairs, hn::InterleaveLower(d, r2, r3));
  const auto high01 = hn::BitCast(pairs, hn::InterleaveUpper(d, r0, r1));
  const auto high23 = hn::BitCast(pairs, hn::InterleaveUpper(d, r2, r3));
  hn::StoreU(hn::BitCast(d, hn::InterleaveLower(pairs, low01, low23)), d, to);
  hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(pairs, low01, low23)), d, to + to_stride);
  hn::StoreU(hn::BitCast(d, hn::InterleaveLower(pairs, high01, high23)), d, to + 2 * to_stride);
  hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(pairs, high01, high23)), d, to + 3 * to_stride);
}

#endif

template <typename From>
void TransposeToFloatOf(const From* from, int64_t from_stride, int64_t rows, int64_t columns,
                        float* to, int64_t to_stride) {
  int64_t i = 0;
  int64_t full_columns = 0;
#if HWY_TARGET != HWY_SCALAR
  constexpr int64_t kRows = 16;  // so that each line of the result is written at once
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(BlockTag()));
  full_columns = columns / 4 * 4;
  for (; i + kRows <= rows; i += kRows) {
    for (int64_t j = 0; j < full_columns; j += 4) {
      for (int64_t row = i; row < i + kRows; row += lanes) {
        TransposeStrip(from + row * from_stride + j, from_stride, to + j * to_stride + row,
                       to_stride);
      }
    }
  }
#endif
  const auto rest = [&](int64_t first_row, int64_t first_column, int64_t end_column) {
    for (int64_t j = first_column; j < end_column; ++j) {
      for (int64_t row = first_row; row < rows; ++row) {
        to[j * to_stride + row] = ToFloat(from[row * from_stride + j]);
      }
    }
  };
  rest(0, full_columns, columns);
  rest(i, 0, full_columns);
}

void TransposeToFloat(const MatrixBlock& from, int64_t rows, int64_t columns,
                      const MatrixBlock& to) {
  auto* target = reinterpret_cast<float*>(to.data);
  if (from.dtype == DType::kF32) {
    TransposeToFloatOf(reinterpret_cast<const float*>(from.data), from.stride, rows, columns,
                       target, to.stride);
  } else {
    TransposeToFloatOf(reinterpret_cast<const BF16*>(from.data), from.stride, rows, columns, target,
                       to.stride);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace terrace
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace terrace {
namespace {

// Some rows at a time: each line of the result is then written at once.
void TransposeBF16(const MatrixBlock& from, int64_t rows, int64_t columns, const MatrixBlock& to) {
  constexpr int64_t kRows = 16;
  const auto* source = reinterpret_cast<const BF16*>(from.data);
  auto* target = reinterpret_cast<BF16*>(to.data);
  for (int64_t first = 0; first < rows; first += kRows) {
    const int64_t end = std::min(rows, first + kRows);
    for (int64_t j = 0; j < columns; ++j) {
      for (int64_t i = first; i < end; ++i) {
        target[j * to.stride + i] = source[i * from.stride + j];
      }
    }
  }
}

bool IsFloat(DType dtype) { return dtype == DType::kF32 || dtype == DType::kBF16; }

}  // namespace

HWY_EXPORT(ConvertRow);
HWY_EXPORT(TransposeToFloat);

void CopyBlock(const MatrixBlock& from, int64_t rows, int64_t columns, const MatrixBlock& to) {
  TERRACE_CHECK(IsFloat(from.dtype) && IsFloat(to.dtype), "{} and {}", NameOf(from.dtype),
                NameOf(to.dtype));
  for (int64_t row = 0; row < rows; ++row) {
    const std::byte* const source = from.At(row, 0).data;
    std::byte* const target = to.At(row, 0).data;
    if (from.dtype == to.dtype) {
      std::memcpy(target, source, static_cast<size_t>(columns * BytesOf(to.dtype)));
    } else {
      HWY_DYNAMIC_DISPATCH(ConvertRow)(from.dtype, source, target, columns);
    }
  }
}

void Transpose(const MatrixBlock& from, int64_t rows, int64_t columns, const MatrixBlock& to) {
  TERRACE_CHECK(IsFloat(from.dtype) && (from.dtype == to.dtype || to.dtype == DType::kF32),
                "{} and {}", NameOf(from.dtype), NameOf(to.dtype));
  if (to.dtype == DType::kF32) {
    HWY_DYNAMIC_DISPATCH(TransposeToFloat)(from, rows, columns, to);
  } else {
    TransposeBF16(from, rows, columns, to);
  }
}

}  // namespace terrace
#endif  // HWY_ONCE
