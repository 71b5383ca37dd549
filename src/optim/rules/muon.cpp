// muon (Keller Jordan, https://kellerjordan.github.io/posts/muon), g the scaled gradient:
//   m <- beta m + g
//   u = g + beta m (nesterov) or m, or g where there is no momentum
//   X = u / (|u| + eps), |u| the Frobenius norm
//   ns_steps times: A = X X^T, X <- a X + (b A + c A^2) X        (Newton-Schulz)
//   w <- w (1 - lr * decay) - lr * scale * X
// on the transpose where there are more rows than columns. X then has the singular vectors of u,
// with singular values near 1.
//
// momentum `hidden_f32` and `hidden_bf16`: the gradient buffer b <- beta b + g is the momentum, up
// to the scale of the gradient, which X does not know. g alone is lost in it: no nesterov.
//
// scale, by the shape of a matrix of `rows` outputs and `columns` inputs:
//   none      1
//   keller    sqrt(max(1, rows / columns)), of Jordan's code
//   moonshot  0.2 sqrt(max(rows, columns)), which gives the update the root mean square of AdamW's
//             (Moonlight, arXiv 2502.16982)
//   spectral  sqrt(rows / columns), under which a layer's outputs move alike whatever its shape
//             (Yang, Simon and Bernstein, arXiv 2310.17813)
//
// With precision bf16, X, A and the polynomial are kept and multiplied in bfloat16, where the
// processor has such products; elsewhere they are float32, as with precision f32.
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "backend/cpu/matmul.h"
#include "backend/cpu/sum_of_squares.h"
#include "core/arena.h"
#include "core/parallel.h"
#include "optim/kernels/blocks.h"
#include "optim/rule.h"
#include "optim/rules/common.h"
#include "optim/rules/momentum.h"
#include "optim/tiles.h"

namespace terrace {
namespace {

// The quintic's coefficients: steepest at 0 among those that map [0, 1] close to 1 by and by.
constexpr float kA = 3.4445f;
constexpr float kB = -4.7750f;
constexpr float kC = 2.0315f;

enum class Scale : uint8_t { kNone, kKeller, kMoonshot, kSpectral };

struct MuonSettings {
  double beta = 0.95;
  bool nesterov = true;
  int64_t ns_steps = 5;
  double eps = 1e-7;
  Scale scale = Scale::kMoonshot;
  DType precision = DType::kBF16;
  Momentum momentum = Momentum::kF32;
};

const Names<Scale> kScaleNames = {{"none", Scale::kNone},
                                  {"keller", Scale::kKeller},
                                  {"moonshot", Scale::kMoonshot},
                                  {"spectral", Scale::kSpectral}};
const Names<DType> kPrecisionNames = {{"f32", DType::kF32}, {"bf16", DType::kBF16}};

Fields FieldsOf(MuonSettings& s) {
  const Needs momentum = {[&s] { return s.momentum != Momentum::kNone; }, "a momentum"};
  const Needs stored = {[&s] { return IsStored(s.momentum); }, "a momentum that is not hidden"};
  return {{"beta", &s.beta, "decay of the momentum", {0, kLargestBeta}, momentum},
          {"nesterov", &s.nesterov, "steps by the momentum to come", {}, stored},
          {"ns_steps", &s.ns_steps, "Newton-Schulz iterations", {1, 100}},
          {"eps", &s.eps, "added to the norm that divides", {kSmallestEps, 1}},
          {"scale", Choice(s.scale, kScaleNames), "of the update, by the matrix's shape"},
          {"precision", Choice(s.precision, kPrecisionNames), "of Newton-Schulz"},
          {"momentum", Choice(s.momentum, AnyMomentumNames()),
           "as it is stored; hidden: as gradients"}};
}

// X is [rows, columns]; its Gram matrix and the polynomial are [side, side], of the smaller side.
// Both are computed by tiles; the product of polynomial and X by blocks of X: some columns where
// it is wide, some rows where it is tall. Products read both operands along their rows, which
// symmetric matrices allow and oneDNN computes fastest.
struct NewtonSchulz {
  int64_t rows;
  int64_t columns;
  DType dtype;

  bool wide() const { return rows <= columns; }
  int64_t side() const { return std::min(rows, columns); }
  int64_t length() const { return std::max(rows, columns); }
  SymmetricTiles tiles() const {
    // Smaller tiles spare more of the symmetric half, larger ones are computed faster.
    return {{side(), std::clamp<int64_t>(side() / 8 / 64 * 64, 128, 256)}};
  }
  Parts blocks() const { return {length(), 128}; }

  // --- The products, of which two numbers of parts say which tile ---
  Product Gram(const MatrixBlock& x, const MatrixBlock& gram, int64_t i, int64_t j) const {
    const Parts parts = tiles().parts;
    const int64_t first = parts.First(i), second = parts.First(j);
    const MatrixBlock a = wide() ? x.At(first, 0) : x.At(0, first);
    const MatrixBlock b = wide() ? x.At(second, 0) : x.At(0, second);
    return {.m = parts.Length(i),
            .n = parts.Length(j),
            .k = length(),
            .a = a.AsOperand(!wide()),
            .b = b.AsOperand(wide()),
            .c = gram.At(first, second).AsOperand(),
            .kernel = Kernel::kThisSize};
  }
  Product Square(const MatrixBlock& gram, const MatrixBlock& square, int64_t i, int64_t j) const {
    const Parts parts = tiles().parts;
    const int64_t first = parts.First(i), second = parts.First(j);
    return {.m = parts.Length(i),
            .n = parts.Length(j),
            .k = side(),
            .a = gram.At(first, 0).AsOperand(),
            .b = gram.At(second, 0).AsOperand(/*transposed=*/true),
            .c = square.At(first, second).AsOperand(),
            .kernel = Kernel::kThisSize};
  }
  // `copy` has the block as CopyBlock leaves it.
  Product Step(const MatrixBlock& polynomial, const MatrixBlock& copy, const MatrixBlock& x,
               int64_t block) const {
    const int64_t count = blocks().Length(block);
    return {.m = wide() ? side() : count,
            .n = wide() ? count : side(),
            .k = side(),
            .a = (wide() ? polynomial : copy).AsOperand(),
            .b = (wide() ? copy : polynomial).AsOperand(/*transposed=*/true),
            .c = BlockOf(x, block).AsOperand(),
            .kernel = Kernel::kThisSize};
  }
  // copy[count, side] = a block of rows, or a block of columns as rows.
  void CopyBlock(const MatrixBlock& x, int64_t block, const MatrixBlock& copy) const {
    const int64_t count = blocks().Length(block);
    if (wide()) {
      Transpose(BlockOf(x, block), side(), count, copy);
    } else {
      std::memcpy(copy.data, BlockOf(x, block).data, count * side() * BytesOf(dtype));
    }
  }
  MatrixBlock BlockOf(const MatrixBlock& x, int64_t block) const {
    const int64_t first = blocks().First(block);
    return wide() ? x.At(0, first) : x.At(first, 0);
  }

  // --- Memory ---
  int64_t x_bytes() const { return Arena::Aligned(rows * columns * BytesOf(dtype)); }
  int64_t square_bytes() const { return Arena::Aligned(side() * side() * BytesOf(dtype)); }
  int64_t copy_bytes() const {
    return Arena::Aligned(side() * blocks().Length(0) * BytesOf(dtype));
  }
  int64_t ScratchBytes(int64_t slots, int64_t pad_bytes) const {
    return x_bytes() + 2 * square_bytes() + std::min(slots, blocks().count()) * copy_bytes() +
           std::min(slots, most_tasks()) * pad_bytes;
  }
  int64_t most_tasks() const { return std::max(tiles().count(), blocks().count()); }

  // Of one product, the most: of all that Iterate runs.
  int64_t PadBytes(Matmul& matmul) const {
    const MatrixBlock x{nullptr, dtype, columns};
    const MatrixBlock square{nullptr, dtype, side()};
    int64_t bytes = 0;
    const auto consider = [&](const Product& product) {
      bytes = std::max(bytes, matmul.ScratchBytes(product));
    };
    for (int64_t tile = 0; tile < tiles().count(); ++tile) {
      tiles().At(tile, [&](int64_t i, int64_t j) {
        consider(Gram(x, square, i, j));
        consider(Square(square, square, i, j));
      });
    }
    for (int64_t block = 0; block < blocks().count(); ++block) {
      consider(Step(square, square, x, block));
    }
    return Arena::Aligned(bytes);
  }
};

// p = kA I + kB gram + kC p on the tile with that first row and column.
void MakePolynomial(const MatrixBlock& gram, const MatrixBlock& p, int64_t first_row, int64_t rows,
                    int64_t first_column, int64_t columns) {
  kernels::Combine(p, p, kC, gram, kB, rows, columns);
  if (first_row != first_column) return;
  for (int64_t i = 0; i < rows; ++i) {
    std::byte* const diagonal = p.At(i, i).data;
    if (p.dtype == DType::kF32) {
      *reinterpret_cast<float*>(diagonal) += kA;
    } else {
      BF16* const value = reinterpret_cast<BF16*>(diagonal);
      *value = ToBF16(ToFloat(*value) + kA);
    }
  }
}

class Muon final : public Rule {
 public:
  explicit Muon(const MuonSettings& settings)
      : settings_(settings),
        dtype_(matmul_.HasBF16() ? settings.precision : DType::kF32),
        threads_(MaxThreads()) {}

  std::vector<StateSpec> State(const Parameter& parameter) const override {
    if (parameter.value.shape.rank() != 2) Fail("muon serves matrices only");
    if (parameter.population == Population::kEmbedding ||
        parameter.population == Population::kHead) {
      Fail("muon serves hidden matrices only, neither embedding nor head");
    }
    std::vector<StateSpec> state;
    AddMomentum(settings_.momentum, parameter.value.shape, state);
    AddHiddenBuffer(settings_.momentum, parameter, settings_.beta, state);
    return state;
  }

  // X, two matrices of the smaller side, and for each thread, a copy of a block of X and what
  // oneDNN asks for. Together the copies never exceed X: there are no more of them than it has
  // blocks.
  int64_t ScratchBytes(const Parameter& parameter, bool all_threads) const override {
    if (parameter.value.size() == 0) return 0;
    const NewtonSchulz shape = ShapeOf(parameter);
    return shape.ScratchBytes(Slots(all_threads), PadBytes(shape));
  }

  // Nothing is floored here.
  UpdateReport Apply(const Parameter& parameter, TensorView gradient,
                     std::span<const TensorView> state, const StepContext& context) const override {
    if (parameter.value.size() == 0) return {};
    const NewtonSchulz shape = ShapeOf(parameter);
    const TensorView x{context.scratch, dtype_, parameter.value.shape, "muon.x"};
    WriteDirection(gradient, TakeMomentum(settings_.momentum, state), context, x);
    for (int64_t step = 0; step < settings_.ns_steps; ++step) Iterate(shape, x, context);

    const double lr = context.learning_rate;
    const float keep = KeepOf(context);
    const float size = static_cast<float>(lr * ScaleOf(shape));
    ParallelFor(x.size(), kGrain, [&](int64_t begin, int64_t end) {
      kernels::Descend(RangeOf(parameter.value, begin), keep, RangeOf(x, begin), size, 1,
                       end - begin, context.rounding_key, {begin / kernels::kStripe, 0});
    });
    return {};
  }

 private:
  static constexpr int64_t kGrain = 4 * kernels::kStripe;

  NewtonSchulz ShapeOf(const Parameter& parameter) const {
    return {parameter.value.rows(), parameter.value.columns(), dtype_};
  }

  int64_t Slots(bool all_threads) const { return all_threads ? threads_ : 1; }

  int64_t PadBytes(const NewtonSchulz& shape) const {
    return pad_bytes_.Get(shape.rows, shape.columns, [&] { return shape.PadBytes(matmul_); });
  }

  double ScaleOf(const NewtonSchulz& shape) const {
    const double rows = static_cast<double>(shape.rows);
    const double columns = static_cast<double>(shape.columns);
    switch (settings_.scale) {
      case Scale::kNone:
        return 1;
      case Scale::kKeller:
        return std::sqrt(std::max(1.0, rows / columns));
      case Scale::kMoonshot:
        return 0.2 * std::sqrt(std::max(rows, columns));
      case Scale::kSpectral:
        return std::sqrt(rows / columns);
    }
    return 1;
  }

  // Moves the momentum; x becomes the direction with a Frobenius norm of 1.
  void WriteDirection(TensorView gradient, const kernels::Stored& momentum,
                      const StepContext& context, TensorView x) const {
    if (momentum.values.empty()) {
      const double scale = context.gradient_scale;
      const double norm = scale * std::sqrt(SumOfSquares(gradient));
      WriteSum(gradient, scale / (norm + settings_.eps), {}, 0, x);
      return;
    }
    const float beta = static_cast<float>(settings_.beta);
    const uint64_t momentum_key = kernels::MomentumKey(context.rounding_key);
    const int64_t grain = GrainOf(momentum);
    std::vector<double> squares((x.size() + grain - 1) / grain);
    ParallelFor(x.size(), grain, [&](int64_t begin, int64_t end) {
      squares[begin / grain] =
          kernels::SumMomentum(momentum, beta, gradient, context.gradient_scale, settings_.nesterov,
                               momentum_key, begin, end);
    });
    const double norm = std::sqrt(std::accumulate(squares.begin(), squares.end(), 0.0));
    const double inverse = 1 / (norm + settings_.eps);
    if (settings_.nesterov) {
      WriteSum(momentum, inverse * settings_.beta, gradient, inverse * context.gradient_scale, x);
    } else {
      WriteSum(momentum, inverse, {}, 0, x);
    }
  }

  // x = first_factor * first + second_factor * second, which may be empty.
  static void WriteSum(const kernels::Stored& first, double first_factor, TensorView second,
                       double second_factor, TensorView x) {
    ParallelFor(x.size(), GrainOf(first), [&](int64_t begin, int64_t end) {
      kernels::CombineStored(x, first, static_cast<float>(first_factor), second,
                             static_cast<float>(second_factor), begin, end);
    });
  }

  void Iterate(const NewtonSchulz& shape, TensorView direction, const StepContext& context) const {
    const int64_t slots = Slots(context.all_threads);
    const int64_t pad_bytes = PadBytes(shape);
    std::byte* const after_x = context.scratch + shape.x_bytes();
    std::byte* const copies = after_x + 2 * shape.square_bytes();
    std::byte* const pads = copies + std::min(slots, shape.blocks().count()) * shape.copy_bytes();
    const MatrixBlock x{direction.data, dtype_, shape.columns};
    const MatrixBlock gram{after_x, dtype_, shape.side()};
    const MatrixBlock polynomial{after_x + shape.square_bytes(), dtype_, shape.side()};
    const auto run = [&](const Product& product, int64_t slot) {
      matmul_.Run(product, {pads + slot * pad_bytes, static_cast<size_t>(pad_bytes)});
    };

    const SymmetricTiles tiles = shape.tiles();
    const Parts parts = tiles.parts;
    // Calls body(i, j, slot) for tiles, which leaves tile (i, j) in `result`; mirrors it.
    const auto for_tiles = [&](const MatrixBlock& result, const auto& body) {
      ForTasks(tiles.count(), slots, [&](int64_t task, int64_t slot) {
        tiles.At(task, [&](int64_t i, int64_t j) {
          body(i, j, slot);
          if (i == j) return;
          const int64_t row = parts.First(i), column = parts.First(j);
          Transpose(result.At(row, column), parts.Length(i), parts.Length(j),
                    result.At(column, row));
        });
      });
    };
    for_tiles(gram,
              [&](int64_t i, int64_t j, int64_t slot) { run(shape.Gram(x, gram, i, j), slot); });
    for_tiles(polynomial, [&](int64_t i, int64_t j, int64_t slot) {
      run(shape.Square(gram, polynomial, i, j), slot);
      const int64_t row = parts.First(i), column = parts.First(j);
      MakePolynomial(gram.At(row, column), polynomial.At(row, column), row, parts.Length(i), column,
                     parts.Length(j));
    });
    ForTasks(shape.blocks().count(), slots, [&](int64_t block, int64_t slot) {
      const MatrixBlock copy{copies + slot * shape.copy_bytes(), dtype_, shape.side()};
      shape.CopyBlock(x, block, copy);
      run(shape.Step(polynomial, copy, x, block), slot);
    });
  }

  MuonSettings settings_;
  mutable Matmul matmul_;
  DType dtype_;
  int64_t threads_;
  mutable ByShape<int64_t> pad_bytes_;
};

}  // namespace

std::unique_ptr<Rule> MakeMuon(SettingsReader& settings) {
  MuonSettings s;
  settings.Read(FieldsOf(s));
  return std::make_unique<Muon>(s);
}

}  // namespace terrace
