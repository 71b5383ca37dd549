// The products of amx_products.h over any unit that has tiles and vectors of 64 bytes: the
// processor's own (amx_products.cpp), or one emulated in plain C++, with which tests reach every
// index computation on any machine. All functions are templates over that unit with internal
// linkage, so that code for AVX-512 never stands in for another file's.
//
// A unit has
//   Vec             64 bytes, which operations take as 16-, 32- or 64-bit lanes
//   Session         while one lives, its thread has 8 tiles of 16 rows of 64 bytes
//   Zero<t>, Load<t>, Store<t>, Multiply<sum, left, right>   on tiles, named by number
// and the vector operations that are used below, each one instruction.
//
// What is no template is in amx_layout.h, since amx_products.cpp includes this file where AVX-512
// is on.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "backend/cpu/amx_layout.h"
#include "backend/cpu/amx_products.h"
#include "core/dtype.h"

namespace terrace {
namespace {

// Lines of memory to bring nearer while products run, some with each step.
class Ahead {
 public:
  Ahead() = default;
  // `rows` of `row_bytes` each, `stride` bytes apart, within `steps` steps.
  Ahead(const std::byte* first, int64_t rows, int64_t row_bytes, int64_t stride, int64_t steps)
      : row_(first), rows_(rows), row_bytes_(row_bytes), stride_(stride) {
    const int64_t lines = rows * ((row_bytes + kLine - 1) / kLine);
    lines_a_step_ = (lines + steps - 1) / steps;
  }

  [[gnu::always_inline]] void Step() {
    for (int64_t line = 0; line < lines_a_step_ && rows_ > 0; ++line) {
      __builtin_prefetch(row_ + offset_, /*write=*/0, /*second-level cache*/ 2);
      offset_ += kLine;
      if (offset_ >= row_bytes_) {
        offset_ = 0;
        row_ += stride_;
        --rows_;
      }
    }
  }

 private:
  static constexpr int64_t kLine = 64;
  const std::byte* row_ = nullptr;
  int64_t rows_ = 0, row_bytes_ = 0, stride_ = 0, lines_a_step_ = 0;
  int64_t offset_ = 0;
};

// Unpacking two rows of 32 columns gives vectors of 16 pairs, the low one and the high one, which
// stay within blocks of 128 bits: the column whose pair is the i-th of both.
constexpr int64_t PairColumn(int64_t i) { return (i & 3) + 8 * (i >> 2 & 3) + 4 * (i >> 4); }

// r as 16 x 16 words of 32 bits.
template <class Unit>
[[gnu::always_inline]] inline void Transpose(typename Unit::Vec (&r)[16]) {
  using Vec = typename Unit::Vec;
  Vec pairs[16];
  // Block b of pairs[2i] has columns 4b and 4b + 1 of rows 2i and 2i + 1; the next one the others.
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = Unit::UnpackLow32(r[i], r[i + 1]);
    pairs[i + 1] = Unit::UnpackHigh32(r[i], r[i + 1]);
  }
  // Block b of r[4i + j] has column 4b + j of rows 4i to 4i + 3.
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {
    r[i] = Unit::UnpackLow64(pairs[i], pairs[i + 2]);
    r[i + 1] = Unit::UnpackHigh64(pairs[i], pairs[i + 2]);
    r[i + 2] = Unit::UnpackLow64(pairs[i + 1], pairs[i + 3]);
    r[i + 3] = Unit::UnpackHigh64(pairs[i + 1], pairs[i + 3]);
  }
  // A transpose of 4 x 4 blocks for each j.
#pragma GCC unroll 16
  for (int j = 0; j < 4; ++j) {
    const Vec upper_even = Unit::EvenBlocks(r[j], r[4 + j]);
    const Vec upper_odd = Unit::OddBlocks(r[j], r[4 + j]);
    const Vec lower_even = Unit::EvenBlocks(r[8 + j], r[12 + j]);
    const Vec lower_odd = Unit::OddBlocks(r[8 + j], r[12 + j]);
    r[j] = Unit::EvenBlocks(upper_even, lower_even);
    r[4 + j] = Unit::EvenBlocks(upper_odd, lower_odd);
    r[8 + j] = Unit::OddBlocks(upper_even, lower_even);
    r[12 + j] = Unit::OddBlocks(upper_odd, lower_odd);
  }
}

// Stored rows of bfloat16, of which `rows` times `columns` exist; the rest reads as zeros.
struct Source {
  const std::byte* data;
  int64_t stride;  // bytes
  int64_t rows, columns;

  bool full() const { return rows >= kPanel && columns >= kPanel; }
};

template <class Unit, bool kFull>
[[gnu::always_inline]] inline typename Unit::Vec RowOf(const Source& source, int64_t row) {
  if constexpr (kFull) return Unit::Load(source.data + row * source.stride);
  if (row >= source.rows) return Unit::ZeroVec();
  return Unit::LoadPart(source.data + row * source.stride,
                        std::min<int64_t>(source.columns, kPanel));
}

// Left tiles of rows that are stored as rows.
template <class Unit, bool kFull>
void PackLeftRows(const Source& source, std::byte* to) {
#pragma GCC unroll 16
  for (int64_t row = 0; row < kPanel; ++row) {
    Unit::StoreVec(to + row * kTileRowBytes, RowOf<Unit, kFull>(source, row));
  }
}

// Right tiles of columns that are stored as rows.
template <class Unit, bool kFull>
void PackRightRows(const Source& source, std::byte* to) {
  for (int64_t first = 0; first < kPanel; first += kTileRows) {
    typename Unit::Vec r[16];
#pragma GCC unroll 16
    for (int64_t i = 0; i < 16; ++i) r[i] = RowOf<Unit, kFull>(source, first + i);
    Transpose<Unit>(r);
#pragma GCC unroll 16
    for (int64_t i = 0; i < 16; ++i) {
      Unit::StoreVec(to + (first + i) * kTileRowBytes, r[i]);
    }
  }
}

// Right tiles of columns. `ordered`: the first tile has columns 0 to 15; otherwise both have them
// in the order of PairColumn, which saves two instructions of four.
template <class Unit, bool kFull>
void PackRightColumns(const Source& source, bool ordered, std::byte* to) {
#pragma GCC unroll 16
  for (int64_t pair = 0; pair < 16; ++pair) {
    auto even = RowOf<Unit, kFull>(source, 2 * pair);
    auto odd = RowOf<Unit, kFull>(source, 2 * pair + 1);
    if (ordered) {
      even = Unit::ZipHalves64(even);
      odd = Unit::ZipHalves64(odd);
    }
    Unit::StoreVec(to + pair * kTileRowBytes, Unit::UnpackLow16(even, odd));
    Unit::StoreVec(to + kTileBytes + pair * kTileRowBytes, Unit::UnpackHigh16(even, odd));
  }
}

// Left tiles of rows that are stored as columns.
template <class Unit, bool kFull>
void PackLeftColumns(const Source& source, std::byte* to) {
  const auto pack = [&](auto unpack, int64_t first) {
    typename Unit::Vec r[16];
#pragma GCC unroll 16
    for (int64_t pair = 0; pair < 16; ++pair) {
      r[pair] =
          unpack(RowOf<Unit, kFull>(source, 2 * pair), RowOf<Unit, kFull>(source, 2 * pair + 1));
    }
    Transpose<Unit>(r);
#pragma GCC unroll 16
    for (int64_t i = 0; i < 16; ++i) {
      Unit::StoreVec(to + PairColumn(first + i) * kTileRowBytes, r[i]);
    }
  };
  pack([](auto a, auto b) { return Unit::UnpackLow16(a, b); }, 0);
  pack([](auto a, auto b) { return Unit::UnpackHigh16(a, b); }, 16);
}

// to[32][32] of float32, `stride` bytes from row to row, = (`fresh`) or += a left panel times a
// right panel. With one tile of a panel only the first 16 rows or columns of `to`.
template <class Unit, int kLeftTiles, int kRightTiles>
void MultiplyPanels(const std::byte* left, const std::byte* right, int64_t steps, std::byte* to,
                    int64_t stride, bool fresh, Ahead& ahead) {
  std::byte* const lower = to + kTileRows * stride;
  if (fresh) {
    Unit::template Zero<0>();
    if constexpr (kRightTiles > 1) Unit::template Zero<1>();
    if constexpr (kLeftTiles > 1) Unit::template Zero<2>();
    if constexpr (kLeftTiles > 1 && kRightTiles > 1) Unit::template Zero<3>();
  } else {
    Unit::template Load<0>(to, stride);
    if constexpr (kRightTiles > 1) Unit::template Load<1>(to + kTileRowBytes, stride);
    if constexpr (kLeftTiles > 1) Unit::template Load<2>(lower, stride);
    if constexpr (kLeftTiles > 1 && kRightTiles > 1) {
      Unit::template Load<3>(lower + kTileRowBytes, stride);
    }
  }
  Ahead lines = ahead;  // in registers
  for (int64_t step = 0; step < steps; ++step) {
    // All loads first: a product waits for its tiles, and loads that come after wait behind it.
    Unit::template Load<6>(right, kTileRowBytes);
    Unit::template Load<4>(left, kTileRowBytes);
    if constexpr (kRightTiles > 1) Unit::template Load<7>(right + kTileBytes, kTileRowBytes);
    if constexpr (kLeftTiles > 1) Unit::template Load<5>(left + kTileBytes, kTileRowBytes);
    Unit::template Multiply<0, 4, 6>();
    if constexpr (kRightTiles > 1) Unit::template Multiply<1, 4, 7>();
    if constexpr (kLeftTiles > 1) Unit::template Multiply<2, 5, 6>();
    if constexpr (kLeftTiles > 1 && kRightTiles > 1) Unit::template Multiply<3, 5, 7>();
    left += kStepBytes;
    right += kStepBytes;
    lines.Step();
  }
  ahead = lines;
  Unit::template Store<0>(to, stride);
  if constexpr (kRightTiles > 1) Unit::template Store<1>(to + kTileRowBytes, stride);
  if constexpr (kLeftTiles > 1) Unit::template Store<2>(lower, stride);
  if constexpr (kLeftTiles > 1 && kRightTiles > 1) {
    Unit::template Store<3>(lower + kTileRowBytes, stride);
  }
}

template <class Unit>
class AmxRun {
 public:
  AmxRun(const Product& product, const AmxBlocking& blocking, std::byte* scratch)
      : product_(product),
        blocking_(blocking),
        kind_(AmxKindOf(product)),
        in_place_(SumsInPlace(product)),
        keeps_sums_(KeepsSums(product, blocking)),
        c_bytes_(BytesOf(product.c.dtype)),
        c_stride_(product.c.stride * c_bytes_),
        streams_(kind_ == AmxKind::kWeightGradient && !product.add &&
                 (product.k <= blocking.depth || !in_place_) &&
                 reinterpret_cast<uintptr_t>(product.c.data) % kTileRowBytes == 0 &&
                 c_stride_ % kTileRowBytes == 0),
        resident_(scratch) {
    const AmxScratch parts = AmxScratchOf(product, blocking);
    streamed_ = scratch + parts.streamed;
    sums_ = scratch + parts.sums;
    turned_ = scratch + parts.turned;
  }

  void Run() {
    if (product_.k == 0) {
      for (int64_t row = 0; row < product_.m && !product_.add; ++row) {
        std::memset(CAt(row, 0), 0, static_cast<size_t>(product_.n * c_bytes_));
      }
      return;
    }
    const typename Unit::Session session;
    // c holds the sums from one depth to the next, or a group's are in scratch.
    const int64_t group = keeps_sums_ ? blocking_.group : product_.n;
    for (block_ = 0; block_ < product_.m; block_ += blocking_.block) {
      block_rows_ = std::min(blocking_.block, product_.m - block_);
      for (group_ = 0; group_ < product_.n; group_ += group) {
        const int64_t group_end = std::min(group_ + group, product_.n);
        for (depth_ = 0; depth_ < product_.k; depth_ += blocking_.depth) {
          depth_size_ = std::min(blocking_.depth, product_.k - depth_);
          // One depth is packed once for all groups.
          if (group_ == 0 || product_.k > blocking_.depth) PackResident();
          for (panel_ = group_; panel_ < group_end; panel_ += blocking_.panel) {
            panel_columns_ = std::min(blocking_.panel, group_end - panel_);
            PackStreamed();
            MultiplyPanel(group_end);
          }
        }
      }
    }
    if (streams_) Unit::Fence();
  }

 private:
  using Vec = typename Unit::Vec;

  int64_t steps() const { return (depth_size_ + kDepthStep - 1) / kDepthStep; }
  int64_t panel_bytes() const { return steps() * kStepBytes; }

  // Operand a, or b, from a row or column of c and a position along k on.
  static const std::byte* At(const Operand& operand, int64_t row, int64_t column) {
    return operand.data + (row * operand.stride + column) * BytesOf(DType::kBF16);
  }

  template <class Pack>  // called with a source and where its two tiles go
  void PackPanels(const Operand& operand, int64_t first, int64_t count, bool along_k, std::byte* to,
                  const Pack& pack) const {
    const int64_t stride = operand.stride * BytesOf(DType::kBF16);
    for (int64_t i = 0; i < count; i += kPanel) {
      for (int64_t k = 0; k < depth_size_; k += kDepthStep, to += kStepBytes) {
        // `along_k`: a stored row runs along k.
        const Source source =
            along_k
                ? Source{At(operand, first + i, depth_ + k), stride, count - i, depth_size_ - k}
                : Source{At(operand, depth_ + k, first + i), stride, depth_size_ - k, count - i};
        pack(source, to);
      }
    }
  }

  // Calls f with std::true_type where a source has 32 rows of 32 columns, else with false_type.
  template <class F>
  static void IfFull(const Source& source, const F& f) {
    if (source.full()) {
      f(std::true_type());
    } else {
      f(std::false_type());
    }
  }

  void PackResident() {
    switch (kind_) {
      case AmxKind::kForward:
        PackPanels(product_.a, block_, block_rows_, true, resident_,
                   [](const Source& source, std::byte* to) {
                     IfFull(source, [&](auto full) { PackRightRows<Unit, full()>(source, to); });
                   });
        return;
      case AmxKind::kInputGradient:
        PackPanels(product_.a, block_, block_rows_, true, resident_,
                   [](const Source& source, std::byte* to) {
                     IfFull(source, [&](auto full) { PackLeftRows<Unit, full()>(source, to); });
                   });
        return;
      case AmxKind::kWeightGradient:
        PackPanels(product_.a, block_, block_rows_, false, resident_,
                   [](const Source& source, std::byte* to) {
                     IfFull(source, [&](auto full) { PackLeftColumns<Unit, full()>(source, to); });
                   });
    }
  }

  void PackStreamed() {
    if (kind_ == AmxKind::kForward) {
      PackPanels(product_.b, panel_, panel_columns_, true, streamed_,
                 [](const Source& source, std::byte* to) {
                   IfFull(source, [&](auto full) { PackLeftRows<Unit, full()>(source, to); });
                 });
      return;
    }
    PackPanels(product_.b, panel_, panel_columns_, false, streamed_,
               [ordered = in_place_](const Source& source, std::byte* to) {
                 IfFull(source,
                        [&](auto full) { PackRightColumns<Unit, full()>(source, ordered, to); });
               });
  }

  // The next panel of b, while this one is multiplied.
  Ahead NextPanel(int64_t group_end) const {
    const int64_t next = panel_ + blocking_.panel;
    if (next >= group_end) return {};
    const int64_t columns = std::min(blocking_.panel, group_end - next);
    const auto panels = [](int64_t size) { return (size + kPanel - 1) / kPanel; };
    const int64_t all_steps = panels(block_rows_) * panels(panel_columns_) * steps();
    const int64_t stride = product_.b.stride * BytesOf(DType::kBF16);
    if (kind_ == AmxKind::kForward) {
      return {At(product_.b, next, depth_), columns, depth_size_ * BytesOf(DType::kBF16), stride,
              all_steps};
    }
    return {At(product_.b, depth_, next), depth_size_, columns * BytesOf(DType::kBF16), stride,
            all_steps};
  }

  // What is in `resident_` and `streamed_`.
  void MultiplyPanel(int64_t group_end) {
    const bool reads_c = in_place_ && (product_.add || depth_ > 0);
    // A short sum waits for c rather than for b, and its panel of b serves many rows.
    const bool c_ahead = reads_c && kind_ == AmxKind::kWeightGradient;
    Ahead ahead = c_ahead ? Ahead() : NextPanel(group_end);
    for (int64_t row = 0; row < block_rows_; row += kPanel) {
      for (int64_t column = 0; column < panel_columns_; column += kPanel) {
        if (c_ahead) {
          int64_t next_row = row, next_column = column + kPanel;
          if (next_column >= panel_columns_) next_row += kPanel, next_column = 0;
          const int64_t rows = std::min(kPanel, block_rows_ - next_row);
          const int64_t columns = std::min(kPanel, panel_columns_ - next_column);
          ahead = rows <= 0 ? Ahead()
                            : Ahead(CAt(block_ + next_row, panel_ + next_column), rows,
                                    columns * c_bytes_, c_stride_, steps());
        }
        MultiplyBlock(row, column, ahead);
      }
    }
  }

  std::byte* CAt(int64_t row, int64_t column) const {
    return product_.c.data + row * c_stride_ + column * c_bytes_;
  }

  // 32 rows and columns of c or fewer, `row` and `column` counted from the block and the panel.
  void MultiplyBlock(int64_t row, int64_t column, Ahead& ahead) {
    const int64_t rows = std::min(kPanel, block_rows_ - row);
    const int64_t columns = std::min(kPanel, panel_columns_ - column);
    const std::byte* resident = resident_ + row / kPanel * panel_bytes();
    const std::byte* streamed = streamed_ + column / kPanel * panel_bytes();
    std::byte* const c = CAt(block_ + row, panel_ + column);
    if (in_place_) {
      const bool fresh = !product_.add && depth_ == 0;
      const bool whole = rows == kPanel && columns == kPanel;
      if (whole && !streams_) {
        Multiply(resident, streamed, rows, columns, c, c_stride_, fresh, ahead);
        return;
      }
      if (!fresh) CopyToSums(c, rows, columns);
      Multiply(resident, streamed, rows, columns, sums_, kSumsStride, fresh, ahead);
      StoreRows(sums_, rows, columns, c, /*add=*/false);
      return;
    }
    std::byte* sums = sums_;
    if (keeps_sums_) {
      const int64_t index =
          row / kPanel * (blocking_.group / kPanel) + (panel_ - group_ + column) / kPanel;
      sums += index * kBlockBytes;
    }
    const bool last = depth_ + blocking_.depth >= product_.k;
    if (kind_ == AmxKind::kForward) {
      Multiply(streamed, resident, columns, rows, sums, kSumsStride, depth_ == 0, ahead);
      if (last) StoreTransposed(sums, rows, columns, c);
    } else {
      // Unordered columns are spread over both tiles.
      Multiply(resident, streamed, rows, kPanel, sums, kSumsStride, depth_ == 0, ahead);
      if (last) StoreRows(sums, rows, columns, c, product_.add);
    }
  }

  // `left_size` and `right_size`: rows and columns that exist, of 32.
  void Multiply(const std::byte* left, const std::byte* right, int64_t left_size,
                int64_t right_size, std::byte* to, int64_t stride, bool fresh, Ahead& ahead) const {
    const bool two_left = left_size > kTileRows;
    const bool two_right = right_size > kTileRows;
    if (two_left && two_right) {
      MultiplyPanels<Unit, 2, 2>(left, right, steps(), to, stride, fresh, ahead);
    } else if (two_left) {
      MultiplyPanels<Unit, 2, 1>(left, right, steps(), to, stride, fresh, ahead);
    } else if (two_right) {
      MultiplyPanels<Unit, 1, 2>(left, right, steps(), to, stride, fresh, ahead);
    } else {
      MultiplyPanels<Unit, 1, 1>(left, right, steps(), to, stride, fresh, ahead);
    }
  }

  // Existing sums of float32 from c.
  void CopyToSums(const std::byte* c, int64_t rows, int64_t columns) const {
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t half = 0; half < 2; ++half) {
        const int64_t count = std::clamp<int64_t>(columns - half * 16, 0, 16);
        Unit::StoreVec(sums_ + row * kSumsStride + half * kTileRowBytes,
                       Unit::LoadPart(c + row * c_stride_ + half * kTileRowBytes, 2 * count));
      }
    }
  }

  // Rows of 32 sums to c, which they are added to if `add`. For a c of bfloat16 the columns are in
  // the order of PairColumn.
  void StoreRows(const std::byte* sums, int64_t rows, int64_t columns, std::byte* c,
                 bool add) const {
    for (int64_t row = 0; row < rows; ++row, sums += kSumsStride, c += c_stride_) {
      Vec low = Unit::Load(sums);
      Vec high = Unit::Load(sums + kTileRowBytes);
      if (product_.c.dtype == DType::kF32) {
        const int64_t low_count = std::min<int64_t>(columns, 16);
        const int64_t high_count = std::max<int64_t>(columns - 16, 0);
        if (add) {
          low = Unit::Add32(Unit::LoadPart(c, 2 * low_count), low);
          high = Unit::Add32(Unit::LoadPart(c + kTileRowBytes, 2 * high_count), high);
        }
        StoreLanes(c, low, 2 * low_count);
        StoreLanes(c + kTileRowBytes, high, 2 * high_count);
        continue;
      }
      if (add) {
        // A bfloat16 above 16 zeros is the same number in float32.
        const Vec before = Unit::LoadPart(c, columns);
        low = Unit::Add32(Unit::UnpackLow16(Unit::ZeroVec(), before), low);
        high = Unit::Add32(Unit::UnpackHigh16(Unit::ZeroVec(), before), high);
      }
      StoreLanes(c, Unit::ZipHalves64(Unit::RoundToBF16(low, high)), columns);
    }
  }

  // `count` lanes of 16 bits.
  void StoreLanes(std::byte* to, Vec value, int64_t count) const {
    if (count < 32) {
      Unit::StorePart(to, value, count);
    } else if (streams_) {
      Unit::Stream(to, value);
    } else {
      Unit::StoreVec(to, value);
    }
  }

  // The transpose of sums, whose rows are c's columns.
  void StoreTransposed(const std::byte* sums, int64_t rows, int64_t columns, std::byte* c) const {
    const auto row_of = [&](int64_t column) {  // of the 16 rows of c that are next
      return Unit::Load(sums + column * kSumsStride);
    };
    for (int64_t first = 0; first < rows; first += 16, sums += kTileRowBytes) {
      const int64_t count = std::min<int64_t>(rows - first, 16);
      std::byte* to = c + first * c_stride_;
      if (product_.c.dtype == DType::kBF16 && !product_.add) {
        // Two columns of c make a word of 32 bits.
        Vec r[16];
#pragma GCC unroll 16
        for (int64_t i = 0; i < 16; ++i) {
          r[i] = Unit::ZipHalves16(Unit::RoundToBF16(row_of(2 * i), row_of(2 * i + 1)));
        }
        Transpose<Unit>(r);
        if (count == 16 && columns == kPanel) {
#pragma GCC unroll 16
          for (int64_t i = 0; i < 16; ++i) Unit::StoreVec(to + i * c_stride_, r[i]);
        } else {
#pragma GCC unroll 16
          for (int64_t i = 0; i < 16; ++i) {
            if (i < count) Unit::StorePart(to + i * c_stride_, r[i], columns);
          }
        }
        continue;
      }
      for (int64_t half = 0; half < 2; ++half) {
        Vec r[16];
#pragma GCC unroll 16
        for (int64_t i = 0; i < 16; ++i) {
          const int64_t column = 16 * half + i;
          r[i] = row_of(product_.c.dtype == DType::kF32 ? column : PairColumn(column));
        }
        Transpose<Unit>(r);
#pragma GCC unroll 16
        for (int64_t i = 0; i < 16; ++i) {
          Unit::StoreVec(turned_ + i * kSumsStride + half * kTileRowBytes, r[i]);
        }
      }
      StoreRows(turned_, count, columns, to, product_.add);
    }
  }

  static constexpr int64_t kSumsStride = kPanel * static_cast<int64_t>(sizeof(float));

  const Product& product_;
  const AmxBlocking& blocking_;
  const AmxKind kind_;
  const bool in_place_;
  const bool keeps_sums_;
  const int64_t c_bytes_, c_stride_;
  // A fresh gradient is written past the caches: to fetch its old value would double the traffic.
  const bool streams_;
  std::byte* const resident_;
  std::byte *streamed_, *sums_, *turned_;
  // Where the loops are: rows of c, columns of c, positions along k.
  int64_t block_ = 0, block_rows_ = 0, group_ = 0, panel_ = 0, panel_columns_ = 0;
  int64_t depth_ = 0, depth_size_ = 0;
};

}  // namespace
}  // namespace terrace
