// One update formula and the state it needs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/tensor.h"
#include "model/parameter.h"

namespace terrace {

struct StateSpec {
  std::string name;  // as in checkpoints: "momentum"
  DType dtype;
  Shape shape;
  // Set for a hidden buffer: what is not optimizer state but the tensor's gradient buffer, which
  // outlives the step (Memory::kGradients). A sink multiplies it by this in place of zeroing it,
  // adds the step's gradient, and hands it to Apply as the gradient. Of the parameter's shape,
  // float32 or bfloat16; at most one a parameter, and the last of its states.
  std::optional<float> hidden_decay = {};
};

// Everything that changes from step to step, for one tensor.
struct StepContext {
  float learning_rate;
  float weight_decay;     // decoupled: w <- w * (1 - learning_rate * weight_decay) - ...
  float gradient_scale;   // multiplies every gradient element first (clipping, averaging)
  int64_t tensor_step;    // of this tensor, from 1
  uint64_t rounding_key;  // of (seed, tensor, step): stochastic rounding to bfloat16
  // The gradient that is likely to be needed next, or empty: a rule that waits for arithmetic may
  // have the processor fetch it meanwhile. No effect on results.
  TensorView next_gradient = {};
  // ScratchBytes() of memory, aligned as the arena aligns; contents undefined.
  std::byte* scratch = nullptr;
  // Whether the whole machine works on this tensor; else other threads update other tensors.
  bool all_threads = true;
  // What Measure left of this gradient, or null where it was not called.
  const float* measured = nullptr;
};

// What an update reports beside its effect.
struct UpdateReport {
  int64_t floored = 0;  // entries of the second moment at or below the eps floor
  int64_t entries = 0;  // entries examined for that

  UpdateReport& operator+=(const UpdateReport& other) {
    floored += other.floored;
    entries += other.entries;
    return *this;
  }
};

// One tensor's part in a joint update.
struct TensorUpdate {
  const Parameter* parameter;
  TensorView gradient;
  std::span<const TensorView> state;
  StepContext context;
};

// A rule never allocates tensors: it declares its state, from which both the optimizer and the
// memory plan allocate. State is zero at the start.
class Rule {
 public:
  virtual ~Rule() = default;
  // Throws Error for a parameter that the rule cannot serve ("serves matrices only"); the caller
  // adds the population and the tensor.
  virtual std::vector<StateSpec> State(const Parameter& parameter) const = 0;
  // Bytes that Apply needs beyond O(rows + columns), for rules that cannot do without.
  virtual int64_t ScratchBytes(const Parameter&, bool /*all_threads*/) const { return 0; }
  // How many floats Measure leaves, O(rows + columns); 0: nothing but the sum.
  virtual int64_t MeasuredFloats(const Parameter&) const { return 0; }
  // The sum of squares of a complete gradient, which whoever clips has to read it for. A rule that
  // needs other sums of it leaves them in `measured`, where Apply will find them: the pass that
  // Apply is spared. `tensor_step` is that of Apply; the gradient's scale is not known yet.
  virtual double Measure(const Parameter& parameter, TensorView gradient,
                         std::span<const TensorView> state, int64_t tensor_step,
                         float* measured) const;
  // Updates parameter.value (float32, or bfloat16 by stochastic rounding) and `state` (views in
  // the order of State()) from `gradient` (any dtype, read only). Needs no more than
  // O(rows + columns) of memory beside them and its scratch. The result does not depend on the
  // thread count.
  virtual UpdateReport Apply(const Parameter& parameter, TensorView gradient,
                             std::span<const TensorView> state,
                             const StepContext& context) const = 0;

  // Tensors of one name are updated together, those of them that are due in a step; "": each by
  // itself.
  virtual std::string GroupOf(const Parameter&) const { return {}; }
  // Updates the tensors of a group, of one width, in the model's order.
  virtual UpdateReport ApplyTogether(std::span<const TensorUpdate> group) const;
};

}  // namespace terrace
