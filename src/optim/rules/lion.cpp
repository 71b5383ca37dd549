// lion (arXiv 2302.06675):
//   w <- w (1 - lr * decay) - lr * sign(beta1 m + (1 - beta1) g)
//   m <- beta2 m + (1 - beta2) g
#include <memory>

#include "core/parallel.h"
#include "optim/kernels/sign.h"
#include "optim/rule.h"
#include "optim/rules/sign_settings.h"

namespace terrace {
namespace {

class Lion final : public Rule {
 public:
  explicit Lion(const SignSettings& settings) : settings_(settings) {}

  std::vector<StateSpec> State(const Parameter& parameter) const override {
    std::vector<StateSpec> state;
    AddMomentum(settings_.momentum, parameter.value.shape, state);
    return state;
  }

  UpdateReport Apply(const Parameter& parameter, TensorView gradient,
                     std::span<const TensorView> state, const StepContext& context) const override {
    const kernels::SignStep step = StepOf(settings_, context);
    const kernels::Stored momentum = TakeMomentum(settings_.momentum, state);
    ParallelFor(parameter.value.size(), GrainOf(momentum), [&](int64_t begin, int64_t end) {
      kernels::SignUpdate(parameter.value, gradient, momentum, step, begin, end,
                          context.rounding_key);
    });
    return {};
  }

 private:
  SignSettings settings_;
};

}  // namespace

std::unique_ptr<Rule> MakeLion(SettingsReader& settings) {
  SignSettings s;
  settings.Read(SignFields(s));
  return std::make_unique<Lion>(s);
}

}  // namespace terrace
