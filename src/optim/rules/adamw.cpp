// adamw (Loshchilov and Hutter, arXiv 1711.05101), s the tensor's own step from 1:
//   w <- w (1 - lr * decay)
//   m <- beta1 m + (1 - beta1) g        v <- beta2 v + (1 - beta2) g^2
//   w <- w - lr / (1 - beta1^s) * m / (sqrt(v) / sqrt(1 - beta2^s) + eps)
#include <memory>

#include "core/parallel.h"
#include "optim/kernels/elementwise.h"
#include "optim/rule.h"
#include "optim/rules/adam_settings.h"

namespace terrace {
namespace {

class AdamW final : public Rule {
 public:
  explicit AdamW(const AdamSettings& settings) : settings_(settings) {}

  std::vector<StateSpec> State(const Parameter& parameter) const override {
    return {{"momentum", DType::kF32, parameter.value.shape},
            {"second_moment", DType::kF32, parameter.value.shape}};
  }

  // Nothing is floored here: eps is added.
  UpdateReport Apply(const Parameter& parameter, TensorView gradient,
                     std::span<const TensorView> state, const StepContext& context) const override {
    const kernels::AdamWStep constants = AdamWStepOf(settings_, context);
    ParallelFor(parameter.value.size(), 4 * kernels::kStripe, [&](int64_t begin, int64_t end) {
      kernels::AdamWUpdate(parameter.value, gradient, state[0], state[1], constants, begin, end,
                           context.rounding_key);
    });
    return {};
  }

 private:
  AdamSettings settings_;
};

}  // namespace

std::unique_ptr<Rule> MakeAdamW(SettingsReader& settings) {
  AdamSettings s;
  settings.Read(AdamFields(s));
  return std::make_unique<AdamW>(s);
}

}  // namespace terrace
