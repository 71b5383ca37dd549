// Rows moved by index: permutation of tokens, and embeddings.
#include <algorithm>
#include <cstring>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/kernel.h"
#include "core/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/rows.cpp"
#include <hwy/foreach_target.h>

#include "backend/cpu/simd-inl.h"
#include "backend/cpu/units-inl.h"

HWY_BEFORE_NAMESPACE();
namespace terrace {
namespace HWY_NAMESPACE {
namespace {

template <typename X>
void AddGatheredOf(const TensorView& x, const TensorView& token_rows, const TensorView& y,
                   int64_t begin, int64_t end) {
  const int64_t columns = x.columns();
  const int64_t choices = token_rows.columns();
  const X* from = x.as<X>();
  for (int64_t token = begin; token < end; ++token) {
    const int64_t* rows = token_rows.as<int64_t>() + token * choices;
    float* to = y.as<float>() + token * columns;
    ForLanes(columns, [=](auto d, int64_t i) HWY_ATTR {
      auto sum = hn::LoadU(d, to + i);
      for (int64_t k = 0; k < choices; ++k) {
        sum = hn::Add(sum, LoadLanes(d, from + rows[k] * columns + i));
      }
      hn::StoreU(sum, d, to + i);
    });
  }
}

template <typename Tokens, typename Positions>
void EmbedOf(const TensorView& ids, const TensorView& tokens_table,
             const TensorView& positions_table, int64_t sequence_length, int64_t first_position,
             const TensorView& y, int64_t begin, int64_t end) {
  const int64_t columns = y.columns();
  for (int64_t n = begin; n < end; ++n) {
    const Tokens* token = tokens_table.as<Tokens>() + ids.as<int32_t>()[n] * columns;
    float* to = y.as<float>() + n * columns;
    if (positions_table.empty()) {
      ForLanes(columns,
               [=](auto d, int64_t i) HWY_ATTR { hn::StoreU(LoadLanes(d, token + i), d, to + i); });
      continue;
    }
    const Positions* position =
        positions_table.as<Positions>() + (first_position + n % sequence_length) * columns;
    ForLanes(columns, [=](auto d, int64_t i) HWY_ATTR {
      hn::StoreU(hn::Add(LoadLanes(d, token + i), LoadLanes(d, position + i)), d, to + i);
    });
  }
}

// Row `row` of a table, `to`, (+)= the sum of `count` rows of dy, the j-th of them row_of(j).
template <class RowOf>
HWY_INLINE void SumRows(const float* dy, int64_t width, int64_t columns, int64_t count,
                        const RowOf& row_of, bool add, float* to) {
  ForLanes(columns, [&](auto d, int64_t i) HWY_ATTR {
    auto sum = add ? hn::LoadU(d, to + i) : hn::Zero(d);
    for (int64_t j = 0; j < count; ++j) {
      sum = hn::Add(sum, hn::LoadU(d, dy + row_of(j) * width + i));
    }
    hn::StoreU(sum, d, to + i);
  });
}

template <class RowOf>
HWY_INLINE void LeaveRow(const float* dy, int64_t width, int64_t count, const RowOf& row_of,
                         int64_t /*row*/, const Adding& add, float* to) {
  SumRows(dy, width, width, count, row_of, add, to);
}

// In float32, and rounded once.
template <class RowOf>
HWY_INLINE void LeaveRow(const float* dy, int64_t width, int64_t count, const RowOf& row_of,
                         int64_t row, const Adding& add, BF16* to) {
  constexpr int64_t kColumns = 16 * kernels::kUnit;
  HWY_ALIGN float sums[kColumns];
  for (int64_t first = 0; first < width; first += kColumns) {
    const int64_t columns = std::min(kColumns, width - first);
    SumRows(dy + first, width, columns, count, row_of, false, sums);
    kernels::HWY_NAMESPACE::RoundRow(sums, first, columns, width, row, add.add, add.rounding_key,
                                     to + first);
  }
}

// `order` has the tokens grouped by id, those of id v at starts[v] .. starts[v + 1].
template <typename T>
void EmbeddingBackwardOf(const TensorView& dy, const TensorView& starts, const TensorView& order,
                         const TensorView& dtable, const Adding& add, int64_t begin, int64_t end) {
  const int64_t columns = dy.columns();
  for (int64_t id = begin; id < end; ++id) {
    const int64_t first = starts.as<int64_t>()[id];
    const int64_t* tokens = order.as<int64_t>() + first;
    const int64_t count = starts.as<int64_t>()[id + 1] - first;
    if (add && count == 0) continue;
    LeaveRow(
        dy.as<float>(), columns, count, [=](int64_t j) HWY_ATTR { return tokens[j]; }, id, add,
        dtable.as<T>() + id * columns);
  }
}

template <typename T>
void PositionsBackwardOf(const TensorView& dy, int64_t sequence_length, const TensorView& dtable,
                         const Adding& add, int64_t begin, int64_t end) {
  const int64_t columns = dy.columns();
  for (int64_t position = begin; position < end; ++position) {
    const int64_t count = position < sequence_length
                              ? (dy.rows() - position + sequence_length - 1) / sequence_length
                              : 0;
    if (add && count == 0) continue;
    LeaveRow(
        dy.as<float>(), columns, count,
        [=](int64_t j) HWY_ATTR { return position + j * sequence_length; }, position, add,
        dtable.as<T>() + position * columns);
  }
}

void AddGatheredBlock(const TensorView& x, const TensorView& token_rows, const TensorView& y,
                      int64_t begin, int64_t end) {
  (IsBF16(x) ? AddGatheredOf<BF16> : AddGatheredOf<float>)(x, token_rows, y, begin, end);
}

void EmbedBlock(const TensorView& ids, const TensorView& tokens_table,
                const TensorView& positions_table, int64_t sequence_length, int64_t first_position,
                const TensorView& y, int64_t begin, int64_t end) {
  using Kernel = decltype(&EmbedOf<float, float>);
  static constexpr Kernel kKernels[2][2] = {{EmbedOf<float, float>, EmbedOf<float, BF16>},
                                            {EmbedOf<BF16, float>, EmbedOf<BF16, BF16>}};
  kKernels[IsBF16(tokens_table)][IsBF16(positions_table)](
      ids, tokens_table, positions_table, sequence_length, first_position, y, begin, end);
}

void EmbeddingBackwardBlock(const TensorView& dy, const TensorView& starts, const TensorView& order,
                            const TensorView& dtable, const Adding& add, int64_t begin,
                            int64_t end) {
  (IsBF16(dtable) ? EmbeddingBackwardOf<BF16>
                  : EmbeddingBackwardOf<float>)(dy, starts, order, dtable, add, begin, end);
}

void PositionsBackwardBlock(const TensorView& dy, int64_t sequence_length, const TensorView& dtable,
                            const Adding& add, int64_t begin, int64_t end) {
  (IsBF16(dtable) ? PositionsBackwardOf<BF16>
                  : PositionsBackwardOf<float>)(dy, sequence_length, dtable, add, begin, end);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace terrace
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace terrace {

HWY_EXPORT(AddGatheredBlock);
HWY_EXPORT(EmbedBlock);
HWY_EXPORT(EmbeddingBackwardBlock);
HWY_EXPORT(PositionsBackwardBlock);

namespace {

// Throws InternalError when an index in `rows` (i32 or i64) is not in [0, count): a wild one would
// read or write the memory of another tensor.
template <typename Index>
void CheckIndices(const TensorView& rows, int64_t count) {
  for (const Index row : rows.span<Index>()) {
    TERRACE_CHECK(row >= 0 && row < count, "{}: {} is not in [0, {})", rows.name, row, count);
  }
}

}  // namespace

void CpuBackend::GatherRows(TensorView x, TensorView row_tokens, TensorView y) {
  CheckMatrix(x);
  CheckDType(row_tokens, DType::kI64);
  CheckShape(row_tokens, {row_tokens.rows()});
  CheckShape(y, {row_tokens.rows(), x.columns()});
  CheckDType(y, x.dtype);
  if (dry()) return;
  CheckIndices<int64_t>(row_tokens, x.rows());
  const int64_t row_bytes = x.columns() * BytesOf(x.dtype);
  ParallelFor(y.rows(), RowsPerBlock(x.columns()), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      std::memcpy(y.data + row * row_bytes, x.data + row_tokens.as<int64_t>()[row] * row_bytes,
                  row_bytes);
    }
  });
}

void CpuBackend::AddGatheredRows(TensorView x, TensorView token_rows, TensorView y) {
  CheckMatrix(x);
  CheckFloat(x);
  CheckMatrix(token_rows);
  CheckDType(token_rows, DType::kI64);
  CheckShape(y, {token_rows.rows(), x.columns()});
  CheckDType(y, DType::kF32);
  if (dry()) return;
  CheckIndices<int64_t>(token_rows, x.rows());
  ParallelFor(y.rows(), RowsPerBlock(x.columns()), [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(AddGatheredBlock)(x, token_rows, y, begin, end);
  });
}

void CpuBackend::Embedding(TensorView ids, TensorView tokens_table, TensorView positions_table,
                           int64_t sequence_length, int64_t first_position, TensorView y) {
  CheckMatrix(tokens_table);
  CheckFloat(tokens_table);
  CheckDType(ids, DType::kI32);
  CheckShape(ids, {ids.rows()});
  CheckShape(y, {ids.rows(), tokens_table.columns()});
  CheckDType(y, DType::kF32);
  if (!positions_table.empty()) {
    CheckShape(positions_table, {positions_table.rows(), tokens_table.columns()});
    CheckFloat(positions_table);
    const int64_t last = first_position + std::min(sequence_length, ids.rows());
    TERRACE_CHECK(sequence_length > 0 && first_position >= 0 && last <= positions_table.rows(),
                  "{}: positions {} to {} of {}", positions_table.name, first_position, last,
                  positions_table.rows());
  }
  if (dry()) return;
  CheckIndices<int32_t>(ids, tokens_table.rows());
  ParallelFor(ids.rows(), RowsPerBlock(y.columns()), [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(EmbedBlock)
    (ids, tokens_table, positions_table, sequence_length, first_position, y, begin, end);
  });
}

void CpuBackend::EmbeddingBackward(TensorView dy, TensorView ids, TensorView dtable, Adding add) {
  CheckMatrix(dtable);
  CheckFloat(dtable);
  CheckDType(ids, DType::kI32);
  CheckShape(ids, {ids.rows()});
  CheckShape(dy, {ids.rows(), dtable.columns()});
  CheckDType(dy, DType::kF32);
  const int64_t vocabulary = dtable.rows();
  const Arena::Frame frame(arena());
  const TensorView starts =
      arena().Allocate(Memory::kScratch, DType::kI64, {vocabulary + 2}, "EmbeddingBackward.starts");
  const TensorView order =
      arena().Allocate(Memory::kScratch, DType::kI64, {ids.rows()}, "EmbeddingBackward.order");
  if (dry()) return;
  CheckIndices<int32_t>(ids, vocabulary);

  // A stable counting sort. Counts are kept two places up and turned into sums one place up,
  // so that placing the tokens of an id moves starts[id + 1] from its beginning to its end.
  const std::span<int64_t> start = starts.span<int64_t>();
  std::fill(start.begin(), start.end(), 0);
  const std::span<const int32_t> id = ids.span<int32_t>();
  for (const int32_t v : id) ++start[v + 2];
  for (int64_t v = 0; v < vocabulary; ++v) start[v + 2] += start[v + 1];
  for (int64_t n = 0; n < ids.rows(); ++n) order.as<int64_t>()[start[id[n] + 1]++] = n;

  ParallelFor(vocabulary, RowsPerBlock(dtable.columns()), [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(EmbeddingBackwardBlock)(dy, starts, order, dtable, add, begin, end);
  });
}

void CpuBackend::PositionsBackward(TensorView dy, int64_t sequence_length, TensorView dtable,
                                   Adding add) {
  CheckMatrix(dtable);
  CheckFloat(dtable);
  CheckShape(dy, {dy.rows(), dtable.columns()});
  CheckDType(dy, DType::kF32);
  TERRACE_CHECK(sequence_length > 0 && std::min(sequence_length, dy.rows()) <= dtable.rows(),
                "{}: {} positions of {}", dtable.name, sequence_length, dtable.rows());
  if (dry()) return;
  ParallelFor(dtable.rows(), RowsPerBlock(dtable.columns()), [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(PositionsBackwardBlock)(dy, sequence_length, dtable, add, begin, end);
  });
}

}  // namespace terrace
#endif  // HWY_ONCE
