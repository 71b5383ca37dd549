// sgd, with momentum as PyTorch has it (Sutskever et al., ICML 2013, without dampening):
//   w <- w (1 - lr * decay)
//   m <- beta m + g
//   w <- w - lr * m, or with nesterov  w <- w - lr * (g + beta m), or without momentum  w - lr * g
#include <memory>
#include <optional>

#include "core/parallel.h"
#include "core/stochastic_rounding.h"
#include "optim/rule.h"
#include "optim/rules/common.h"

// This file is read once for each instruction set, this part of it once.
#ifndef TERRACE_OPTIM_RULES_SGD_STEP_
#define TERRACE_OPTIM_RULES_SGD_STEP_
namespace terrace {

struct SgdStep {
  float gradient_scale;
  float beta;  // of the momentum
  bool nesterov;
  float keep;  // of the weight: 1 - lr * decay
  float rate;  // of learning
};

}  // namespace terrace
#endif

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/rules/sgd.cpp"
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

template <typename Weight, typename Gradient, typename Momentum>
HWY_INLINE void SgdStripe(Weight* weight, const Gradient* gradient, Momentum* momentum,
                          const SgdStep& step, int64_t count, uint64_t weight_key,
                          uint64_t momentum_key) {
  const VF scale = hn::Set(F32(), step.gradient_scale);
  const VF beta = hn::Set(F32(), step.beta);
  const VF keep = hn::Set(F32(), step.keep);
  const VF length = hn::Set(F32(), step.rate);
  UnitStore<Weight> store_weight(weight_key);
  const auto stepped = [&](VF w, VF direction)
                           HWY_ATTR { return hn::NegMulAdd(direction, length, hn::Mul(w, keep)); };
  if (momentum == nullptr) {
    ForUnits(
        count,
        [&](int64_t, Weight* w, const Gradient* g) HWY_ATTR {
          const auto updated = [&](int64_t at) HWY_ATTR {
            return stepped(Load(w + at), hn::Mul(Load(g + at), scale));
          };
          store_weight(updated, w);
        },
        weight, gradient);
    return;
  }
  UnitStore<Momentum> store_momentum(momentum_key);
  ForUnits(
      count,
      [&](int64_t, Weight* w, const Gradient* g, Momentum* m) HWY_ATTR {
        const auto moved = [&](int64_t at) HWY_ATTR {
          return hn::MulAdd(beta, Load(m + at), hn::Mul(Load(g + at), scale));
        };
        const auto updated = [&](int64_t at) HWY_ATTR {
          const VF first = moved(at);
          if (!step.nesterov) return stepped(Load(w + at), first);
          return stepped(Load(w + at), hn::MulAdd(beta, first, hn::Mul(Load(g + at), scale)));
        };
        store_weight(updated, w);
        store_momentum(moved, m);
      },
      weight, gradient, momentum);
}

// With g = gradient_scale * gradient: momentum (any, bfloat16 by stochastic rounding; empty: none)
// = beta * momentum + g, and weight = keep * weight - step * d in one pass, where d is the momentum
// before it is rounded, with nesterov g + beta times that, without momentum g.
void SgdUpdate(TensorView weight, TensorView gradient, TensorView momentum, const SgdStep& step,
               int64_t begin, int64_t end, uint64_t rounding_key) {
  const uint64_t momentum_key = MomentumKey(rounding_key);
  const auto stripes = [&](auto* w, const auto* g, auto* m) {
    ForStripes(begin, end, [&](int64_t first, int64_t count, int64_t stripe) HWY_ATTR {
      SgdStripe(w + first, g + first, m != nullptr ? m + first : m, step, count,
                StripeKey(rounding_key, stripe), StripeKey(momentum_key, stripe));
    });
  };
  WithElements(weight, [&](auto* w) {
    WithElements(gradient, [&](const auto* g) {
      WithElementsOrNull(momentum, [&](auto* m) { stripes(w, g, m); });
    });
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace terrace
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace terrace {
HWY_EXPORT(SgdUpdate);

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
    const SgdStep step{.gradient_scale = context.gradient_scale,
                       .beta = static_cast<float>(settings_.beta),
                       .nesterov = settings_.nesterov,
                       .keep = KeepOf(context),
                       .rate = context.learning_rate};
    const TensorView momentum = settings_.momentum ? state[0] : TensorView{};
    ParallelFor(parameter.value.size(), 4 * kernels::kStripe, [&](int64_t begin, int64_t end) {
      HWY_DYNAMIC_DISPATCH(SgdUpdate)
      (parameter.value, gradient, momentum, step, begin, end, context.rounding_key);
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
#endif  // HWY_ONCE
