// The memory of a model that this engine cannot run yet, as far as its tensors tell: weights,
// gradients and optimizer state. Activations, scratch and alignment are left out.
#pragma once

#include "plan/estimate.h"
#include "plan/hugging_face_model.h"
#include "plan/memory_plan.h"

namespace terrace {

// State is what the policy's rules declare for each tensor. With the release sink, the gradient is
// that of the largest tensor, beside that of a tied embedding. Throws Error naming the tensor when
// the policy cannot serve it.
MemoryPlan PlanDeclared(const HuggingFaceModel& model, const ResolvedRun& run);

TensorBytes BytesOfTensors(const HuggingFaceModel& model, const ResolvedRun& run);
TensorBytes BytesOfTensors(const ResolvedRun& run);

}  // namespace terrace
