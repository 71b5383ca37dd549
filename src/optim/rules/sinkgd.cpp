// sinkgd, and with a momentum what MESH (arXiv 2608.04407) does to experts:
//   x = g, or a momentum m <- beta m + (1 - beta) g
//   X = x; then, `iterations` times: each row of X to the L2 norm sqrt(columns), each column to
//   sqrt(rows), with eps added to the norm that divides
//   w <- w (1 - lr * decay) - lr * scale * X
// X is never stored: Sinkhorn's alternation only ever scales rows and columns of x, so that a
// factor a row and one a column say it all.
//
// momentum `hidden_f32` and `hidden_bf16`: a hidden buffer, the gradient buffer b itself,
// b <- beta b + g, is the momentum (x = (1 - beta) b); it costs no optimizer state.
// One of bfloat16 needs weights of bfloat16.
// grouping `layer`: all experts' matrices of one kind in a layer are normalized as one, stacked by
// rows. direction `sign`: sign(x) for X.
//
// multiplier `neuron` (MESH-B): for each block of block_neurons neurons
//   v <- multiplier_beta2 v + (1 - multiplier_beta2) * mean of g^2 in the block
// and X is multiplied by 1 / (sqrt(v / (1 - multiplier_beta2^s)) + multiplier_eps), of which the
// geometric mean is brought to 1 and each to within [1/4, 4], then by what restores the Frobenius
// norm. With a hidden momentum, g is the buffer.
#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <vector>

#include "core/error.h"
#include "optim/kernels/factored.h"
#include "optim/kernels/sign.h"
#include "optim/rule.h"
#include "optim/rules/common.h"
#include "optim/rules/momentum.h"
#include "optim/rules/row_blocks.h"

namespace terrace {
namespace {

enum class Direction : uint8_t { kSinkhorn, kSign };
enum class Grouping : uint8_t { kTensor, kLayer };
enum class Multiplier : uint8_t { kNone, kNeuron };

struct SinkGdSettings {
  double scale = 0.05;
  Direction direction = Direction::kSinkhorn;
  Momentum momentum = Momentum::kNone;
  double beta = 0.9;
  int64_t iterations = 5;
  double eps = 1e-8;
  Grouping grouping = Grouping::kTensor;
  Multiplier multiplier = Multiplier::kNone;
  int64_t block_neurons = 1;
  double multiplier_beta2 = 0.99;
  double multiplier_eps = 1e-8;
};

const Names<Direction> kDirectionNames = {{"sinkhorn", Direction::kSinkhorn},
                                          {"sign", Direction::kSign}};
const Names<Grouping> kGroupingNames = {{"tensor", Grouping::kTensor}, {"layer", Grouping::kLayer}};
const Names<Multiplier> kMultiplierNames = {{"none", Multiplier::kNone},
                                            {"neuron", Multiplier::kNeuron}};

Fields FieldsOf(SinkGdSettings& s) {
  const Needs momentum = {[&s] { return s.momentum != Momentum::kNone; }, "a momentum"};
  const Needs sinkhorn = {[&s] { return s.direction == Direction::kSinkhorn; },
                          "direction = \"sinkhorn\""};
  const Needs neuron = {
      [&s] { return s.direction == Direction::kSinkhorn && s.multiplier == Multiplier::kNeuron; },
      "multiplier = \"neuron\""};
  return {
      {"scale", &s.scale, "times the normalized matrix", {0, 1e6}},
      {"direction", Choice(s.direction, kDirectionNames), "of the update"},
      {"momentum", Choice(s.momentum, AnyMomentumNames()), "as it is stored; hidden: as gradients"},
      {"beta", &s.beta, "decay of the momentum", {0, kLargestBeta}, momentum},
      {"iterations", &s.iterations, "of rows and columns", {1, 1000}, sinkhorn},
      {"eps", &s.eps, "added to the norm that divides", {kSmallestEps, 1}, sinkhorn},
      {"grouping", Choice(s.grouping, kGroupingNames), "what is normalized as one", {}, sinkhorn},
      {"multiplier", Choice(s.multiplier, kMultiplierNames), "one for each", {}, sinkhorn},
      {"block_neurons", &s.block_neurons, "that share a multiplier", {1, 1e9}, neuron},
      {"multiplier_beta2", &s.multiplier_beta2, "decay of its moment", {0, kLargestBeta}, neuron},
      {"multiplier_eps", &s.multiplier_eps, "added to its root", {kSmallestEps, 1}, neuron},
  };
}

// Matrices stacked by rows, and what Sinkhorn's alternation multiplies them by.
struct Stack {
  struct Matrix {
    kernels::Stored x;  // [rows, columns]
    int64_t first_row;  // within the stack
  };
  int64_t columns = 0;
  int64_t rows = 0;  // together
  std::vector<Matrix> matrices = {};
  std::vector<float> row_factors = {};     // [rows]
  std::vector<float> column_factors = {};  // [columns], padded
};

// Body: (matrix, first row, end row) for the pieces of matrices in rows [begin, end) of the stack;
// rows are the matrix's own.
template <typename Body>
void ForPieces(const Stack& stack, int64_t begin, int64_t end, const Body& body) {
  for (size_t m = 0; m < stack.matrices.size(); ++m) {
    const auto& [x, first_row] = stack.matrices[m];
    const int64_t first = std::max(begin, first_row) - first_row;
    const int64_t last = std::min(end, first_row + x.values.rows()) - first_row;
    if (first < last) body(m, first, last);
  }
}

// Of a gradient's squares.
struct SquareSums {
  std::vector<float> rows;
  std::vector<float> columns;  // and more, for padding and partial sums
};

class SinkGd final : public Rule {
 public:
  explicit SinkGd(const SinkGdSettings& settings) : settings_(settings) {}

  std::vector<StateSpec> State(const Parameter& parameter) const override {
    const Shape& shape = parameter.value.shape;
    // The sign needs no rows and columns.
    if (shape.rank() != 2 && settings_.direction == Direction::kSinkhorn) {
      Fail("sinkgd serves matrices only");
    }
    std::vector<StateSpec> state;
    AddMomentum(settings_.momentum, shape, state);
    if (settings_.multiplier == Multiplier::kNeuron) {
      const int64_t neurons = shape[parameter.neuron_axis];
      const int64_t blocks = (neurons + settings_.block_neurons - 1) / settings_.block_neurons;
      state.push_back({"block_second_moment", DType::kF32, {blocks}});
    }
    AddHiddenBuffer(settings_.momentum, parameter, settings_.beta, state);
    return state;
  }

  std::string GroupOf(const Parameter& parameter) const override {
    if (settings_.grouping == Grouping::kTensor || parameter.expert < 0) return {};
    // "layers.1.ff.experts.7.gate_proj.weight" and its like of other experts.
    std::string name = parameter.name;
    const std::string number = fmt::format(".{}.", parameter.expert);
    const size_t at = name.rfind(number);
    if (at != std::string::npos) name.replace(at, number.size(), ".*.");
    return name;
  }

  UpdateReport Apply(const Parameter& parameter, TensorView gradient,
                     std::span<const TensorView> state, const StepContext& context) const override {
    const TensorUpdate update{&parameter, gradient, state, context};
    return ApplyTogether({&update, 1});
  }

  UpdateReport ApplyTogether(std::span<const TensorUpdate> group) const override {
    if (settings_.direction == Direction::kSign) {
      for (const TensorUpdate& update : group) ApplySign(update);
      return {};
    }
    Stack stack = StackOf(group);
    if (stack.rows == 0 || stack.columns == 0) return {};
    // Rows are normalized first: where tensors are clipped apart, their scales differ by nothing
    // that eps does not hide.
    const float scale = GradientScale(group.front().context);
    const bool multiplied = settings_.multiplier == Multiplier::kNeuron;
    std::vector<SquareSums> sums(group.size());
    for (size_t m = 0; m < group.size(); ++m) {
      if (StatedMomentum() || multiplied) sums[m] = MoveMomentum(group[m]);
    }
    Balance(stack, StatedMomentum() ? 1 : scale);
    for (size_t m = 0; m < group.size(); ++m) {
      const float step = static_cast<float>(group[m].context.learning_rate * settings_.scale);
      if (multiplied) {
        UpdateMultiplied(group[m], sums[m], stack, m, step);
      } else {
        Update(group[m], stack, m, stack.column_factors, step);
      }
    }
    return {};
  }

 private:
  bool StatedMomentum() const { return IsStored(settings_.momentum); }
  kernels::Stored MomentumOf(const TensorUpdate& update) const {
    std::span<const TensorView> state = update.state;
    return TakeMomentum(settings_.momentum, state);
  }
  // Of a hidden momentum too.
  float GradientScale(const StepContext& context) const {
    const bool hidden = IsHidden(settings_.momentum);
    return context.gradient_scale * static_cast<float>(hidden ? 1 - settings_.beta : 1);
  }

  // sign(beta m + (1 - beta) g) is the sign of the momentum that is kept.
  void ApplySign(const TensorUpdate& update) const {
    const StepContext& context = update.context;
    const kernels::SignStep step{
        .gradient_scale = context.gradient_scale,
        .beta1 = settings_.beta,
        .beta2 = settings_.beta,
        .keep = KeepOf(context),
        .rate = static_cast<float>(context.learning_rate * settings_.scale)};
    const kernels::Stored momentum = MomentumOf(update);
    const TensorView weight = update.parameter->value;
    ParallelFor(weight.size(), GrainOf(momentum), [&](int64_t begin, int64_t end) {
      kernels::SignUpdate(weight, update.gradient, momentum, step, begin, end,
                          context.rounding_key);
    });
  }

  Stack StackOf(std::span<const TensorUpdate> group) const {
    Stack stack{.columns = group.front().parameter->value.columns()};
    for (const TensorUpdate& update : group) {
      const kernels::Stored x = StatedMomentum() ? MomentumOf(update) : update.gradient;
      stack.matrices.push_back({x, stack.rows});
      stack.rows += x.values.rows();
    }
    return stack;
  }

  // Fills the stack's factors; x counts `scale` times.
  void Balance(Stack& stack, float scale) const {
    const int64_t columns = stack.columns;
    const int64_t padded = kernels::PaddedColumns(columns);
    const RowBlocks blocks(stack.rows);
    const float eps = static_cast<float>(settings_.eps);
    const float row_norm = std::sqrt(static_cast<float>(columns));
    const float column_norm = std::sqrt(static_cast<float>(stack.rows));
    stack.row_factors.assign(static_cast<size_t>(stack.rows), scale);
    stack.column_factors.assign(static_cast<size_t>(padded), 1);
    std::fill(stack.column_factors.begin() + columns, stack.column_factors.end(), 0.0f);
    std::vector<float> sums(static_cast<size_t>(blocks.count * padded));
    for (int64_t iteration = 0; iteration < settings_.iterations; ++iteration) {
      ForBlocks(blocks, [&](int64_t block, int64_t begin, int64_t end) {
        float* own = sums.data() + block * padded;
        std::fill_n(own, padded, 0.0f);
        ForPieces(stack, begin, end, [&](size_t m, int64_t first, int64_t last) {
          const auto& [x, first_row] = stack.matrices[m];
          kernels::SinkhornRows(x, first, last, row_norm, eps, stack.column_factors.data(),
                                stack.row_factors.data() + first_row, own);
        });
      });
      AddBlocks(blocks, columns, padded, sums.data());
      for (int64_t j = 0; j < columns; ++j) {
        float& factor = stack.column_factors[static_cast<size_t>(j)];
        const float norm = factor * std::sqrt(sums[static_cast<size_t>(j)]);
        factor *= norm > 0 ? column_norm / (norm + eps) : 0;
      }
    }
  }

  void Update(const TensorUpdate& update, const Stack& stack, size_t m,
              const std::vector<float>& column_factors, float step) const {
    const auto& [x, first_row] = stack.matrices[m];
    ForBlocks(RowBlocks(x.values.rows()), [&](int64_t, int64_t begin, int64_t end) {
      kernels::FactoredUpdate(update.parameter->value, x, KeepOf(update.context), step, begin, end,
                              stack.row_factors.data() + first_row, column_factors.data(),
                              update.context.rounding_key, {});
    });
  }

  // Moves the momentum, if there is one in the state.
  SquareSums MoveMomentum(const TensorUpdate& update) const {
    const TensorView gradient = update.gradient;
    const int64_t padded = kernels::PaddedColumns(gradient.columns());
    const RowBlocks blocks(gradient.rows());
    SquareSums sums{std::vector<float>(static_cast<size_t>(blocks.rows)),
                    std::vector<float>(static_cast<size_t>(blocks.count * padded))};
    const kernels::Stored momentum = MomentumOf(update);
    ForBlocks(blocks, [&](int64_t block, int64_t begin, int64_t end) {
      kernels::FactoredSums(gradient, update.context.gradient_scale, momentum, settings_.beta,
                            kernels::MomentumKey(update.context.rounding_key), begin, end,
                            sums.rows.data(), sums.columns.data() + block * padded, nullptr, {},
                            nullptr);
    });
    AddBlocks(blocks, gradient.columns(), padded, sums.columns.data());
    return sums;
  }

  void UpdateMultiplied(const TensorUpdate& update, const SquareSums& sums, Stack& stack, size_t m,
                        float step) const {
    const auto& [x, first_row] = stack.matrices[m];
    const bool by_column = update.parameter->neuron_axis == 1;
    float* row_factors = stack.row_factors.data() + first_row;
    std::vector<float> column_factors = stack.column_factors;
    const double before = SquaredNormOf(x, row_factors, column_factors);

    const std::vector<float> multipliers =
        Multipliers(update, by_column ? sums.columns : sums.rows);
    float* multiplied = by_column ? column_factors.data() : row_factors;
    const int64_t neurons = by_column ? x.values.columns() : x.values.rows();
    for (int64_t n = 0; n < neurons; ++n) {
      multiplied[n] *= multipliers[static_cast<size_t>(n / settings_.block_neurons)];
    }
    const double after = SquaredNormOf(x, row_factors, column_factors);
    const double restored = after > 0 ? std::sqrt(before / after) : 1;
    Update(update, stack, m, column_factors, static_cast<float>(step * restored));
  }

  static double SquaredNormOf(const kernels::Stored& x, const float* row_factors,
                              const std::vector<float>& column_factors) {
    const RowBlocks blocks(x.values.rows());
    std::vector<double> partial(static_cast<size_t>(blocks.count));
    ForBlocks(blocks, [&](int64_t block, int64_t begin, int64_t end) {
      partial[static_cast<size_t>(block)] =
          kernels::FactoredSquares(x, begin, end, row_factors, column_factors.data());
    });
    return std::accumulate(partial.begin(), partial.end(), 0.0);
  }

  // By block, whose second moments it moves; `squares` are sums of the gradient's by neuron.
  std::vector<float> Multipliers(const TensorUpdate& update,
                                 const std::vector<float>& squares) const {
    std::span<const TensorView> state = update.state;
    TakeMomentum(settings_.momentum, state);
    const TensorView moments = state[0];
    const int64_t neurons = update.parameter->value.shape[update.parameter->neuron_axis];
    const double scale = GradientScale(update.context);
    const double width =
        static_cast<double>(update.parameter->value.size()) / static_cast<double>(neurons);
    const double beta2 = settings_.multiplier_beta2;
    const double correction =
        1 / (1 - std::pow(beta2, static_cast<double>(update.context.tensor_step)));

    std::vector<double> logarithms;
    double sum = 0;
    for (int64_t block = 0; block < moments.size(); ++block) {
      const int64_t first = block * settings_.block_neurons;
      const int64_t last = std::min(neurons, first + settings_.block_neurons);
      const double sum_of_block =
          std::accumulate(squares.begin() + first, squares.begin() + last, 0.0);
      const double mean =
          scale * scale * sum_of_block / (width * static_cast<double>(last - first));
      float& moment = moments.as<float>()[block];
      moment = static_cast<float>(beta2 * moment + (1 - beta2) * mean);
      logarithms.push_back(-std::log(std::sqrt(correction * moment) + settings_.multiplier_eps));
      sum += logarithms.back();
    }
    std::vector<float> multipliers;
    for (const double logarithm : logarithms) {
      const double centred = logarithm - sum / static_cast<double>(moments.size());
      multipliers.push_back(static_cast<float>(std::clamp(std::exp(centred), 0.25, 4.0)));
    }
    return multipliers;
  }

  SinkGdSettings settings_;
};

}  // namespace

std::unique_ptr<Rule> MakeSinkGd(SettingsReader& settings) {
  SinkGdSettings s;
  settings.Read(FieldsOf(s));
  return std::make_unique<SinkGd>(s);
}

}  // namespace terrace
