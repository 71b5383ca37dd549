// sgd, with momentum as PyTorch has it (Sutskever et al., ICML 2013, without dampening):
//   w <- w (1 - lr * decay)
//   m <- beta m + g
//   w <- w - lr * m, or with nesterov  w <- w - lr * (g + beta m), or without momentum  w - lr * g
#include <memory>

#include "core/parallel.h"
#include "core/stochastic_rounding.h"
#include "optim/rule.h"
#include "optim/rules/common.h"
#include "optim/rules/momentum.h"

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

#include "optim/kernels/stored-inl.h"

HWY_BEFORE_NAMESPACE();
namespace terrace {
namespace HWY_NAMESPACE {
namespace {

using namespace kernels::HWY_NAMESPACE;  // NOLINT: what kernels share
using namespace kernels;                 // NOLINT

// As vectors.
struct SgdConstants {
  explicit HWY_INLINE SgdConstants(const SgdStep& step)
      : scale(hn::Set(F32(), step.gradient_scale)),
        beta(hn::Set(F32(), step.beta)),
        keep(hn::Set(F32(), step.keep)),
        rate(hn::Set(F32(), step.rate)),
        nesterov(step.nesterov) {}
  HWY_INLINE VF Stepped(VF w, VF direction) const {
    return hn::NegMulAdd(direction, rate, hn::Mul(w, keep));
  }
  VF scale, beta, keep, rate;
  bool nesterov;
};

template <typename Weight, typename Gradient>
HWY_INLINE void SgdPart(Weight* weight, const Gradient* gradient, const SgdConstants& c,
                        int64_t count, UnitStore<Weight> store) {
  ForUnits(
      count,
      [&](int64_t, Weight* w, const Gradient* g) HWY_ATTR {
        const auto updated = [&](int64_t at) HWY_ATTR {
          return c.Stepped(Load(w + at), hn::Mul(Load(g + at), c.scale));
        };
        store(updated, w);
      },
      weight, gradient);
}

template <typename Weight, typename Gradient, typename Momentum, typename Store>
HWY_INLINE void SgdPartWithMomentum(Weight* weight, const Gradient* gradient, Momentum* momentum,
                                    const SgdConstants& c, int64_t count,
                                    UnitStore<Weight> store_weight, Store& store_momentum) {
  ForUnits(
      count,
      [&](int64_t, Weight* w, const Gradient* g, Momentum* m) HWY_ATTR {
        const auto moved = [&](int64_t at) HWY_ATTR {
          return hn::MulAdd(c.beta, store_momentum.Old(m + at), hn::Mul(Load(g + at), c.scale));
        };
        const auto updated = [&](int64_t at) HWY_ATTR {
          const VF first = moved(at);
          if (!c.nesterov) return c.Stepped(Load(w + at), first);
          const VF ahead = hn::MulAdd(c.beta, first, hn::Mul(Load(g + at), c.scale));
          return c.Stepped(Load(w + at), ahead);
        };
        store_weight(updated, w);
        store_momentum(moved, m);
      },
      weight, gradient, momentum);
}

// With g = gradient_scale * gradient: momentum (any or codes, by stochastic rounding but for
// float32; empty: none) = beta * momentum + g, and weight = keep * weight - rate * d in one pass,
// where d is the momentum before it is rounded, with nesterov g + beta times that, without momentum
// g.
void SgdUpdate(TensorView weight, TensorView gradient, const Stored& momentum, const SgdStep& step,
               int64_t begin, int64_t end, uint64_t rounding_key) {
  const SgdConstants constants(step);
  WithElements(weight, [&](auto* w) {
    using Weights = UnitStore<std::remove_pointer_t<decltype(w)>>;
    const auto weights_of = [&](const Part& part) {
      return Weights(StripeKey(rounding_key, part.stripe()), part.first_unit());
    };
    WithElements(gradient, [&](const auto* g) {
      if (momentum.values.empty()) {
        ForParts(weight.size(), kStripe, begin, end, [&](const Part& part) HWY_ATTR {
          SgdPart(w + part.first, g + part.first, constants, part.count, weights_of(part));
        });
        return;
      }
      WithStorage(momentum, [&](const auto& storage) {
        storage.ForMove(weight.size(), MomentumKey(rounding_key), begin, end,
                        [&](const Part& part, auto* m, auto& store) HWY_ATTR {
                          SgdPartWithMomentum(w + part.first, g + part.first, m, constants,
                                              part.count, weights_of(part), store);
                        });
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
HWY_EXPORT(SgdUpdate);

namespace {

struct SgdSettings {
  Momentum momentum = Momentum::kF32;
  double beta = 0.9;
  bool nesterov = false;
};

Fields FieldsOf(SgdSettings& s) {
  const Needs momentum = {[&s] { return s.momentum != Momentum::kNone; }, "a momentum"};
  return {{"momentum", Choice(s.momentum, MomentumOrNoneNames()), "as it is stored"},
          {"beta", &s.beta, "decay of the momentum", {0, kLargestBeta}, momentum},
          {"nesterov", &s.nesterov, "steps by the momentum to come", {}, momentum}};
}

class Sgd final : public Rule {
 public:
  explicit Sgd(const SgdSettings& settings) : settings_(settings) {}

  std::vector<StateSpec> State(const Parameter& parameter) const override {
    std::vector<StateSpec> state;
    AddMomentum(settings_.momentum, parameter.value.shape, state);
    return state;
  }

  UpdateReport Apply(const Parameter& parameter, TensorView gradient,
                     std::span<const TensorView> state, const StepContext& context) const override {
    const SgdStep step{.gradient_scale = context.gradient_scale,
                       .beta = static_cast<float>(settings_.beta),
                       .nesterov = settings_.nesterov,
                       .keep = KeepOf(context),
                       .rate = context.learning_rate};
    const kernels::Stored momentum = TakeMomentum(settings_.momentum, state);
    ParallelFor(parameter.value.size(), GrainOf(momentum), [&](int64_t begin, int64_t end) {
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
