// adamw8bit: the formulas of adamw (adamw.cpp) with both moments stored in 8 bits, as codes
// relative to the scale of their block of 256 consecutive elements (kernels/block_quantization.h,
// after Dettmers et al., arXiv 2110.02861, who have other codes and round to nearest): 2.03 bytes a
// parameter.
#include <memory>

#include "core/parallel.h"
#include "optim/kernels/quantized_adamw.h"
#include "optim/rule.h"
#include "optim/rules/adam_settings.h"

namespace terrace {
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
    const kernels::AdamWStep constants = AdamWStepOf(settings_, context);
    ParallelFor(parameter.value.size(), 4 * kernels::kStripe, [&](int64_t begin, int64_t end) {
      kernels::QuantizedAdamWUpdate(parameter.value, gradient, {state[0], state[1]},
                                    {state[2], state[3]}, constants, begin, end,
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
