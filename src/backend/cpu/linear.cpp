// Linear layers and their gradients. Letters as in backend/backend.h.
//
// Products with weights are split by rows of tokens into tasks, each run by one thread: oneDNN
// packs the weight anew for each task, which pays from some tens of rows on, and threads never
// wait for each other inside a product. Gradients of weights are split by rows of the weight.
#include <algorithm>
#include <utility>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/matmul.h"
#include "core/parallel.h"

namespace terrace {
namespace {

// Below this, packing the weight outweighs the product.
constexpr int64_t kMinTaskRows = 64;
constexpr int64_t kMaxTaskRows = 1024;
// Rows of a grouped product's task: small enough to spread one crowded expert over threads.
constexpr int64_t kMaxGroupedTaskRows = 512;
// Tokens that are upcast to float32 at a time where a product needs it.
constexpr int64_t kUpcastRows = 256;
// The same of weights and their gradients, in bytes of float32: a slice stays in cache between
// being upcast and being used.
constexpr int64_t kUpcastBytes = int64_t{8} << 20;
// Longest sum over tokens for which scratch is sampled; see Matmul::ScratchBound.
constexpr int64_t kSampledTokens = int64_t{1} << 16;

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

Operand OperandOf(TensorView view, bool transposed = false) {
  return {view.data, view.dtype, view.columns(), transposed};
}

// Rows of a weight that are in float32 at the same time.
int64_t SliceRows(TensorView w) {
  if (w.dtype == DType::kF32) return w.rows();
  const int64_t fitting = kUpcastBytes / (w.columns() * BytesOf(DType::kF32));
  return std::min(w.rows(), std::max<int64_t>(fitting, 1));
}

struct Task {
  int64_t group, first_row, rows;
};

// Consecutive tasks of at most `limit` rows that together cover every group's rows.
std::vector<Task> TasksOf(std::span<const int64_t> offsets, int64_t limit) {
  std::vector<Task> tasks;
  for (size_t group = 0; group + 1 < offsets.size(); ++group) {
    for (int64_t row = offsets[group]; row < offsets[group + 1]; row += limit) {
      tasks.push_back(
          {static_cast<int64_t>(group), row, std::min(limit, offsets[group + 1] - row)});
    }
  }
  return tasks;
}

// y = x * w^T (`w_transposed`) or x * w, on each group's rows, with its own weight.
struct RowProducts {
  TensorView x;
  std::span<const TensorView> w;
  bool w_transposed;
  TensorView y;
  bool add;

  int64_t out_width() const { return y.columns(); }
  int64_t in_width() const { return x.columns(); }

  Product On(const Task& task, TensorView x_rows, TensorView weight, TensorView y_rows) const {
    return {
        .m = task.rows,
        .n = out_width(),
        .k = in_width(),
        .a = OperandOf(x_rows),
        .b = OperandOf(weight, w_transposed),
        .c = OperandOf(y_rows),
        .add = add,
        .kernel = w_transposed || weight.dtype == DType::kBF16 ? Kernel::kBlocked : Kernel::kAnyM};
  }

  // What the weight's rows from `first` on, held in `slice`, contribute to `whole`: some columns of
  // y, or a term of its sum.
  Product OnSlice(const Product& whole, int64_t first, TensorView slice) const {
    Product product = whole;
    product.b = OperandOf(slice, w_transposed);
    Operand& cut = w_transposed ? product.c : product.a;
    if (cut.data != nullptr) cut.data += first * BytesOf(cut.dtype);
    (w_transposed ? product.n : product.k) = slice.rows();
    product.add |= !w_transposed && first > 0;
    return product;
  }
};

void CheckRowProducts(const RowProducts& products) {
  const TensorView& x = products.x;
  const TensorView& y = products.y;
  TERRACE_CHECK(x.rows() == y.rows(), "{} {} and {} {}", x.name, x.shape.ToString(), y.name,
                y.shape.ToString());
  const int64_t out = products.out_width();
  const int64_t in = products.in_width();
  const Shape expected = products.w_transposed ? Shape{out, in} : Shape{in, out};
  for (const TensorView& w : products.w) {
    TERRACE_CHECK(w.shape == expected && w.dtype == products.w[0].dtype, "{}: {} {}, not {}",
                  w.name, NameOf(w.dtype), w.shape.ToString(), expected.ToString());
  }
}

// Room for `shape` in float32 where `like` is of another dtype.
TensorView UpcastScratch(Arena& arena, TensorView like, Shape shape, const char* name) {
  if (like.dtype == DType::kF32) return {};
  return arena.Allocate(Memory::kScratch, DType::kF32, shape, name);
}

// A view in float32, or in place of another the room for its copy.
TensorView UpcastView(TensorView view, TensorView wide) { return wide.empty() ? view : wide; }

// `rows` in float32 already, or the room for their copy at the start of `wide`.
TensorView UpcastRows(TensorView rows, TensorView wide) {
  return wide.empty() ? rows : wide.Rows(0, rows.rows());
}

// Dtypes that oneDNN does not take as they are go through float32 copies, some rows at a time.
void RunUpcast(Backend& backend, Matmul& matmul, const RowProducts& products,
               std::span<const Task> tasks) {
  Arena& arena = backend.arena();
  const Arena::Frame frame(arena);
  const TensorView any_w = products.w[0];
  const int64_t slice_rows = SliceRows(any_w);
  const TensorView upcast_w =
      UpcastScratch(arena, any_w, {slice_rows, any_w.columns()}, "linear.upcast_w");
  const TensorView upcast_x =
      UpcastScratch(arena, products.x, {kUpcastRows, products.in_width()}, "linear.upcast_x");
  const TensorView upcast_y =
      UpcastScratch(arena, products.y, {kUpcastRows, products.out_width()}, "linear.upcast_y");
  int64_t bytes = 0;
  for (const int64_t rows : {slice_rows, (any_w.rows() - 1) % slice_rows + 1}) {
    const TensorView slice = UpcastView(any_w, upcast_w).Rows(0, rows);
    const Product largest =
        products.OnSlice(products.On({0, 0, kUpcastRows}, UpcastView(products.x, upcast_x), slice,
                                     UpcastView(products.y, upcast_y)),
                         0, slice);
    bytes = std::max(
        bytes, matmul.ScratchBound(largest, Matmul::Axis::kM, kUpcastRows, /*parallel=*/true));
  }
  const TensorView pad =
      arena.Allocate(Memory::kScratch, DType::kF32, {(bytes + 3) / 4}, "linear.scratchpad");
  if (backend.dry()) return;

  std::pair<int64_t, int64_t> upcast{-1, -1};  // the group and first row of what is in upcast_w
  for (const Task& task : tasks) {
    const TensorView weight = products.w[static_cast<size_t>(task.group)];
    const TensorView x_rows = products.x.Rows(task.first_row, task.rows);
    const TensorView y_rows = products.y.Rows(task.first_row, task.rows);
    const TensorView x = UpcastRows(x_rows, upcast_x);
    const TensorView y = UpcastRows(y_rows, upcast_y);
    if (!upcast_x.empty()) backend.Copy(x_rows, x);
    if (!upcast_y.empty() && products.add) backend.Copy(y_rows, y);
    for (int64_t first = 0; first < weight.rows(); first += slice_rows) {
      const TensorView rows = weight.Rows(first, std::min(slice_rows, weight.rows() - first));
      const TensorView slice = UpcastRows(rows, upcast_w);
      if (!upcast_w.empty() && upcast != std::pair(task.group, first)) {
        backend.Copy(rows, slice);
        upcast = {task.group, first};
      }
      matmul.Run(products.OnSlice(products.On(task, x, slice, y), first, slice),
                 /*parallel=*/true, pad.data, pad.bytes());
    }
    if (!upcast_y.empty()) backend.Copy(y, y_rows);
  }
}

void RunTasks(Backend& backend, Matmul& matmul, const RowProducts& products,
              std::span<const Task> tasks, int64_t task_rows) {
  Arena& arena = backend.arena();
  const Arena::Frame frame(arena);
  const Product largest = products.On({0, 0, task_rows}, products.x, products.w[0], products.y);
  const int64_t bound =
      RoundUp(matmul.ScratchBound(largest, Matmul::Axis::kM, task_rows, /*parallel=*/false),
              Arena::kAlignment);
  const TensorView pads = arena.Allocate(Memory::kScratch, DType::kF32, {MaxThreads(), bound / 4},
                                         "linear.scratchpads");
  if (backend.dry()) return;
  ParallelFor(static_cast<int64_t>(tasks.size()), 1, [&](int64_t begin, int64_t) {
    const Task& task = tasks[static_cast<size_t>(begin)];
    matmul.Run(products.On(task, products.x.Rows(task.first_row, task.rows),
                           products.w[static_cast<size_t>(task.group)],
                           products.y.Rows(task.first_row, task.rows)),
               /*parallel=*/false, pads.data + ThreadNumber() * bound, bound);
  });
}

// dw (+)= dy^T * x, some tokens and some rows of dw at a time.
void RunUpcastWeight(Backend& backend, Matmul& matmul, TensorView dy, TensorView x, TensorView dw,
                     bool add) {
  Arena& arena = backend.arena();
  const TensorView upcast_dy =
      UpcastScratch(arena, dy, {kUpcastRows, dy.columns()}, "linear.upcast_dy");
  const TensorView upcast_x =
      UpcastScratch(arena, x, {kUpcastRows, x.columns()}, "linear.upcast_x");
  const int64_t slice_rows = SliceRows(dw);
  const TensorView upcast_dw =
      UpcastScratch(arena, dw, {slice_rows, dw.columns()}, "linear.upcast_dw");
  const auto product = [&](TensorView dy_tokens, int64_t first, TensorView x_tokens,
                           TensorView slice) {
    Operand columns = OperandOf(dy_tokens, /*transposed=*/true);
    if (columns.data != nullptr) columns.data += first * BytesOf(columns.dtype);
    return Product{.m = slice.rows(),
                   .n = x.columns(),
                   .k = x_tokens.rows(),
                   .a = columns,
                   .b = OperandOf(x_tokens),
                   .c = OperandOf(slice),
                   .add = true,
                   .kernel = Kernel::kAnyK};
  };
  int64_t bytes = 0;
  for (const int64_t rows : {slice_rows, (dw.rows() - 1) % slice_rows + 1}) {
    Product largest = product(UpcastView(dy, upcast_dy), 0, UpcastView(x, upcast_x),
                              UpcastView(dw, upcast_dw).Rows(0, rows));
    largest.k = kUpcastRows;
    bytes = std::max(bytes, matmul.ScratchBytes(largest, /*parallel=*/true));
  }
  const TensorView pad =
      arena.Allocate(Memory::kScratch, DType::kF32, {(bytes + 3) / 4}, "linear.scratchpad");
  if (backend.dry()) return;

  const auto upcast = [&](TensorView view, int64_t first, int64_t count, TensorView wide) {
    const TensorView rows = view.Rows(first, count);
    const TensorView copy = UpcastRows(rows, wide);
    if (!wide.empty()) backend.Copy(rows, copy);
    return copy;
  };
  for (int64_t row = 0; row < dw.rows(); row += slice_rows) {
    const TensorView target = dw.Rows(row, std::min(slice_rows, dw.rows() - row));
    const TensorView slice = UpcastRows(target, upcast_dw);
    if (!add) {
      backend.Zero(slice);
    } else if (!upcast_dw.empty()) {
      backend.Copy(target, slice);
    }
    for (int64_t token = 0; token < dy.rows(); token += kUpcastRows) {
      const int64_t tokens = std::min(kUpcastRows, dy.rows() - token);
      matmul.Run(product(upcast(dy, token, tokens, upcast_dy), row,
                         upcast(x, token, tokens, upcast_x), slice),
                 /*parallel=*/true, pad.data, pad.bytes());
    }
    if (!upcast_dw.empty()) backend.Copy(slice, target);
  }
}

bool IsNative(const Matmul& matmul, DType a, DType b) {
  return a == b && (a == DType::kF32 || matmul.HasBF16());
}

void RunDense(Backend& backend, Matmul& matmul, TensorView x, TensorView w, bool w_transposed,
              TensorView y, bool add) {
  const RowProducts products{x, {&w, 1}, w_transposed, y, add};
  CheckRowProducts(products);
  const int64_t rows = x.rows();
  const int64_t offsets[] = {0, rows};
  if (!IsNative(matmul, x.dtype, w.dtype)) {
    RunUpcast(backend, matmul, products, TasksOf(offsets, kUpcastRows));
    return;
  }
  const int64_t threads = MaxThreads();
  if (rows >= threads * kMinTaskRows) {
    const int64_t task_rows =
        std::min(kMaxTaskRows, RoundUp((rows + threads - 1) / threads, kMinTaskRows));
    RunTasks(backend, matmul, products, TasksOf(offsets, task_rows), task_rows);
    return;
  }
  const Arena::Frame frame(backend.arena());
  const Product product = products.On({0, 0, rows}, x, w, y);
  const int64_t bytes = matmul.ScratchBytes(product, /*parallel=*/true);
  const TensorView pad = backend.arena().Allocate(Memory::kScratch, DType::kF32, {(bytes + 3) / 4},
                                                  "linear.scratchpad");
  if (!backend.dry()) matmul.Run(product, /*parallel=*/true, pad.data, pad.bytes());
}

void RunGrouped(Backend& backend, Matmul& matmul, TensorView x, TensorView offsets,
                std::span<const TensorView> w, bool w_transposed, TensorView y, bool add) {
  TERRACE_CHECK(offsets.size() == static_cast<int64_t>(w.size()) + 1, "{} offsets of {} groups",
                offsets.size(), w.size());
  const RowProducts products{x, w, w_transposed, y, add};
  CheckRowProducts(products);
  const std::span<const int64_t> bounds =
      backend.dry() ? std::span<const int64_t>{} : offsets.span<const int64_t>();
  if (!IsNative(matmul, x.dtype, w[0].dtype)) {
    RunUpcast(backend, matmul, products, TasksOf(bounds, kUpcastRows));
    return;
  }
  const int64_t task_rows = std::clamp(RoundUp(x.rows() / (2 * MaxThreads()), kMinTaskRows),
                                       kMinTaskRows, kMaxGroupedTaskRows);
  RunTasks(backend, matmul, products, TasksOf(bounds, task_rows), task_rows);
}

}  // namespace

void CpuBackend::Linear(TensorView x, TensorView w, TensorView y, bool add) {
  RunDense(*this, *matmul_, x, w, /*w_transposed=*/true, y, add);
}

void CpuBackend::LinearBackwardInput(TensorView dy, TensorView w, TensorView dx, bool add) {
  RunDense(*this, *matmul_, dy, w, /*w_transposed=*/false, dx, add);
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

void CpuBackend::LinearBackwardWeight(TensorView dy, TensorView x, TensorView dw, bool add) {
  const int64_t tokens = dy.rows();
  const int64_t out = dy.columns();
  const int64_t in = x.columns();
  TERRACE_CHECK(x.rows() == tokens && dw.shape == (Shape{out, in}), "{} {}, {} {}, {} {}", dy.name,
                dy.shape.ToString(), x.name, x.shape.ToString(), dw.name, dw.shape.ToString());
  const Arena::Frame frame(arena());
  if (!IsNative(*matmul_, dy.dtype, x.dtype)) {
    RunUpcastWeight(*this, *matmul_, dy, x, dw, add);
    return;
  }

  // A task is some rows of dw, that is, some columns of dy.
  const int64_t threads = MaxThreads();
  const bool parallel = out < threads * kMinTaskRows;
  const int64_t task_rows = parallel ? out : RoundUp((out + threads - 1) / threads, kMinTaskRows);
  const auto product = [&](int64_t first, int64_t rows) {
    Operand columns = OperandOf(dy, /*transposed=*/true);
    Operand result = OperandOf(dw);
    if (dy.data != nullptr) {
      columns.data += first * BytesOf(dy.dtype);
      result.data += first * in * BytesOf(dw.dtype);
    }
    return Product{.m = rows,
                   .n = in,
                   .k = tokens,
                   .a = columns,
                   .b = OperandOf(x),
                   .c = result,
                   .add = add,
                   .kernel = dw.dtype == DType::kF32 ? Kernel::kAnyK : Kernel::kBlocked};
  };
  // Scratch depends on the widths only: how many tokens reach an expert is data.
  const int64_t tasks = (out + task_rows - 1) / task_rows;
  const int64_t last_rows = out - (tasks - 1) * task_rows;
  const int64_t bound = RoundUp(
      std::max(
          matmul_->ScratchBound(product(0, task_rows), Matmul::Axis::kK, kSampledTokens, parallel),
          matmul_->ScratchBound(product(0, last_rows), Matmul::Axis::kK, kSampledTokens, parallel)),
      Arena::kAlignment);
  const TensorView pads =
      arena().Allocate(Memory::kScratch, DType::kF32, {tasks, bound / 4}, "linear.scratchpads");
  if (dry()) return;
  if (parallel) {
    matmul_->Run(product(0, out), parallel, pads.data, bound);
    return;
  }
  ParallelFor(tasks, 1, [&](int64_t task, int64_t) {
    const int64_t first = task * task_rows;
    matmul_->Run(product(first, std::min(task_rows, out - first)), parallel,
                 pads.data + task * bound, bound);
  });
}

}  // namespace terrace
