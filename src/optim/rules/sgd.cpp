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
#include "optim/settings.h"

namespace terrace {
namespace {

struct SgdSettings {
  std::optional<DType> momentum;
  // Of the momentum:
  double beta = 0;
  bool nesterov = false;
};

// Settings without effect stay unread, and are therefore refused.
SgdSettings ReadSgdSettings(SettingsReader& settings) {
  SgdSettings s{.momentum = settings.Choice<std::optional<DType>>(
                    "momentum", DType::kF32,
                    {{"none", std::nullopt}, {"f32", DType::kF32}, {"bf16", DType::kBF16}})};
  if (!s.momentum) return s;
  s.beta = settings.Number("beta", 0.9, 0, kLargestBeta);
  s.nesterov = settings.Flag("nesterov", false);
  return s;
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
  return std::make_unique<Sgd>(ReadSgdSettings(settings));
}

}  // namespace terrace
