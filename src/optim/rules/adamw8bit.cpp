// adamw8bit: the formulas of adamw (adamw.cpp) with both moments stored in 8 bits, as codes
// relative to the scale of their block of 256 consecutive elements (kernels/block_quantization.h,
// after Dettmers et al., arXiv 2110.02861, who have other codes and round to nearest): 2.03 bytes a
// parameter.
#include <algorithm>
#include <memory>
#include <type_traits>

#include "core/parallel.h"
#include "optim/kernels/block_quantization.h"
#include "optim/rule.h"
#include "optim/rules/adam_settings.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/rules/adamw8bit.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "optim/kernels/block_quantization-inl.h"
#include "optim/kernels/dispatch.h"

HWY_BEFORE_NAMESPACE();
namespace terrace {
namespace HWY_NAMESPACE {
namespace {

using namespace kernels::HWY_NAMESPACE;  // NOLINT: what kernels share
using namespace kernels;                 // NOLINT

struct Constants {
  explicit HWY_INLINE Constants(const AdamWStep& step)
      : scale(hn::Set(F32(), step.gradient_scale)),
        beta1(hn::Set(F32(), static_cast<float>(step.beta1))),
        gain1(hn::Set(F32(), static_cast<float>(1 - step.beta1))),
        beta2(hn::Set(F32(), static_cast<float>(step.beta2))),
        gain2(hn::Set(F32(), static_cast<float>(1 - step.beta2))),
        keep(hn::Set(F32(), step.keep)),
        step_size(hn::Set(F32(), step.rate)),
        correction(hn::Set(F32(), step.inverse_correction)),
        eps(hn::Set(F32(), step.eps)) {}
  VF scale, beta1, gain1, beta2, gain2, keep, step_size, correction, eps;
};

// The codes of one block of a moment, and its scale.
struct Block {
  uint8_t* codes;
  float& scale;
  uint64_t stripe_key;
};

template <typename Weight, typename Gradient>
HWY_INLINE void UpdateBlock(Weight* weight, const Gradient* gradient, const Block& momentum,
                            const Block& second, const Constants& c, int64_t units,
                            UnitStore<Weight> store, int64_t first_unit) {
  HWY_ALIGN float firsts[kQuantizationBlock];
  HWY_ALIGN float seconds[kQuantizationBlock];
  // Scales are powers of two: it does not matter which factor they go into.
  const VF first_keep = hn::Mul(c.beta1, hn::Set(F32(), momentum.scale));
  const VF second_keep = hn::Mul(c.beta2, hn::Set(F32(), second.scale));
  LargestBits first_largest, second_largest;
  for (int64_t at = 0; at < units * kUnit; at += kLanes) {
    const VF g = hn::Mul(Load(gradient + at), c.scale);
    const VF m = hn::MulAdd(first_keep, DequantizeVector<Code::kSigned>(momentum.codes + at),
                            hn::Mul(c.gain1, g));
    const VF v = hn::MulAdd(second_keep, DequantizeVector<Code::kUnsigned>(second.codes + at),
                            hn::Mul(c.gain2, hn::Mul(g, g)));
    first_largest.Add(m);
    second_largest.AddPositive(v);
    Store(m, firsts + at);
    Store(v, seconds + at);
  }
  // Coding goes on while the weight waits for a root and a quotient.
  UnitQuantizer<Code::kSigned> quantize_first(first_largest, momentum.stripe_key, first_unit);
  UnitQuantizer<Code::kUnsigned> quantize_second(second_largest, second.stripe_key, first_unit);
  for (int64_t unit = 0; unit < units * kUnit; unit += kUnit) {
    const auto updated = [&](int64_t in_unit) HWY_ATTR {
      const VF m = Load(firsts + unit + in_unit);
      const VF v = Load(seconds + unit + in_unit);
      const VF denominator = hn::MulAdd(hn::Sqrt(v), c.correction, c.eps);
      return hn::NegMulAdd(hn::Div(m, denominator), c.step_size,
                           hn::Mul(Load(weight + unit + in_unit), c.keep));
    };
    store(updated, weight + unit);
    quantize_first(firsts + unit, momentum.codes + unit);
    quantize_second(seconds + unit, second.codes + unit);
  }
  momentum.scale = quantize_first.Finish(units, momentum.codes);
  second.scale = quantize_second.Finish(units, second.codes);
}

// Elements [begin, end), `begin` a multiple of kStripe: blocks are of consecutive elements whatever
// the shape. The weight moves by the moments before they are rounded.
void QuantizedAdamW(TensorView weight, TensorView gradient, const Stored& momentum,
                    const Stored& second, const AdamWStep& step, int64_t begin, int64_t end,
                    uint64_t rounding_key) {
  uint8_t* m = momentum.values.as<uint8_t>();
  uint8_t* s = second.values.as<uint8_t>();
  float* first_scales = momentum.scales.as<float>();
  float* second_scales = second.scales.as<float>();
  const uint64_t first_key = MomentumKey(rounding_key);
  const uint64_t second_key = SecondMomentKey(rounding_key);
  const Constants constants(step);
  const auto stripe = [&](auto* w, const auto* g, int64_t first, int64_t count) {
    const int64_t number = first / kStripe;
    const uint64_t weight_stripe = StripeKey(rounding_key, number);
    const uint64_t first_stripe = StripeKey(first_key, number);
    const uint64_t second_stripe = StripeKey(second_key, number);
    ForQuantizedBlocks(
        count,
        [&](int64_t at, int64_t units, auto* w_at, const auto* g_at, uint8_t* m_at, uint8_t* s_at)
            HWY_ATTR {
              const int64_t block = (first + at) / kQuantizationBlock;
              const int64_t first_unit = at / kUnit;
              using Weights = UnitStore<std::remove_pointer_t<decltype(w)>>;
              UpdateBlock(w_at, g_at, Block{m_at, first_scales[block], first_stripe},
                          Block{s_at, second_scales[block], second_stripe}, constants, units,
                          Weights(weight_stripe, first_unit), first_unit);
            },
        w + first, g + first, m + first, s + first);
  };
  WithElements(weight, [&](auto* w) {
    WithElements(gradient, [&](const auto* g) {
      for (int64_t first = begin; first < end; first += kStripe) {
        stripe(w, g, first, std::min(kStripe, end - first));
      }
    });
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace terrace
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace terrace {
HWY_EXPORT(QuantizedAdamW);

namespace {

class AdamW8Bit final : public Rule {
 public:
  explicit AdamW8Bit(const AdamSettings& settings) : settings_(settings) {}

  std::vector<StateSpec> State(const Parameter& parameter) const override {
    const Shape& shape = parameter.value.shape;
    const Shape scales{kernels::CodeBlocks(shape.size())};
    return {{"momentum", DType::kU8, shape},
            {"momentum_scale", DType::kF32, scales},
            {"second_moment", DType::kU8, shape},
            {"second_moment_scale", DType::kF32, scales}};
  }

  // Nothing is floored here: eps is added.
  UpdateReport Apply(const Parameter& parameter, TensorView gradient,
                     std::span<const TensorView> state, const StepContext& context) const override {
    const AdamWStep constants = AdamWStepOf(settings_, context);
    ParallelFor(parameter.value.size(), 4 * kernels::kStripe, [&](int64_t begin, int64_t end) {
      HWY_DYNAMIC_DISPATCH(QuantizedAdamW)
      (parameter.value, gradient, {state[0], state[1]}, {state[2], state[3]}, constants, begin, end,
       context.rounding_key);
    });
    return {};
  }

 private:
  AdamSettings settings_;
};

}  // namespace

std::unique_ptr<Rule> MakeAdamW8Bit(SettingsReader& settings) {
  AdamSettings s;
  settings.Read(AdamFields(s));
  return std::make_unique<AdamW8Bit>(s);
}

}  // namespace terrace
#endif  // HWY_ONCE
