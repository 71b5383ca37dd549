// galore (arXiv 2403.03507), g the scaled gradient, s the tensor's own step from 1; for a matrix
// with fewer rows than columns:
//   at steps 1, 1 + period, ...: P = the `rank` leading left singular vectors of g, as rows
//   x = P g
//   m <- beta1 m + (1 - beta1) x        v <- beta2 v + (1 - beta2) x^2
//   n = m / (1 - beta1^s) / (sqrt(v) / sqrt(1 - beta2^s) + eps)
//   w <- w (1 - lr * decay) - lr * alpha * P^T n
// and for others with right singular vectors, x = g P^T and n P. The moments stay when the
// subspace changes, as in the authors' code. Like there, an update is confined to the subspace;
// unlike there, decay comes before it.
//
// Singular vectors are eigenvectors of g g^T (or g^T g), whose float32 squares lose those whose
// singular values are below some 1e-3 of the largest: they fill the subspace where it has room.
#include <cmath>
#include <cstring>
#include <memory>
#include <utility>

#include "backend/cpu/matmul.h"
#include "core/arena.h"
#include "core/parallel.h"
#include "optim/eigenvectors.h"
#include "optim/kernels/blocks.h"
#include "optim/rule.h"
#include "optim/rules/adam_settings.h"
#include "optim/tiles.h"

namespace terrace {
namespace {

struct GaloreSettings : AdamSettings {
  int64_t rank = 128;
  int64_t period = 200;
  double alpha = 0.25;
};

Fields FieldsOf(GaloreSettings& s) {
  return AdamFields(s, {{"rank", &s.rank, "of the subspace", {1, 1 << 20}},
                        {"period", &s.period, "steps between subspaces", {1, int64_t{1} << 40}},
                        {"alpha", &s.alpha, "times the update", {0, 1e6}}});
}

constexpr int64_t kFloatBytes = sizeof(float);

// A [rows, columns] matrix is worked on in blocks: of some columns, all rows, where it is wide, of
// some rows where it is not. A block's projection has `rank` rows or columns.
struct Projection {
  int64_t rows;
  int64_t columns;
  int64_t rank;

  bool wide() const { return rows < columns; }
  int64_t side() const { return std::min(rows, columns); }
  int64_t length() const { return std::max(rows, columns); }
  Parts blocks() const { return {length(), 128}; }
  SymmetricTiles tiles() const { return {{side(), 128}}; }
  Shape moments() const { return wide() ? Shape{rank, columns} : Shape{rows, rank}; }

  int64_t block_rows(int64_t block) const { return wide() ? rows : blocks().Length(block); }
  int64_t block_columns(int64_t block) const { return wide() ? blocks().Length(block) : columns; }
  MatrixBlock BlockOf(const MatrixBlock& matrix, int64_t block) const {
    const int64_t first = blocks().First(block);
    return wide() ? matrix.At(0, first) : matrix.At(first, 0);
  }
  // Of a block's projection, and of the moments that belong to it.
  int64_t projected_rows(int64_t block) const { return wide() ? rank : blocks().Length(block); }
  int64_t projected_columns(int64_t block) const { return wide() ? blocks().Length(block) : rank; }

  // --- Products: `projector` is [rank, side], `block` and `projected` as above ---
  Product Project(const MatrixBlock& projector, const MatrixBlock& block,
                  const MatrixBlock& projected, int64_t number) const {
    return {.m = projected_rows(number),
            .n = projected_columns(number),
            .k = side(),
            .a = wide() ? projector.AsOperand() : block.AsOperand(),
            .b = wide() ? block.AsOperand() : projector.AsOperand(/*transposed=*/true),
            .c = projected.AsOperand(),
            .kernel = Kernel::kThisSize};
  }
  Product ProjectBack(const MatrixBlock& projector, const MatrixBlock& projected,
                      const MatrixBlock& block, int64_t number) const {
    return {.m = block_rows(number),
            .n = block_columns(number),
            .k = rank,
            .a = wide() ? projector.AsOperand(/*transposed=*/true) : projected.AsOperand(),
            .b = wide() ? projected.AsOperand() : projector.AsOperand(),
            .c = block.AsOperand(),
            .kernel = Kernel::kThisSize};
  }
  // Adds a block's part of the Gram matrix to one of its tiles.
  Product AddGram(const MatrixBlock& block, const MatrixBlock& gram, int64_t number, int64_t i,
                  int64_t j) const {
    const Parts parts = tiles().parts;
    const int64_t first = parts.First(i), second = parts.First(j);
    const MatrixBlock a = wide() ? block.At(first, 0) : block.At(0, first);
    const MatrixBlock b = wide() ? block.At(second, 0) : block.At(0, second);
    return {.m = parts.Length(i),
            .n = parts.Length(j),
            .k = blocks().Length(number),
            .a = a.AsOperand(!wide()),
            .b = b.AsOperand(wide()),
            .c = gram.At(first, second).AsOperand(),
            .add = true,
            .kernel = Kernel::kThisSize};
  }

  // --- Memory ---
  int64_t block_bytes() const { return Arena::Aligned(side() * blocks().Length(0) * kFloatBytes); }
  int64_t projected_bytes() const {
    return Arena::Aligned(rank * blocks().Length(0) * kFloatBytes);
  }
  int64_t gram_bytes() const { return Arena::Aligned(side() * side() * kFloatBytes); }
  // Of a block, as matrices of their own.
  MatrixBlock OwnBlock(std::byte* data, int64_t number) const {
    return {data, DType::kF32, block_columns(number)};
  }
  MatrixBlock OwnProjected(std::byte* data, int64_t number) const {
    return {data, DType::kF32, projected_columns(number)};
  }
};

// Of one product, the most that oneDNN asks for, and what LAPACK asks for.
struct Pads {
  int64_t product_bytes;
  int64_t refresh_product_bytes;
  int64_t lapack_bytes;
};

// Of all products that a step and a search for the subspace run.
Pads PadsOf(const Projection& shape, Matmul& matmul) {
  Pads pads{0, 0, Arena::Aligned(EigenvectorWorkBytes(shape.side(), shape.rank))};
  const auto consider = [&](const Product& product, int64_t& bytes) {
    bytes = std::max(bytes, Arena::Aligned(matmul.ScratchBytes(product)));
  };
  const MatrixBlock projector{nullptr, DType::kF32, shape.side()};
  for (int64_t number = 0; number < shape.blocks().count(); ++number) {
    const MatrixBlock projected = shape.OwnProjected(nullptr, number);
    // A float32 gradient is multiplied where it lies.
    const MatrixBlock in_place{nullptr, DType::kF32, shape.columns};
    const MatrixBlock own = shape.OwnBlock(nullptr, number);
    consider(shape.ProjectBack(projector, projected, own, number), pads.product_bytes);
    for (const MatrixBlock& block : {in_place, own}) {
      consider(shape.Project(projector, block, projected, number), pads.product_bytes);
      for (int64_t tile = 0; tile < shape.tiles().count(); ++tile) {
        shape.tiles().At(tile, [&](int64_t i, int64_t j) {
          consider(shape.AddGram(block, projector, number, i, j), pads.refresh_product_bytes);
        });
      }
    }
  }
  return pads;
}

class Galore final : public Rule {
 public:
  explicit Galore(const GaloreSettings& settings) : settings_(settings), threads_(MaxThreads()) {}

  // The rank is at most the smaller side.
  std::vector<StateSpec> State(const Parameter& parameter) const override {
    if (parameter.value.shape.rank() != 2) Fail("galore serves matrices only");
    const Projection shape = ShapeOf(parameter);
    return {{"projector", DType::kF32, {shape.rank, shape.side()}},
            {"momentum", DType::kF32, shape.moments()},
            {"second_moment", DType::kF32, shape.moments()}};
  }

  // In most steps, for each thread, a block, its projection and what oneDNN asks for. To find a
  // subspace, a matrix of the smaller side, one block, and what oneDNN and LAPACK ask for.
  int64_t ScratchBytes(const Parameter& parameter, bool all_threads) const override {
    if (parameter.value.size() == 0) return 0;
    const Projection shape = ShapeOf(parameter);
    const Pads pads = PadsFor(shape);
    const int64_t step = std::min(Slots(all_threads), shape.blocks().count()) *
                         (shape.block_bytes() + shape.projected_bytes() + pads.product_bytes);
    const int64_t refresh =
        shape.gram_bytes() +
        std::max(shape.block_bytes() + std::min(Slots(all_threads), shape.tiles().count()) *
                                           pads.refresh_product_bytes,
                 pads.lapack_bytes);
    return std::max(step, refresh);
  }

  // Nothing is floored here: eps is added.
  UpdateReport Apply(const Parameter& parameter, TensorView gradient,
                     std::span<const TensorView> state, const StepContext& context) const override {
    if (parameter.value.size() == 0) return {};
    const Projection shape = ShapeOf(parameter);
    if ((context.tensor_step - 1) % settings_.period == 0) {
      FindSubspace(shape, gradient, state[0].as<float>(), context);
    }
    const double step = static_cast<double>(context.tensor_step);
    const double lr = context.learning_rate;
    const kernels::AdamDirection adam{.gradient_scale = context.gradient_scale,
                                      .beta1 = settings_.beta1,
                                      .beta2 = settings_.beta2,
                                      .inverse_correction = static_cast<float>(
                                          1 / std::sqrt(1 - std::pow(settings_.beta2, step))),
                                      .eps = static_cast<float>(settings_.eps)};
    const float keep = KeepOf(context);
    const float size =
        static_cast<float>(lr * settings_.alpha / (1 - std::pow(settings_.beta1, step)));

    const Pads pads = PadsFor(shape);
    const int64_t slot_bytes = shape.block_bytes() + shape.projected_bytes() + pads.product_bytes;
    const MatrixBlock projector = MatrixOf(state[0]);
    ForTasks(shape.blocks().count(), Slots(context.all_threads), [&](int64_t block, int64_t slot) {
      std::byte* const memory = context.scratch + slot * slot_bytes;
      const MatrixBlock own = shape.OwnBlock(memory, block);
      const MatrixBlock projected = shape.OwnProjected(memory + shape.block_bytes(), block);
      const std::span<std::byte> pad(memory + shape.block_bytes() + shape.projected_bytes(),
                                     static_cast<size_t>(pads.product_bytes));
      const MatrixBlock upcast_gradient = Upcast(shape, MatrixOf(gradient), block, own);
      matmul_.Run(shape.Project(projector, upcast_gradient, projected, block), pad);
      kernels::ToAdamDirection(projected, shape.BlockOf(MatrixOf(state[1]), block),
                               shape.BlockOf(MatrixOf(state[2]), block),
                               shape.projected_rows(block), shape.projected_columns(block), adam);
      matmul_.Run(shape.ProjectBack(projector, projected, own, block), pad);
      kernels::Descend(shape.BlockOf(MatrixOf(parameter.value), block), keep, own, size,
                       shape.block_rows(block), shape.block_columns(block), context.rounding_key,
                       StripesOf(shape, block));
    });
    return {};
  }

 private:
  Projection ShapeOf(const Parameter& parameter) const {
    const int64_t rows = parameter.value.rows(), columns = parameter.value.columns();
    return {rows, columns, std::min({settings_.rank, rows, columns})};
  }

  int64_t Slots(bool all_threads) const { return all_threads ? threads_ : 1; }

  Pads PadsFor(const Projection& shape) const {
    return pads_.Get(shape.rows, shape.columns, [&] { return PadsOf(shape, matmul_); });
  }

  // Stripes are not longer than a row of a block.
  static kernels::BlockStripes StripesOf(const Projection& shape, int64_t block) {
    if (shape.wide()) return {.first = block, .per_row = shape.blocks().count()};
    const int64_t per_row = (shape.columns + kernels::kStripe - 1) / kernels::kStripe;
    return {.first = shape.blocks().First(block) * per_row, .per_row = per_row};
  }

  // A block of the gradient in float32: where it lies, or copied into `own`.
  static MatrixBlock Upcast(const Projection& shape, const MatrixBlock& gradient, int64_t block,
                            const MatrixBlock& own) {
    const MatrixBlock narrow = shape.BlockOf(gradient, block);
    if (narrow.dtype == DType::kF32) return narrow;
    kernels::Combine(own, narrow, 1, {}, 0, shape.block_rows(block), shape.block_columns(block));
    return own;
  }

  // `projector` stays as it is for a gradient that is not finite, from which LAPACK might not
  // return; the update itself then carries on what is wrong.
  void FindSubspace(const Projection& shape, TensorView gradient, float* projector,
                    const StepContext& context) const {
    const Pads pads = PadsFor(shape);
    const MatrixBlock gram{context.scratch, DType::kF32, shape.side()};
    std::byte* const rest = context.scratch + shape.gram_bytes();
    std::byte* const products = rest + shape.block_bytes();
    std::memset(gram.data, 0, shape.gram_bytes());
    for (int64_t block = 0; block < shape.blocks().count(); ++block) {
      const MatrixBlock upcast_gradient =
          Upcast(shape, MatrixOf(gradient), block, shape.OwnBlock(rest, block));
      ForTasks(shape.tiles().count(), Slots(context.all_threads), [&](int64_t task, int64_t slot) {
        shape.tiles().At(task, [&](int64_t i, int64_t j) {
          matmul_.Run(shape.AddGram(upcast_gradient, gram, block, i, j),
                      {products + slot * pads.refresh_product_bytes,
                       static_cast<size_t>(pads.refresh_product_bytes)});
        });
      });
    }
    float* const elements = reinterpret_cast<float*>(gram.data);
    for (int64_t i = 0; i < shape.side(); ++i) {
      if (!std::isfinite(elements[i * shape.side() + i])) return;
    }
    LeadingEigenvectors(elements, shape.side(), shape.rank, projector, rest);
  }

  GaloreSettings settings_;
  mutable Matmul matmul_;
  int64_t threads_;
  mutable ByShape<Pads> pads_;
};

}  // namespace

std::unique_ptr<Rule> MakeGalore(SettingsReader& settings) {
  GaloreSettings s;
  settings.Read(FieldsOf(s));
  return std::make_unique<Galore>(s);
}

}  // namespace terrace
