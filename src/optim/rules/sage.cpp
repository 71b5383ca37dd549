// sage, for embeddings, heads and vectors (as part of MESH, arXiv 2608.04407): the sign of a
// momentum, with a factor for each column that holds back where gradients are larger than they
// are on the whole. A vector is a matrix of one row. s below is the tensor's own step from 1:
//   a_j = mean over rows of |g_ij|,   S <- beta2 S + (1 - beta2) a,   S' = S / (1 - beta2^s)
//   H_j = min(1, rms(S') / (S'_j + eps), rms(a) / (a_j + eps))
//   w <- w (1 - lr * decay) - lr * H_j * sign(beta1 m + (1 - beta1) g)
//   m <- beta2 m + (1 - beta2) g
#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "optim/kernels/factored.h"
#include "optim/kernels/sign.h"
#include "optim/rule.h"
#include "optim/rules/common.h"
#include "optim/rules/row_blocks.h"
#include "optim/rules/sign_settings.h"

namespace terrace {
namespace {

double RootMeanSquare(const float* values, int64_t count, double scale) {
  double sum = 0;
  for (int64_t j = 0; j < count; ++j) sum += scale * values[j] * scale * values[j];
  return std::sqrt(sum / static_cast<double>(count));
}

class Sage final : public Rule {
 public:
  Sage(const SignSettings& settings, double eps) : settings_(settings), eps_(eps) {}

  std::vector<StateSpec> State(const Parameter& parameter) const override {
    std::vector<StateSpec> state;
    AddMomentum(settings_.momentum, parameter.value.shape, state);
    state.push_back({"absolute_mean", DType::kF32, {AsMatrix(parameter.value).columns()}});
    return state;
  }

  UpdateReport Apply(const Parameter& parameter, TensorView gradient,
                     std::span<const TensorView> state, const StepContext& context) const override {
    if (parameter.value.size() == 0) return {};
    const TensorView weight = AsMatrix(parameter.value);
    gradient = AsMatrix(gradient);
    const int64_t columns = weight.columns();
    const int64_t padded = kernels::PaddedColumns(columns);
    const RowBlocks blocks(weight.rows());
    kernels::Stored momentum = TakeMomentum(settings_.momentum, state);
    momentum.values = AsMatrix(momentum.values);

    std::vector<float> sums(static_cast<size_t>(blocks.count * padded));
    ForBlocks(blocks, [&](int64_t block, int64_t begin, int64_t end) {
      kernels::AbsoluteSums(gradient, begin, end, sums.data() + block * padded);
    });
    AddBlocks(blocks, columns, padded, sums.data());
    // The means, then in their place the factors.
    std::vector<float>& factors = sums;
    const float mean = context.gradient_scale / static_cast<float>(weight.rows());
    for (int64_t j = 0; j < columns; ++j) factors[j] *= mean;
    Restrain(factors.data(), state[0].as<float>(), columns, context.tensor_step);

    const kernels::SignStep step = StepOf(settings_, context);
    ForBlocks(blocks, [&](int64_t, int64_t begin, int64_t end) {
      kernels::SignUpdateRows(weight, gradient, momentum, step, factors.data(), begin, end,
                              context.rounding_key);
    });
    return {};
  }

 private:
  static TensorView AsMatrix(TensorView view) {
    const int64_t rows = view.shape.rank() == 1 ? 1 : view.shape[0];
    return view.Reshaped({rows, rows > 0 ? view.size() / rows : 0});
  }

  // Moves the averages by the means, and replaces the means by H.
  void Restrain(float* means, float* averages, int64_t columns, int64_t step) const {
    const double correction = 1 / (1 - std::pow(settings_.beta2, static_cast<double>(step)));
    for (int64_t j = 0; j < columns; ++j) {
      averages[j] =
          static_cast<float>(settings_.beta2 * averages[j] + (1 - settings_.beta2) * means[j]);
    }
    const double now = RootMeanSquare(means, columns, 1);
    const double on_average = RootMeanSquare(averages, columns, correction);
    for (int64_t j = 0; j < columns; ++j) {
      means[j] = static_cast<float>(
          std::min({1.0, on_average / (correction * averages[j] + eps_), now / (means[j] + eps_)}));
    }
  }

  SignSettings settings_;
  double eps_;
};

}  // namespace

std::unique_ptr<Rule> MakeSage(SettingsReader& settings) {
  SignSettings s;
  double eps = 1e-8;
  Fields fields = SignFields(s);
  fields.push_back({"eps", &eps, "added to what divides", {kSmallestEps, 1}});
  settings.Read(fields);
  return std::make_unique<Sage>(s, eps);
}

}  // namespace terrace
