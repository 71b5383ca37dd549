// Linear layers and their gradients. Letters as in backend/backend.h.
//
// Every product is cut into tiles of its result, each computed by one thread. How depends on
// shapes, dtypes and the processor, never on the number of threads: neither does the result. Where
// a tile's operands cannot be multiplied as they lie, its thread copies them first: bfloat16 as
// float32 where the processor has no bfloat16 products, dy transposed where that is faster, a few
// rows as many as a kernel is made for.
#include <algorithm>
#include <array>
#include <span>
#include <vector>

#include "backend/cpu/amx_products.h"
#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/matmul.h"
#include "backend/cpu/matrix_block.h"
#include "backend/cpu/rounded_sums.h"
#include "core/parallel.h"

namespace terrace {
namespace {

// --- How products are cut: measured, see docs/LOG.md ---

struct TileSize {
  int64_t rows, columns;
};
// Larger tiles copy and pack their operands less often. Tiles are halved, down to the least, until
// there are enough of them for a few cores.
struct Cut {
  TileSize tile;
  int64_t enough_tiles;
};
constexpr Cut kCut{{256, 256}, 4};
constexpr Cut kCutWithSizedKernels{{512, 256}, 4};  // which pack w anew for each tile
constexpr Cut kCutOnAmx{{512, 512}, 2};             // where packing takes longest beside products
constexpr TileSize kLeastTile{64, 128};
// Of the summed index, how much is copied at a time: the operands of a tile then stay in the
// second-level cache between being copied and being used.
constexpr int64_t kCopiedDepth = 512;
constexpr int64_t kCopiedTokens = 256;
// Rows of copies are longer than what is in them by so much: with a power of two between them they
// would compete for few lines of the cache.
constexpr int64_t kStridePadding = 16;

// Kernels for one size are made for few row counts, since making one takes as long as several
// products: 1, 2, 4, 8, then less than an eighth apart from 64 on. The distance to the next:
int64_t KernelStep(int64_t rows) {
  if (rows <= 8) return rows > 4 ? 4 : rows > 2 ? 2 : 1;
  int64_t step = 8;
  for (int64_t end = 128; end < rows; end *= 2) step *= 2;
  return step;
}
// A kernel's rows that so many are padded to.
int64_t PaddedRows(int64_t rows) {
  const int64_t step = KernelStep(rows);
  return (rows + step - 1) / step * step;
}

TileSize TileFor(const Cut& cut, Kernel kernel, int64_t rows, int64_t columns) {
  TileSize tile = cut.tile;
  const auto tiles = [&] {
    return ((rows + tile.rows - 1) / tile.rows) * ((columns + tile.columns - 1) / tile.columns);
  };
  while (tiles() < cut.enough_tiles && tile.columns > kLeastTile.columns) tile.columns /= 2;
  while (tiles() < cut.enough_tiles && tile.rows > kLeastTile.rows) tile.rows /= 2;
  tile = {std::max<int64_t>(1, std::min(tile.rows, rows)),
          std::max<int64_t>(1, std::min(tile.columns, columns))};
  // Full tiles, then, are not padded, and others find the rows to pad with among all rows.
  if (kernel == Kernel::kThisSize) tile.rows -= tile.rows % KernelStep(tile.rows);
  return tile;
}

// The products c[m, n] (+)= a[m, k] * b[k, n] of one call: one, or one a group, each of which has
// some rows of a and c, and a b of its own.
struct Call {
  int64_t groups;
  int64_t m;  // of all groups together
  int64_t n, k;
  Operand a, b, c;  // Group says where b and c are
  bool add;
};

struct Group {
  std::byte *b, *c;
  int64_t row;   // its first, among those of all groups
  int64_t rows;  // m
};

// How a call is computed. A function of the call and the processor.
struct Method {
  DType inputs;      // of the products; operands of another dtype are copied
  DType output;      // of the products; c is copied where it has another
  Kernel kernel;     // kThisSize only for a that is not transposed
  bool transpose_a;  // copy a, whose rows lie across the summed index, so that they lie along it
  bool transpose_b;  // the same of b's columns
  int64_t depth;     // of k in one product: further ones add
  TileSize tile;

  bool copies_a(const Call& call) const { return transpose_a || call.a.dtype != inputs; }
  bool copies_b(const Call& call) const { return transpose_b || call.b.dtype != inputs; }
  int64_t kernel_rows(int64_t rows) const {
    return kernel == Kernel::kThisSize ? PaddedRows(rows) : rows;
  }
};

bool IsNative(const Matmul& matmul, DType a, DType b) {
  return a == b && (a == DType::kF32 || matmul.HasBF16());
}

// Without AVX-512, kernels multiply fastest where both operands lie along the summed index, by so
// much that transposing them first pays.
bool TransposesOperands(const Matmul& matmul) { return !matmul.sized_kernels(); }

const Cut& CutFor(const Matmul& matmul, bool amx) {
  if (amx) return kCutOnAmx;
  return matmul.sized_kernels() ? kCutWithSizedKernels : kCut;
}

// Of y = x * w^T and dx = dy * w.
Method RowMethod(const Matmul& matmul, const Call& call) {
  const bool native = IsNative(matmul, call.a.dtype, call.b.dtype);
  const DType inputs = native ? call.a.dtype : DType::kF32;
  const bool narrow = inputs == DType::kBF16;
  const bool transpose = TransposesOperands(matmul) && !call.b.transposed;
  const AmxKind kind = call.b.transposed ? AmxKind::kForward : AmxKind::kInputGradient;
  const bool amx =
      narrow && matmul.UsesAmx() && call.m <= call.groups * kAmxMaxRows[static_cast<int>(kind)];
  // What kernels for one size do better: w^T, and bfloat16.
  const bool sized = !amx && matmul.sized_kernels() && (call.b.transposed || narrow);
  const Kernel kernel = sized ? Kernel::kThisSize : Kernel::kAnySize;
  const bool copies = !native || transpose;
  return {.inputs = inputs,
          .output = narrow && (sized || amx) ? call.c.dtype : DType::kF32,
          .kernel = kernel,
          .transpose_a = false,
          .transpose_b = transpose,
          .depth = std::max<int64_t>(1, copies ? std::min(call.k, kCopiedDepth) : call.k),
          .tile = TileFor(CutFor(matmul, amx), kernel, call.m, call.n)};
}

// Of dw = dy^T * x: a is transposed, and k, the number of tokens, is data.
Method WeightMethod(const Matmul& matmul, const Call& call) {
  const bool native = IsNative(matmul, call.a.dtype, call.b.dtype);
  const DType inputs = native ? call.a.dtype : DType::kF32;
  const bool amx = inputs == DType::kBF16 && matmul.UsesAmx();
  const bool transpose = TransposesOperands(matmul);
  const bool copies = !native || transpose;
  return {.inputs = inputs,
          .output = DType::kF32,  // gradients of bfloat16 are slices of float32: LeaveRounded
          .kernel = Kernel::kAnySize,
          .transpose_a = copies,
          .transpose_b = transpose,
          .depth = copies ? kCopiedTokens : std::max<int64_t>(1, call.k),
          .tile = TileFor(CutFor(matmul, amx), Kernel::kAnySize, call.m, call.n)};
}

struct Tile {
  int64_t group, row, rows, column, columns;
};

// Runs the tiles of a call. What a tile takes and how it is computed are one function each of call
// and method, for the plan as for the run.
class TiledProducts {
 public:
  TiledProducts(Matmul& matmul, const Call& call, const Method& method)
      : matmul_(matmul), call_(call), method_(method) {
    const TileSize tile = method.tile;
    const auto bytes = [](int64_t elements, DType dtype) {
      return Arena::Aligned(elements * BytesOf(dtype));
    };
    if (method.copies_a(call)) a_bytes_ = bytes(tile.rows * a_copy_stride(), method.inputs);
    if (method.copies_b(call)) {
      const int64_t b_rows = b_copy_transposed() ? tile.columns : method.depth;
      b_bytes_ = bytes(b_rows * b_copy_stride(), method.inputs);
    }
    if (call.c.dtype != method.output || method.kernel == Kernel::kThisSize) {
      c_bytes_ = bytes(tile.rows * tile.columns, method.output);
    }
    ForEachProduct([&](const Product& product) {
      pad_bytes_ = std::max(pad_bytes_, Arena::Aligned(matmul.ScratchBytes(product)));
    });
  }

  // Of one thread.
  int64_t scratch_bytes() const { return a_bytes_ + b_bytes_ + c_bytes_ + pad_bytes_; }

  // Consecutive tiles share their columns, so that what is copied of b is used again.
  void AddTiles(const Group& group, std::vector<Tile>& tiles) {
    const auto [rows, columns] = method_.tile;
    for (int64_t column = 0; column < call_.n; column += columns) {
      for (int64_t row = 0; row < group.rows; row += rows) {
        tiles.push_back({static_cast<int64_t>(groups_.size()), row,
                         std::min(rows, group.rows - row), column,
                         std::min(columns, call_.n - column)});
      }
    }
    groups_.push_back(group);
  }

  // What of b is in a thread's copy.
  struct CopyOfB {
    int64_t group = -1, column = 0, depth = 0;
    bool operator==(const CopyOfB&) const = default;
  };

  void Run(const Tile& tile, std::byte* scratch, CopyOfB& copied) const {
    const Group& group = groups_[static_cast<size_t>(tile.group)];
    const int64_t rows = method_.kernel_rows(tile.rows);
    const bool copy_a = method_.copies_a(call_);
    const bool copy_b = method_.copies_b(call_);
    const bool copy_c = call_.c.dtype != method_.output || rows != tile.rows;
    std::byte* const b_copy = scratch + a_bytes_;
    std::byte* const c_copy = b_copy + b_bytes_;
    const std::span<std::byte> pad(c_copy + c_bytes_, static_cast<size_t>(pad_bytes_));
    // A tile is padded with the rows after it, whoever they belong to, or with those before it
    // where there are none.
    const int64_t row = group.row + tile.row;
    const int64_t before = copy_a ? 0 : std::max<int64_t>(0, row + rows - call_.m);

    const MatrixBlock c = BlockOf(call_.c, group.c, tile.row, tile.column);
    const MatrixBlock sums = copy_c ? MatrixBlock{c_copy, method_.output, method_.tile.columns} : c;
    if (copy_c && call_.add) CopyBlock(c, tile.rows, tile.columns, sums.At(before, 0));
    for (int64_t first = 0; first == 0 || first < call_.k; first += method_.depth) {
      const int64_t depth = std::min(method_.depth, call_.k - first);
      Product product = ProductOf(rows, tile.columns, depth, first > 0, copy_c);
      const MatrixBlock a = BlockOf(call_.a, call_.a.data, row - before, first);
      product.a.data = copy_a ? scratch : a.data;
      if (copy_a) CopyA(a, tile.rows, depth, {scratch, product.a.dtype, product.a.stride});
      const MatrixBlock b = BlockOf(call_.b, group.b, first, tile.column);
      product.b.data = copy_b ? b_copy : b.data;
      if (const CopyOfB wanted{tile.group, tile.column, first}; copy_b && copied != wanted) {
        CopyB(b, depth, tile.columns, {b_copy, product.b.dtype, product.b.stride});
        copied = wanted;
      }
      product.c.data = sums.data;
      matmul_.Run(product, pad);
    }
    if (copy_c) CopyBlock(sums.At(before, 0), tile.rows, tile.columns, c);
  }

 private:
  // All that is known of a tile's product but where its operands lie. `copy_c`: it writes a copy.
  Product ProductOf(int64_t rows, int64_t columns, int64_t depth, bool further, bool copy_c) const {
    Product product{.m = rows,
                    .n = columns,
                    .k = depth,
                    .a = call_.a,
                    .b = call_.b,
                    .c = call_.c,
                    .add = call_.add || further,
                    .kernel = method_.kernel};
    if (method_.copies_a(call_)) {
      product.a.dtype = method_.inputs;
      product.a.stride = a_copy_stride();
      product.a.transposed = call_.a.transposed && !method_.transpose_a;
    }
    if (method_.copies_b(call_)) {
      product.b.dtype = method_.inputs;
      product.b.stride = b_copy_stride();
      product.b.transposed = b_copy_transposed();
    }
    if (copy_c) {
      product.c.dtype = method_.output;
      product.c.stride = method_.tile.columns;
    }
    return product;
  }

  // Calls visit(product) for each product that Run may come to.
  template <typename Visit>
  void ForEachProduct(const Visit& visit) const {
    const auto [tile_rows, tile_columns] = method_.tile;
    const int64_t k = std::max<int64_t>(1, call_.k);  // no tokens, no product
    std::vector<int64_t> row_counts = {tile_rows,
                                       method_.kernel_rows((call_.m - 1) % tile_rows + 1)};
    // How the rows fall into groups is data. Kernels for any size do not ask.
    if (call_.groups > 1 && method_.kernel == Kernel::kThisSize) {
      row_counts.clear();
      for (int64_t rows = 1; rows <= tile_rows; ++rows) {
        if (PaddedRows(rows) == rows) row_counts.push_back(rows);
      }
    }
    for (const int64_t rows : row_counts) {
      for (const int64_t columns : {tile_columns, (call_.n - 1) % tile_columns + 1}) {
        for (const int64_t depth : {std::min(method_.depth, k), (k - 1) % method_.depth + 1}) {
          for (const bool further : {false, true}) {
            for (const bool copy_c : {false, true}) {
              if (further && k <= method_.depth) continue;
              if (!copy_c && call_.c.dtype != method_.output) continue;
              visit(ProductOf(rows, columns, depth, further, copy_c));
            }
          }
        }
      }
    }
  }

  int64_t a_copy_stride() const { return method_.depth + kStridePadding; }
  bool b_copy_transposed() const { return call_.b.transposed || method_.transpose_b; }
  int64_t b_copy_stride() const {
    return b_copy_transposed() ? method_.depth + kStridePadding : method_.tile.columns;
  }

  void CopyA(const MatrixBlock& a, int64_t rows, int64_t depth, const MatrixBlock& copy) const {
    if (method_.transpose_a) {
      Transpose(a, depth, rows, copy);
    } else {
      CopyBlock(a, rows, depth, copy);
    }
  }
  void CopyB(const MatrixBlock& b, int64_t depth, int64_t columns, const MatrixBlock& copy) const {
    if (method_.transpose_b) {
      Transpose(b, depth, columns, copy);
    } else if (call_.b.transposed) {
      CopyBlock(b, columns, depth, copy);
    } else {
      CopyBlock(b, depth, columns, copy);
    }
  }

  // The block of an operand that starts at (row, column) as the product uses it.
  static MatrixBlock BlockOf(const Operand& operand, std::byte* data, int64_t row, int64_t column) {
    const MatrixBlock whole{data, operand.dtype, operand.stride};
    return operand.transposed ? whole.At(column, row) : whole.At(row, column);
  }

  Matmul& matmul_;
  Call call_;
  Method method_;
  std::vector<Group> groups_;
  int64_t a_bytes_ = 0;
  int64_t b_bytes_ = 0;
  int64_t c_bytes_ = 0;
  int64_t pad_bytes_ = 0;
};

// Takes what the call needs from the arena, and runs it on `groups`.
void RunCall(Backend& backend, Matmul& matmul, const Call& call, const Method& method,
             std::span<const Group> groups) {
  Arena& arena = backend.arena();
  const Arena::Frame frame(arena);
  TiledProducts products(matmul, call, method);
  const int64_t bytes = products.scratch_bytes();
  const TensorView scratch =
      arena.Allocate(Memory::kScratch, DType::kU8, {MaxThreads(), bytes}, "linear.scratch");
  if (backend.dry()) return;
  std::vector<Tile> tiles;
  for (const Group& group : groups) products.AddTiles(group, tiles);
  std::vector<TiledProducts::CopyOfB> copied(static_cast<size_t>(MaxThreads()));
  ParallelFor(static_cast<int64_t>(tiles.size()), 1, [&](int64_t begin, int64_t) {
    const int64_t thread = ThreadNumber();
    products.Run(tiles[static_cast<size_t>(begin)], scratch.data + thread * bytes,
                 copied[static_cast<size_t>(thread)]);
  });
}

Operand OperandOf(TensorView view, bool transposed = false) {
  return {view.data, view.dtype, view.columns(), transposed};
}

// y = x * w^T (`w_transposed`) or x * w on each group's rows, `offsets[g]` to `offsets[g + 1]`,
// with its own weight. Without offsets in a dry run.
void RunRows(Backend& backend, Matmul& matmul, TensorView x, std::span<const int64_t> offsets,
             std::span<const TensorView> w, bool w_transposed, TensorView y, bool add) {
  TERRACE_CHECK(x.rows() == y.rows(), "{} {} and {} {}", x.name, x.shape.ToString(), y.name,
                y.shape.ToString());
  const int64_t out = y.columns();
  const int64_t in = x.columns();
  const Shape expected = w_transposed ? Shape{out, in} : Shape{in, out};
  for (const TensorView& weight : w) {
    TERRACE_CHECK(weight.shape == expected && weight.dtype == w[0].dtype, "{}: {} {}, not {}",
                  weight.name, NameOf(weight.dtype), weight.shape.ToString(), expected.ToString());
  }
  if (x.rows() == 0) return;
  const Call call{.groups = static_cast<int64_t>(w.size()),
                  .m = x.rows(),
                  .n = out,
                  .k = in,
                  .a = OperandOf(x),
                  .b = OperandOf(w[0], w_transposed),
                  .c = OperandOf(y),
                  .add = add};
  std::vector<Group> groups;
  for (size_t g = 0; g + 1 < offsets.size(); ++g) {
    const int64_t first = offsets[g];
    const int64_t rows = offsets[g + 1] - first;
    if (rows == 0) continue;
    groups.push_back({w[g].data, y.data + first * out * BytesOf(y.dtype), first, rows});
  }
  RunCall(backend, matmul, call, RowMethod(matmul, call), groups);
}

void RunGrouped(Backend& backend, Matmul& matmul, TensorView x, TensorView offsets,
                std::span<const TensorView> w, bool w_transposed, TensorView y, bool add) {
  TERRACE_CHECK(offsets.size() == static_cast<int64_t>(w.size()) + 1, "{} offsets of {} groups",
                offsets.size(), w.size());
  RunRows(backend, matmul, x,
          backend.dry() ? std::span<const int64_t>() : offsets.span<const int64_t>(), w,
          w_transposed, y, add);
}

}  // namespace

void CpuBackend::Linear(TensorView x, TensorView w, TensorView y, bool add) {
  RunRows(*this, *matmul_, x, std::array{int64_t{0}, x.rows()}, {&w, 1}, /*w_transposed=*/true, y,
          add);
}

void CpuBackend::LinearBackwardInput(TensorView dy, TensorView w, TensorView dx, bool add) {
  RunRows(*this, *matmul_, dy, std::array{int64_t{0}, dy.rows()}, {&w, 1}, /*w_transposed=*/false,
          dx, add);
}

void CpuBackend::GroupedLinear(TensorView x, TensorView offsets, std::span<const TensorView> w,
                               TensorView y, bool add) {
  RunGrouped(*this, *matmul_, x, offsets, w, /*w_transposed=*/true, y, add);
}

void CpuBackend::GroupedLinearBackwardInput(TensorView dy, TensorView offsets,
                                            std::span<const TensorView> w, TensorView dx,
                                            bool add) {
  RunGrouped(*this, *matmul_, dy, offsets, w, /*w_transposed=*/false, dx, add);
}

void CpuBackend::LinearBackwardWeight(TensorView dy, TensorView x, TensorView dw, Adding add) {
  const int64_t out = dy.columns();
  const int64_t in = x.columns();
  TERRACE_CHECK(x.rows() == dy.rows() && dw.shape == (Shape{out, in}), "{} {}, {} {}, {} {}",
                dy.name, dy.shape.ToString(), x.name, x.shape.ToString(), dw.name,
                dw.shape.ToString());
  if (dw.dtype == DType::kBF16) {
    LeaveRounded(*this, dy, x, dw, add);
    return;
  }
  const Call call{.groups = 1,
                  .m = out,
                  .n = in,
                  .k = dy.rows(),
                  .a = OperandOf(dy, /*transposed=*/true),
                  .b = OperandOf(x),
                  .c = OperandOf(dw),
                  .add = add};
  const Group group{x.data, dw.data, 0, out};
  RunCall(*this, *matmul_, call, WeightMethod(*matmul_, call), {&group, 1});
}

namespace {

// Blocks side by side in the rows of x and y, one below the other in w.
struct Blocks {
  int64_t count;
  int64_t in, out;  // of each

  Blocks(int64_t blocks, TensorView x, TensorView w, TensorView y) : count(blocks) {
    TERRACE_CHECK(blocks > 0 && w.rows() % blocks == 0, "{}: {} in {} blocks", w.name,
                  w.shape.ToString(), blocks);
    in = w.columns();
    out = w.rows() / blocks;
    TERRACE_CHECK(x.columns() == blocks * in && y.columns() == blocks * out && x.rows() == y.rows(),
                  "{} {}, {} {}, {} {}", x.name, x.shape.ToString(), w.name, w.shape.ToString(),
                  y.name, y.shape.ToString());
  }
};

// From `column` on of a view's rows.
Operand ColumnsOf(TensorView view, int64_t column, bool transposed = false) {
  Operand operand = OperandOf(view, transposed);
  if (view.data != nullptr) operand.data += column * BytesOf(view.dtype);
  return operand;
}

}  // namespace

void CpuBackend::BlockLinear(int64_t blocks, TensorView x, TensorView w, TensorView y) {
  const Blocks of(blocks, x, w, y);
  if (x.rows() == 0) return;
  for (int64_t g = 0; g < blocks; ++g) {
    const Call call{.groups = 1,
                    .m = x.rows(),
                    .n = of.out,
                    .k = of.in,
                    .a = ColumnsOf(x, g * of.in),
                    .b = ColumnsOf(w, g * of.out * of.in, /*transposed=*/true),
                    .c = ColumnsOf(y, g * of.out),
                    .add = false};
    const Group group{call.b.data, call.c.data, 0, x.rows()};
    RunCall(*this, *matmul_, call, RowMethod(*matmul_, call), {&group, 1});
  }
}

void CpuBackend::BlockLinearBackwardInput(int64_t blocks, TensorView dy, TensorView w,
                                          TensorView dx) {
  const Blocks of(blocks, dx, w, dy);
  if (dy.rows() == 0) return;
  for (int64_t g = 0; g < blocks; ++g) {
    const Call call{.groups = 1,
                    .m = dy.rows(),
                    .n = of.in,
                    .k = of.out,
                    .a = ColumnsOf(dy, g * of.out),
                    .b = ColumnsOf(w, g * of.out * of.in),
                    .c = ColumnsOf(dx, g * of.in),
                    .add = false};
    const Group group{call.b.data, call.c.data, 0, dy.rows()};
    RunCall(*this, *matmul_, call, RowMethod(*matmul_, call), {&group, 1});
  }
}

void CpuBackend::BlockLinearBackwardWeight(int64_t blocks, TensorView dy, TensorView x,
                                           TensorView dw, Adding add) {
  const Blocks of(blocks, x, dw, dy);
  const bool rounded = dw.dtype == DType::kBF16;
  const Arena::Frame frame(arena());
  const int64_t slice_rows = rounded ? std::min(of.out, SliceRows(of.in)) : of.out;
  TensorView sums;
  if (rounded) {
    sums = arena().Allocate(Memory::kScratch, DType::kF32, {slice_rows, of.in}, "gradient.slice");
  }
  for (int64_t g = 0; g < blocks; ++g) {
    for (int64_t first = 0; first < of.out; first += slice_rows) {
      const int64_t row = g * of.out + first;
      const int64_t rows = std::min(slice_rows, of.out - first);
      const TensorView slice = rounded ? sums.Rows(0, rows) : dw.Rows(row, rows);
      const Call call{.groups = 1,
                      .m = rows,
                      .n = of.in,
                      .k = dy.rows(),
                      .a = ColumnsOf(dy, row, /*transposed=*/true),
                      .b = ColumnsOf(x, g * of.in),
                      .c = OperandOf(slice),
                      .add = !rounded && add};
      const Group group{call.b.data, slice.data, 0, rows};
      RunCall(*this, *matmul_, call, WeightMethod(*matmul_, call), {&group, 1});
      if (rounded && !dry()) RoundSums(slice, row, dw, add);
    }
  }
}

}  // namespace terrace
