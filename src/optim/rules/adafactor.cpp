// adafactor (arXiv 1804.04235) with external learning rates, s the tensor's own step from 1, g the
// scaled gradient:
//   beta2 = 1 - s^decay_rate: nothing at the first step, longer and longer memory then
//   matrices: R, C the row and column means of g^2 + eps
//     vr <- beta2 vr + (1 - beta2) R,   vc <- beta2 vc + (1 - beta2) C
//     u_ij = g_ij / (sqrt(vr_i / mean(vr)) * sqrt(vc_j))
//   other ranks: v <- beta2 v + (1 - beta2) (g^2 + eps),   u = g / sqrt(v)
//   u <- u / max(1, RMS(u) / clip_threshold)
//   w <- w (1 - lr * decay) - lr * u
// With a momentum, m <- beta1 m + (1 - beta1) u takes the place of u in the last line.
#include <cmath>
#include <limits>
#include <memory>

#include "optim/rule.h"
#include "optim/rules/adaptive.h"
#include "optim/rules/common.h"
#include "optim/rules/momentum.h"

namespace terrace {
namespace {

struct AdafactorSettings {
  double decay_rate = -0.8;
  double eps = 1e-30;
  double clip_threshold = 1;
  Momentum momentum = Momentum::kNone;  // of updates
  double beta1 = 0.9;
};

Fields FieldsOf(AdafactorSettings& s) {
  const Needs momentum = {[&s] { return s.momentum != Momentum::kNone; }, "a momentum"};
  // At a decay_rate of -1 all steps count alike: beyond it the first would never be forgotten.
  return {
      {"decay_rate", &s.decay_rate, "exponent of the second moment's memory", {-1, 0}},
      {"eps", &s.eps, "added to squared gradients", {kSmallestMoment, 1}},
      {"clip_threshold", &s.clip_threshold, "root mean square of an update; 0: none", {0, 1e30}},
      {"momentum", Choice(s.momentum, MomentumOrNoneNames()), "of updates, as it is stored"},
      {"beta1", &s.beta1, "decay of the momentum", {0, kLargestBeta}, momentum}};
}

class Adafactor final : public Rule {
 public:
  explicit Adafactor(const AdafactorSettings& settings) : settings_(settings) {}

  std::vector<StateSpec> State(const Parameter& parameter) const override {
    const Shape& shape = parameter.value.shape;
    std::vector<StateSpec> state;
    AddMomentum(settings_.momentum, shape, state);
    AddSecondMoment(shape, shape.rank() == 2, state);
    return state;
  }

  int64_t MeasuredFloats(const Parameter& parameter) const override {
    const Shape& shape = parameter.value.shape;
    return shape.rank() == 2 ? MeasuredFloatsOfFactored(shape, StepOf(1)) : 0;
  }

  double Measure(const Parameter& parameter, TensorView gradient, std::span<const TensorView> state,
                 int64_t tensor_step, float* measured) const override {
    if (measured == nullptr) {
      return Rule::Measure(parameter, gradient, state, tensor_step, measured);
    }
    TakeMomentum(settings_.momentum, state);
    return MeasureFactored(gradient, state[0], StepOf(tensor_step), measured);
  }

  // Nothing is floored here: eps is added.
  UpdateReport Apply(const Parameter& parameter, TensorView gradient,
                     std::span<const TensorView> state, const StepContext& context) const override {
    AdaptiveStep step = StepOf(context.tensor_step);
    step.average = TakeMomentum(settings_.momentum, state);
    if (parameter.value.shape.rank() == 2) {
      UpdateFactored(parameter.value, gradient, state[0], state[1], step, context);
    } else {
      UpdateExact(parameter.value, gradient, state[0], step, context);
    }
    return {};
  }

 private:
  // But for the momentum.
  AdaptiveStep StepOf(int64_t tensor_step) const {
    constexpr double kSmallestNormal = std::numeric_limits<float>::min();
    return {.beta1 = settings_.beta1,
            .beta2 = 1 - std::pow(static_cast<double>(tensor_step), settings_.decay_rate),
            .added = settings_.eps,
            .rms_clip = settings_.clip_threshold,
            .smallest_mean = kSmallestNormal,
            .row_floor = kSmallestNormal,
            .floor = kSmallestNormal};
  }

  AdafactorSettings settings_;
};

}  // namespace

std::unique_ptr<Rule> MakeAdafactor(SettingsReader& settings) {
  AdafactorSettings s;
  settings.Read(FieldsOf(s));
  return std::make_unique<Adafactor>(s);
}

}  // namespace terrace
