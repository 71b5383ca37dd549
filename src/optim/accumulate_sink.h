// The sink that keeps the gradients of the whole model until the end of a step: exact clipping by
// the global norm, any rule, at the price of a gradient buffer of the model's size.
//
// Where a rule has a hidden buffer, gradients are added to what is left of it. Such a tensor counts
// in norms with the decayed mean, and clipping multiplies that.
#pragma once

#include <cstdint>
#include <vector>

#include "core/arena.h"
#include "optim/clipping.h"
#include "optim/step_sink.h"

namespace terrace {

class AccumulateSink final : public StepSink {
 public:
  // Takes the buffers from the arena (Memory::kGradients). bfloat16 parameters have gradients of
  // `gradient_dtype` (float32 or bfloat16), float32 ones float32. Parameters and optimizer must
  // outlive the sink.
  AccumulateSink(const Parameters& parameters, Optimizer& optimizer, Arena& arena,
                 DType gradient_dtype, const Clipping& clipping);

  void BeginStep(int64_t micro_batches, float learning_rate) override;
  GradientSlot Begin(const Parameter& parameter) override;
  void End(const Parameter& parameter, const GradientSlot& slot) override;
  void Skip(const Parameter& parameter) override;
  StepResult Finish() override;

  // The sum of this step's contributions so far, and in a hidden buffer of what it held before;
  // undefined where there was none.
  TensorView Gradient(const Parameter& parameter) const { return gradients_[parameter.id].view; }

 private:
  struct Buffer {
    TensorView view;
    bool hidden = false;  // the optimizer's: decayed, not replaced
    Adding add = false;   // how the next contribution is left there
    int64_t received = 0;
    int64_t skipped = 0;
    double squared_norm = 0;  // known once the last contribution is in
  };

  // After a contribution was received or skipped.
  void CompleteWithLast(const Parameter& parameter);

  const Parameters& parameters_;
  Optimizer& optimizer_;
  bool dry_;
  Clipping clipping_;
  std::vector<Buffer> gradients_;  // by parameter id
  std::vector<int64_t> open_;      // ids between Begin and End, innermost last
  int64_t micro_batches_ = 0;      // 0: no step is under way
  float learning_rate_ = 0;
};

}  // namespace terrace
