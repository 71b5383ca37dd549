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
// and the 1e-15 becomes kSmallestMoment, so that the update does not depend on the gradient's
// scale.
#include <cmath>
#include <memory>

#include "optim/rule.h"
#include "optim/rules/adam_settings.h"
#include "optim/rules/adaptive.h"
#include "optim/rules/momentum.h"

namespace terrace {
namespace {

// What eps means for a floored second moment v: max(v, eps), as published, or max(v, eps * mean
// of v), which does not depend on the scale of the gradients.
enum class EpsMode : uint8_t { kAbsolute, kRelative };

// kFactored serves matrices by row and column means; tensors of other ranks stay exact.
enum class SecondMoment : uint8_t { kFactored, kExact };

struct SkewAdamSettings : AdamSettings {
  EpsMode eps_mode = EpsMode::kAbsolute;
  Momentum momentum = Momentum::kF32;
  SecondMoment second_moment = SecondMoment::kFactored;
  double rms_clip = 1;
};

const Names<EpsMode> kEpsModeNames = {{"absolute", EpsMode::kAbsolute},
                                      {"relative", EpsMode::kRelative}};
const Names<SecondMoment> kSecondMomentNames = {{"factored", SecondMoment::kFactored},
                                                {"exact", SecondMoment::kExact}};

Fields FieldsOf(SkewAdamSettings& s) {
  return AdamFields(
      s,
      {{"eps_mode", Choice(s.eps_mode, kEpsModeNames), "of squared gradients, or of their mean"},
       {"momentum", Choice(s.momentum, MomentumOrNoneNames()), "as it is stored"},
       {"second_moment", Choice(s.second_moment, kSecondMomentNames), "of matrices"},
       {"rms_clip", &s.rms_clip, "root mean square of an update; 0: none", {0, 1e30}}},
      {[&s] { return s.momentum != Momentum::kNone; }, "a momentum"});
}

class SkewAdam final : public Rule {
 public:
  explicit SkewAdam(const SkewAdamSettings& settings) : settings_(settings) {}

  std::vector<StateSpec> State(const Parameter& parameter) const override {
    const Shape& shape = parameter.value.shape;
    std::vector<StateSpec> state;
    AddMomentum(settings_.momentum, shape, state);
    AddSecondMoment(shape, Factored(shape), state);
    return state;
  }

  int64_t MeasuredFloats(const Parameter& parameter) const override {
    const Shape& shape = parameter.value.shape;
    return Factored(shape) && !HasMomentum() ? MeasuredFloatsOfFactored(shape, StepOf(1)) : 0;
  }

  double Measure(const Parameter& parameter, TensorView gradient, std::span<const TensorView> state,
                 int64_t tensor_step, float* measured) const override {
    if (measured == nullptr) {
      return Rule::Measure(parameter, gradient, state, tensor_step, measured);
    }
    return MeasureFactored(gradient, state[0], StepOf(tensor_step), measured);
  }

  // Floored entries are columns (vc) of a factored tensor and elements (v) of an exact one.
  UpdateReport Apply(const Parameter& parameter, TensorView gradient,
                     std::span<const TensorView> state, const StepContext& context) const override {
    AdaptiveStep step = StepOf(context.tensor_step);
    step.momentum = TakeMomentum(settings_.momentum, state);
    return Factored(parameter.value.shape)
               ? UpdateFactored(parameter.value, gradient, state[0], state[1], step, context)
               : UpdateExact(parameter.value, gradient, state[0], step, context);
  }

 private:
  bool HasMomentum() const { return settings_.momentum != Momentum::kNone; }

  // But for the momentum.
  AdaptiveStep StepOf(int64_t tensor_step) const {
    AdaptiveStep step{.beta1 = settings_.beta1,
                      .beta2 = settings_.beta2,
                      .rms_clip = settings_.rms_clip,
                      .row_floor = settings_.eps};
    if (settings_.eps_mode == EpsMode::kAbsolute) {
      step.smallest_mean = 1e-15;
      step.floor = settings_.eps;
    } else {
      step.smallest_mean = step.floor = kSmallestMoment;
      step.relative_floor = settings_.eps;
    }
    const double s = static_cast<double>(tensor_step);
    step.correction = std::sqrt(1 - std::pow(settings_.beta2, s));
    if (HasMomentum()) step.correction *= 1 / (1 - std::pow(settings_.beta1, s));
    return step;
  }

  bool Factored(const Shape& shape) const {
    return settings_.second_moment == SecondMoment::kFactored && shape.rank() == 2;
  }

  SkewAdamSettings settings_;
};

}  // namespace

std::unique_ptr<Rule> MakeSkewAdam(SettingsReader& settings) {
  SkewAdamSettings s;
  settings.Read(FieldsOf(s));
  return std::make_unique<SkewAdam>(s);
}

}  // namespace terrace
