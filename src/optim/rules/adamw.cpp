// adamw (Loshchilov and Hutter, arXiv 1711.05101), s the tensor's own step from 1:
//   w <- w (1 - lr * decay)
//   m <- beta1 m + (1 - beta1) g        v <- beta2 v + (1 - beta2) g^2
//   w <- w - lr / (1 - beta1^s) * m / (sqrt(v) / sqrt(1 - beta2^s) + eps)
#include <memory>

#include "core/parallel.h"
#include "core/stochastic_rounding.h"
#include "optim/rule.h"
#include "optim/rules/adam_settings.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/rules/adamw.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "optim/kernels/dispatch.h"
#include "optim/kernels/moments-inl.h"

HWY_BEFORE_NAMESPACE();
namespace terrace {
namespace HWY_NAMESPACE {
namespace {

using namespace kernels::HWY_NAMESPACE;  // NOLINT: what kernels share
using namespace kernels;                 // NOLINT

template <typename Weight, typename Gradient>
HWY_INLINE void AdamWStripe(Weight* weight, const Gradient* gradient, float* momentum,
                            float* second, const AdamWStep& step, int64_t count,
                            uint64_t stripe_key) {
  const VF scale = hn::Set(F32(), step.gradient_scale);
  const Decay first_decay(step.beta1);
  const Decay second_decay(step.beta2);
  const VF keep = hn::Set(F32(), step.keep);
  const VF size = hn::Set(F32(), step.rate);
  const VF correction = hn::Set(F32(), step.inverse_correction);
  const VF eps = hn::Set(F32(), step.eps);
  UnitStore<Weight> store(stripe_key);
  ForUnits(
      count,
      [&](int64_t, Weight* w, const Gradient* g, float* m, float* s) HWY_ATTR {
        const auto updated = [&](int64_t at) HWY_ATTR {
          const VF scaled = hn::Mul(Load(g + at), scale);
          const VF first = first_decay(Load(m + at), scaled);
          const VF moment = second_decay(Load(s + at), hn::Mul(scaled, scaled));
          Store(first, m + at);
          Store(moment, s + at);
          const VF denominator = hn::MulAdd(hn::Sqrt(moment), correction, eps);
          return hn::NegMulAdd(hn::Div(first, denominator), size, hn::Mul(Load(w + at), keep));
        };
        store(updated, w);
      },
      weight, gradient, momentum, second);
}

// The moments, both float32, and the weight in one pass over elements [begin, end), `begin` a
// multiple of kStripe; gradient any, bfloat16 weights by stochastic rounding.
void AdamWUpdate(TensorView weight, TensorView gradient, TensorView momentum, TensorView second,
                 const AdamWStep& step, int64_t begin, int64_t end, uint64_t rounding_key) {
  float* m = momentum.as<float>();
  float* s = second.as<float>();
  WithElements(weight, [&](auto* w) {
    WithElements(gradient, [&](const auto* g) {
      ForStripes(begin, end, [&](int64_t first, int64_t count, int64_t stripe) HWY_ATTR {
        AdamWStripe(w + first, g + first, m + first, s + first, step, count,
                    StripeKey(rounding_key, stripe));
      });
    });
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace terrace
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace terrace {
HWY_EXPORT(AdamWUpdate);

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
    const AdamWStep constants = AdamWStepOf(settings_, context);
    ParallelFor(parameter.value.size(), 4 * kernels::kStripe, [&](int64_t begin, int64_t end) {
      HWY_DYNAMIC_DISPATCH(AdamWUpdate)
      (parameter.value, gradient, state[0], state[1], constants, begin, end, context.rounding_key);
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
#endif  // HWY_ONCE
