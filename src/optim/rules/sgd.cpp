// sgd, with momentum as PyTorch has it (Sutskever et al., ICML 2013, without dampening):
//   w <- w (1 - lr * decay)
//   m <- beta m + g
//   w <- w - lr * m, or with nesterov  w <- w - lr * (g + beta m), or without momentum  w - lr * g
#include <memory>
#include <optional>

#include "core/parallel.h"
#include "optim/kernels/elementwise.h"
#include "optim/rule.h"
#include "optim/rules/common.h"

namespace terrace {
namespace {

struct SgdSettings {
  std::optional<DType> momentum = DType::kF32;
  double beta = 0.9;
  bool nesterov = false;
};

Fields FieldsOf(SgdSettings& s) {
  const Needs momentum = {[&s] { return s.momentum.has_value(); }, "a momentum"};
  return {{"momentum", Choice(s.momentum, kFloatOrNoneNames), "as it is stored"},
          {"beta", &s.beta, "decay of the momentum", {0, kLargestBeta}, momentum},
          {"nesterov", &s.nesterov, "steps by the momentum to come", {}, momentum}};
}

class Sgd final : public Rule {
 public:
  explicit Sgd(const SgdSettings& settings) : settings_(settings) {}

  std::vector<StateSpec> State(const Parameter& parameter) const override {
    if (!settings_.momentum) return {};
    return {{"momentum", *settings_.momentum, parameter.value.shape}};
  }

  UpdateReport Apply(const Parameter& parameter, TensorView gradient,
                     std::span<const TensorView> state, const StepContext& context) const override {
    const kernels::SgdStep step{.gradient_scale = context.gradient_scale,
                                .beta = static_cast<float>(settings_.beta),
                                .nesterov = settings_.nesterov,
                                .keep = KeepOf(context),
                                .step = context.learning_rate};
    const TensorView momentum = settings_.momentum ? state[0] : TensorView{};
    ParallelFor(parameter.value.size(), 4 * kernels::kStripe, [&](int64_t begin, int64_t end) {
      kernels::SgdUpdate(parameter.value, gradient, momentum, step, begin, end,
                         context.rounding_key);
    });
    return {};
  }

 private:
  SgdSettings settings_;
};

}  // namespace

std::unique_ptr<Rule> MakeSgd(SettingsReader& settings) {
  SgdSettings s;
  settings.Read(FieldsOf(s));
  return std::make_unique<Sgd>(s);
}

}  // namespace terrace
