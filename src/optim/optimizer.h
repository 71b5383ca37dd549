// The optimizer: a policy's rules, and the state that they declare, for one list of parameters.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/arena.h"
#include "model/parameter.h"
#include "optim/policy.h"
#include "optim/rule.h"

namespace terrace {

// Bytes of state by declaration: nothing is allocated. Throws Error naming the population and the
// tensor when the policy leaves a population without a rule.
struct StateBytes {
  int64_t total = 0;
  std::array<int64_t, kPopulations> by_population{};
};
StateBytes StateBytesOf(const Policy& policy, const Parameters& parameters);

// A tensor's update that is due.
struct Update {
  const Parameter* parameter;
  TensorView gradient;   // float32 or bfloat16, the parameter's shape
  float gradient_scale;  // multiplies the gradient first
};

using PopulationReports = std::array<UpdateReport, kPopulations>;

class Optimizer {
 public:
  // State for parameters of ids 0, 1, ... in order, in the arena (Memory::kOptimizer), zeroed.
  // `parameters` and the arena must outlive the optimizer; `seed` keys stochastic rounding. What is
  // not trained has no state and needs no rule. Throws
  // Error naming population and tensor for a policy that cannot serve them.
  Optimizer(const Policy& policy, const Parameters& parameters, Arena& arena, uint64_t seed);

  // Whether the parameter's rule updates it without others.
  bool UpdatesAlone(const Parameter& parameter) const { return served_[parameter.id].group < 0; }
  // The sum of squares of a complete gradient. Leaves what the parameter's rule wants to know of it
  // (Rule::Measure) for the update by the same gradient, if that comes next.
  double Measure(const Parameter& parameter, TensorView gradient);
  // Updates one parameter that its rule does not group with others; `learning_rate` is the
  // schedule's, before the rule's multiplier. In a dry arena only the step is counted and scratch
  // taken.
  UpdateReport Apply(const Update& update, float learning_rate);
  // Updates distinct parameters, small ones side by side. The result is that of one after another.
  PopulationReports Apply(std::span<const Update> updates, float learning_rate);

  // --- Gradients -------------------------------------------------------------------------------
  // Keys the stochastic rounding of the parameter's gradient in the step under way.
  uint64_t GradientKey(const Parameter& parameter) const;
  // The hidden buffer (StateSpec::hidden_decay); empty for a parameter whose rule has none.
  TensorView HiddenBuffer(const Parameter& parameter) const;
  // What a step begins with, in place of zeroing: multiplies the hidden buffer by its decay,
  // bfloat16 by stochastic rounding. Once a step, before the first contribution is added.
  void DecayHiddenBuffer(const Parameter& parameter);
  // What a hidden buffer counts in a norm: its decay sums up 1 / (1 - decay) gradients. 1 without.
  float HiddenBufferScale(const Parameter& parameter) const;

  // --- Checkpoints -----------------------------------------------------------------------------
  // All state, named "PARAMETER.STATE" ("layers.1.ff.experts.0.gate_proj.weight.momentum");
  // writable.
  std::span<const TensorView> state() const { return views_; }
  // Updates that each parameter has had, by parameter id; writable.
  std::span<int64_t> steps() { return steps_; }
  std::span<const int64_t> steps() const { return steps_; }

 private:
  struct Served {
    const Rule* rule = nullptr;  // null: not trained
    float lr_multiplier = 0;
    float weight_decay = 0;
    int64_t first_view = 0;
    int64_t views = 0;
    std::optional<float> hidden_decay;
    int64_t group = -1;   // -1: updated by itself
    TensorView measured;  // what the rule keeps from Measure to Apply; empty: nothing
    bool is_measured = false;
  };

  std::span<const TensorView> StateOf(const Served& served) const;
  // From the arena.
  std::byte* Scratch(int64_t bytes);
  // Counts the step; the context still lacks memory and threads.
  TensorUpdate Prepare(const Update& update, float learning_rate);
  UpdateReport Run(const TensorUpdate& update) const;

  Arena& arena_;
  bool dry_;
  uint64_t seed_;
  // What updates take at a time: of the hungriest large tensor, and of the hungriest small one
  // (one thread).
  int64_t large_scratch_bytes_ = 0;
  int64_t small_scratch_bytes_ = 0;
  std::vector<std::unique_ptr<Rule>> rules_;  // one an entry of the policy
  std::vector<Served> served_;                // by parameter id
  std::deque<std::string> names_;             // of views
  std::vector<TensorView> views_;
  std::vector<int64_t> steps_;
};

}  // namespace terrace
