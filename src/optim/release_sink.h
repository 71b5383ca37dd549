// The sink that applies each update as soon as its gradient is complete, and forgets the gradient:
// at no time does more exist than one tensor's (those of layers that nest, for norms), and that of
// a tied embedding, which is complete only at the end of a step. For passes over all micro-batches
// of a step together, layer by layer (StepSink::together).
//
// Clipping by the global norm needs all gradients before the first update: the step computes them
// twice, first for the norm.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/arena.h"
#include "optim/clipping.h"
#include "optim/step_sink.h"

namespace terrace {

// Throws the Error of a policy that updates `parameter` together with others.
[[noreturn]] void RefuseRelease(const std::string& parameter);

class ReleaseSink final : public StepSink {
 public:
  // As AccumulateSink. Throws Error when the policy updates tensors together.
  ReleaseSink(const Parameters& parameters, Optimizer& optimizer, Arena& arena,
              DType gradient_dtype, const Clipping& clipping);

  bool together() const override { return true; }
  void BeginStep(int64_t micro_batches, float learning_rate) override;
  GradientSlot Begin(const Parameter& parameter) override;
  void End(const Parameter& parameter, const GradientSlot& slot) override;
  void Skip(const Parameter& parameter) override;
  bool AnotherPass() override;
  StepResult Finish() override;

 private:
  struct Unit {
    TensorView buffer = {};     // for the whole run; empty: one on the arena's stack
    bool hidden = false;        // `buffer` is the optimizer's: decayed, not replaced
    Adding add = false;         // how the next contribution is left in `buffer`
    int64_t contributions = 0;  // in this pass, received or skipped
    int64_t received = 0;
    double squared_norm = 0;
  };
  struct Open {
    const Parameter* parameter;
    std::optional<Arena::Frame> frame;
  };

  // A hidden buffer got this step's gradient in the pass before: what comes now is no news.
  bool HasGradient(const Unit& unit) const;
  // After a contribution was received or skipped.
  void CompleteWithLast(const Parameter& parameter, TensorView gradient);
  // Counts the gradient in the norm, or updates the parameter, or both.
  void Complete(const Parameter& parameter, TensorView gradient);
  void CheckPass() const;
  double Norm() const;

  const Parameters& parameters_;
  Optimizer& optimizer_;
  Arena& arena_;
  DType gradient_dtype_;
  Clipping clipping_;
  std::vector<Unit> units_;  // by parameter id
  std::vector<Open> open_;   // between Begin and End, innermost last
  float learning_rate_ = 0;
  bool in_step_ = false;
  bool measuring_ = false;  // the first of two passes
  StepResult result_;
};

}  // namespace terrace
