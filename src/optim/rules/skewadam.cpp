// skewadam (arXiv 2607.19058), s the tensor's own step from 1, g the scaled gradient:
//   w <- w (1 - lr * decay)
//   factored (matrices): R, C the row and column means of g^2
//     vr <- beta2 vr + (1 - beta2) R,   vc <- beta2 vc + (1 - beta2) C
//     denominator_ij = sqrt(max(vr_i / max(mean(vr), 1e-15), eps)) * sqrt(max(vc_j, eps))
//   exact: v <- beta2 v + (1 - beta2) g^2,   denominator = sqrt(max(v, eps))
//   with momentum: m <- beta1 m + (1 - beta1) g,  x = m sqrt(1 - beta2^s) / (1 - beta1^s)
//   without:                                      x = g sqrt(1 - beta2^s)
//   u = x / denominator;   w <- w - lr * u / max(1, RMS(u) / rms_clip)
//
// eps floors the uncorrected vc (or v): with eps_mode relative it is eps * mean(vc) (or of v),
// and the 1e-15 becomes kSmallest, so that the update does not depend on the gradient's scale.
#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <vector>

#include "core/parallel.h"
#include "optim/kernels/elementwise.h"
#include "optim/kernels/factored.h"
#include "optim/rule.h"
#include "optim/rules/adam_settings.h"
#include "optim/rules/row_blocks.h"

namespace terrace {
namespace {

// What remains positive where all gradients are zero; its root and its inverse are normal floats.
constexpr double kSmallest = 1e-30;

// What eps means for a floored second moment v: max(v, eps), as published, or max(v, eps * mean
// of v), which does not depend on the scale of the gradients.
enum class EpsMode : uint8_t { kAbsolute, kRelative };

// kFactored serves matrices by row and column means; tensors of other ranks stay exact.
enum class SecondMoment : uint8_t { kFactored, kExact };

// How the momentum is stored, if there is one.
enum class Momentum : uint8_t { kNone, kF32, kBF16 };

struct SkewAdamSettings : AdamSettings {
  EpsMode eps_mode;
  Momentum momentum;
  SecondMoment second_moment;
  double rms_clip;  // largest root mean square of an update before the learning rate; 0: none
};

SkewAdamSettings ReadSkewAdamSettings(SettingsReader& settings) {
  return {ReadAdamSettings(settings),
          settings.Choice("eps_mode", EpsMode::kAbsolute,
                          {{"absolute", EpsMode::kAbsolute}, {"relative", EpsMode::kRelative}}),
          settings.Choice(
              "momentum", Momentum::kF32,
              {{"none", Momentum::kNone}, {"f32", Momentum::kF32}, {"bf16", Momentum::kBF16}}),
          settings.Choice("second_moment", SecondMoment::kFactored,
                          {{"factored", SecondMoment::kFactored}, {"exact", SecondMoment::kExact}}),
          settings.Number("rms_clip", 1, 0, 1e30)};
}

class SkewAdam final : public Rule {
 public:
  explicit SkewAdam(const SkewAdamSettings& settings) : settings_(settings) {}

  std::vector<StateSpec> State(const Parameter& parameter) const override {
    const Shape& shape = parameter.value.shape;
    std::vector<StateSpec> state;
    if (HasMomentum()) {
      const DType dtype = settings_.momentum == Momentum::kBF16 ? DType::kBF16 : DType::kF32;
      state.push_back({"momentum", dtype, shape});
    }
    if (Factored(shape)) {
      state.push_back({"row_second_moment", DType::kF32, {shape[0]}});
      state.push_back({"column_second_moment", DType::kF32, {shape[1]}});
    } else {
      state.push_back({"second_moment", DType::kF32, shape});
    }
    return state;
  }

  // Floored entries are columns (vc) of a factored tensor and elements (v) of an exact one.
  UpdateReport Apply(const Parameter& parameter, TensorView gradient,
                     std::span<const TensorView> state, const StepContext& context) const override {
    if (parameter.value.size() == 0) return {};
    const TensorView momentum = HasMomentum() ? state[0] : TensorView{};
    const std::span<const TensorView> moments = state.subspan(HasMomentum() ? 1 : 0);
    const double step = static_cast<double>(context.tensor_step);
    double correction = std::sqrt(1 - std::pow(settings_.beta2, step));
    // The numerator is the momentum, which has the gradient's scale in it already, or the gradient.
    correction *=
        HasMomentum() ? 1 / (1 - std::pow(settings_.beta1, step)) : context.gradient_scale;
    return Factored(parameter.value.shape)
               ? ApplyFactored(parameter, gradient, momentum, moments[0], moments[1], context,
                               static_cast<float>(correction))
               : ApplyExact(parameter, gradient, momentum, moments[0], context,
                            static_cast<float>(correction));
  }

 private:
  bool HasMomentum() const { return settings_.momentum != Momentum::kNone; }

  bool Factored(const Shape& shape) const {
    return settings_.second_moment == SecondMoment::kFactored && shape.rank() == 2;
  }

  // Of second moments of that mean.
  float Floor(double mean) const {
    if (settings_.eps_mode == EpsMode::kAbsolute) return static_cast<float>(settings_.eps);
    return static_cast<float>(std::max(settings_.eps * mean, kSmallest));
  }

  // lr / max(1, RMS(u) / rms_clip)
  float StepSize(float learning_rate, double squares, int64_t size) const {
    if (settings_.rms_clip == 0) return learning_rate;
    const double rms = std::sqrt(squares / static_cast<double>(size));
    return static_cast<float>(learning_rate / std::max(1.0, rms / settings_.rms_clip));
  }

  static float Keep(const StepContext& context) {
    return static_cast<float>(1 -
                              static_cast<double>(context.learning_rate) * context.weight_decay);
  }

  UpdateReport ApplyFactored(const Parameter& parameter, TensorView gradient, TensorView momentum,
                             TensorView row_moments, TensorView column_moments,
                             const StepContext& context, float correction) const {
    const int64_t rows = parameter.value.rows();
    const int64_t columns = parameter.value.columns();
    const int64_t padded = kernels::PaddedColumns(columns);
    const RowBlocks blocks(rows);
    const bool clipped = settings_.rms_clip != 0;
    // Row factors, column factors, then sums of each block over columns, one or two kinds.
    const auto scratch = std::make_unique_for_overwrite<float[]>(
        rows + padded + (clipped ? 2 : 1) * blocks.count * padded);
    float* row_factors = scratch.get();
    float* column_factors = row_factors + rows;
    float* column_sums = column_factors + padded;
    float* weighted_sums = clipped ? column_sums + blocks.count * padded : nullptr;

    const kernels::Decay row_decay = DecayOf(context.gradient_scale, columns);
    const uint64_t momentum_key = kernels::MomentumKey(context.rounding_key);
    ForBlocks(blocks, [&](int64_t block, int64_t begin, int64_t end) {
      kernels::FactoredSums(gradient, context.gradient_scale, momentum, settings_.beta1,
                            momentum_key, begin, end, row_factors, column_sums + block * padded,
                            row_moments.as<float>(), row_decay,
                            clipped ? weighted_sums + block * padded : nullptr);
    });
    AddBlocks(blocks, columns, padded, column_sums);
    if (clipped) AddBlocks(blocks, columns, padded, weighted_sums);

    // From here on row_factors[i] = correction / sqrt(max(vr / mean, eps)), from row sums in place,
    // and column_factors[j] = 1 / sqrt(max(vc, floor)).
    const double row_mean =
        kernels::DecayMoments(row_moments.as<float>(), row_factors, rows, row_decay) /
        static_cast<double>(rows);
    const double column_mean =
        kernels::DecayMoments(column_moments.as<float>(), column_sums, columns,
                              DecayOf(context.gradient_scale, rows)) /
        static_cast<double>(columns);
    const double mean =
        std::max(row_mean, settings_.eps_mode == EpsMode::kAbsolute ? 1e-15 : kSmallest);
    const int64_t floored_rows =
        kernels::InverseRoots(row_moments.as<float>(), rows, static_cast<float>(1 / mean),
                              static_cast<float>(settings_.eps), correction, row_factors);
    const int64_t floored_columns = kernels::InverseRoots(column_moments.as<float>(), columns, 1,
                                                          Floor(column_mean), 1, column_factors);
    std::fill(column_factors + columns, column_factors + padded, 0.0f);

    const TensorView numerator = HasMomentum() ? momentum : gradient;
    double squares = 0;
    if (clipped && floored_rows == 0) {
      for (int64_t j = 0; j < columns; ++j) {
        const double factor = column_factors[j];
        squares += factor * factor * weighted_sums[j];
      }
      squares *= mean * correction * correction;
    } else if (clipped) {
      std::vector<double> partial(blocks.count);
      ForBlocks(blocks, [&](int64_t block, int64_t begin, int64_t end) {
        partial[block] =
            kernels::FactoredSquares(numerator, begin, end, row_factors, column_factors);
      });
      squares = std::accumulate(partial.begin(), partial.end(), 0.0);
    }
    const float size = StepSize(context.learning_rate, squares, rows * columns);

    // The first pass waits for memory, this one for arithmetic: it fetches what a following
    // tensor's first pass is going to wait for.
    const TensorView next = context.next_gradient;
    const int64_t part_bytes = next.data != nullptr ? next.bytes() / blocks.count : 0;
    ForBlocks(blocks, [&](int64_t block, int64_t begin, int64_t end) {
      kernels::FactoredUpdate(parameter.value, numerator, Keep(context), size, begin, end,
                              row_factors, column_factors, context.rounding_key,
                              {next.data + block * part_bytes, part_bytes});
    });
    return {floored_columns, columns};
  }

  // Of second moments that are means of `summands` squares; the sums are of the gradient before its
  // scale.
  kernels::Decay DecayOf(float gradient_scale, int64_t summands) const {
    const double gain =
        (1 - settings_.beta2) * gradient_scale * gradient_scale / static_cast<double>(summands);
    return {static_cast<float>(settings_.beta2), static_cast<float>(gain)};
  }

  UpdateReport ApplyExact(const Parameter& parameter, TensorView gradient, TensorView momentum,
                          TensorView second, const StepContext& context, float correction) const {
    constexpr int64_t kGrain = 4 * kernels::kStripe;
    const int64_t size = parameter.value.size();
    const TensorView numerator = HasMomentum() ? momentum : gradient;
    const int64_t blocks = (size + kGrain - 1) / kGrain;

    const uint64_t momentum_key = kernels::MomentumKey(context.rounding_key);
    std::vector<double> sums(blocks);
    ParallelFor(size, kGrain, [&](int64_t begin, int64_t end) {
      sums[begin / kGrain] =
          kernels::ExactMoments(gradient, context.gradient_scale, momentum, settings_.beta1,
                                momentum_key, second, settings_.beta2, begin, end);
    });
    const double sum = std::accumulate(sums.begin(), sums.end(), 0.0);
    const float floor = Floor(sum / static_cast<double>(size));

    std::vector<kernels::ExactSquares> partial(blocks);
    ParallelFor(size, kGrain, [&](int64_t begin, int64_t end) {
      partial[begin / kGrain] = kernels::SumExactSquares(numerator, second, floor, begin, end);
    });
    UpdateReport report{0, size};
    double squares = 0;
    for (const kernels::ExactSquares& part : partial) {
      squares += part.sum;
      report.floored += part.floored;
    }
    squares *= static_cast<double>(correction) * correction;

    const float step = correction * StepSize(context.learning_rate, squares, size);
    ParallelFor(size, kGrain, [&](int64_t begin, int64_t end) {
      kernels::ExactUpdate(parameter.value, numerator, second, floor, Keep(context), step, begin,
                           end, context.rounding_key);
    });
    return report;
  }

  SkewAdamSettings settings_;
};

}  // namespace

std::unique_ptr<Rule> MakeSkewAdam(SettingsReader& settings) {
  return std::make_unique<SkewAdam>(ReadSkewAdamSettings(settings));
}

}  // namespace terrace
