#include "plan/declared_plan.h"

#include <algorithm>

#include "core/error.h"
#include "optim/optimizer.h"
#include "optim/release_sink.h"

namespace terrace {
namespace {

int64_t GradientBytes(const Parameter& parameter, const RunConfig& config) {
  if (!parameter.trained()) return 0;
  return parameter.value.size() *
         BytesOf(GradientTypeOf(parameter, config.training.gradient_dtype));
}

int64_t HiddenBytes(const Optimizer& optimizer, const Parameter& parameter) {
  const TensorView buffer = optimizer.HiddenBuffer(parameter);
  return buffer.empty() ? 0 : buffer.bytes();
}

struct TensorMemory {
  int64_t weight_bytes = 0;
  int64_t gradient_bytes = 0;  // of one that a step makes and forgets
  int64_t hidden_bytes = 0;    // of a hidden buffer
  int64_t state_bytes = 0;
  bool updated_alone = true;

  // Of either.
  int64_t buffer_bytes() const { return hidden_bytes > 0 ? hidden_bytes : gradient_bytes; }
};

// One of `tensor.count`.
TensorMemory MemoryOf(const DeclaredTensor& tensor, const Policy& policy, const RunConfig& config) {
  Parameters one(1);
  Parameter& parameter = one.front();
  parameter.name = tensor.name;
  parameter.population = tensor.population;
  parameter.value.shape = tensor.shape;
  parameter.value.dtype = tensor.wide ? DType::kF32 : config.model.weight_dtype;
  parameter.layer = parameter.expert = 0;
  TensorMemory memory;
  memory.weight_bytes = parameter.value.bytes();
  if (!tensor.trained) return memory;
  memory.gradient_bytes = GradientBytes(parameter, config);
  memory.state_bytes = StateBytesOf(policy, one).total;
  Arena arena = Arena::Dry();
  const Optimizer optimizer(policy, one, arena, 0);
  memory.hidden_bytes = HiddenBytes(optimizer, parameter);
  memory.updated_alone = optimizer.UpdatesAlone(parameter);
  return memory;
}

}  // namespace

MemoryPlan PlanDeclared(const HuggingFaceModel& model, const ResolvedRun& run) {
  const RunConfig& config = run.config;
  const bool release = config.training.sink == SinkKind::kRelease;
  const bool second_pass = config.optimizer.clipping.kind == ClippingKind::kGlobalNorm;
  MemoryPlan plan;
  int64_t largest_bytes = 0;
  size_t largest_row = 0;
  for (const DeclaredTensor& tensor : model.tensors) {
    const TensorMemory memory = MemoryOf(tensor, run.policy, run.config);
    const size_t row = static_cast<size_t>(tensor.population);
    CategoryBytes& bytes = plan.at_peak[row];
    bytes[static_cast<size_t>(Memory::kWeights)] += tensor.count * memory.weight_bytes;
    bytes[static_cast<size_t>(Memory::kOptimizer)] += tensor.count * memory.state_bytes;
    if (release && !memory.updated_alone) RefuseRelease(tensor.name);
    // Tied: complete only at the end of a step.
    const bool tied = tensor.population == Population::kEmbedding && tensor.in_product;
    const bool hidden = memory.hidden_bytes > 0;
    if (hidden || !release || tied) {
      bytes[static_cast<size_t>(Memory::kGradients)] += tensor.count * memory.buffer_bytes();
    }
    // What a hidden buffer holds cannot be taken back: a second pass computes beside it.
    const bool passing = release && (hidden ? second_pass : !tied);
    if (passing && memory.gradient_bytes > largest_bytes) {
      largest_bytes = memory.gradient_bytes;
      largest_row = row;
    }
  }
  plan.at_peak[largest_row][static_cast<size_t>(Memory::kGradients)] += largest_bytes;
  Ledger& ledger = plan.ledger;
  for (const CategoryBytes& row : plan.at_peak) {
    for (size_t category = 0; category < row.size(); ++category) {
      ledger.at_peak_bytes[category] += row[category];
      ledger.total_peak_bytes += row[category];
    }
  }
  ledger.peak_bytes = ledger.current_bytes = ledger.at_peak_bytes;
  ledger.total_bytes = ledger.total_peak_bytes;
  return plan;
}

TensorBytes BytesOfTensors(const HuggingFaceModel& model, const ResolvedRun& run) {
  TensorBytes bytes;
  for (const DeclaredTensor& tensor : model.tensors) {
    const TensorMemory memory = MemoryOf(tensor, run.policy, run.config);
    bytes.weights += tensor.count * memory.weight_bytes;
    bytes.hidden_buffers += tensor.count * memory.hidden_bytes;
    bytes.gradients += tensor.count * memory.buffer_bytes();
    bytes.state += tensor.count * memory.state_bytes;
  }
  return bytes;
}

TensorBytes BytesOfTensors(const ResolvedRun& run) {
  const std::vector<Parameter> list = ParametersOf(run.config.model);
  const Parameters parameters(list.begin(), list.end());
  Arena arena = Arena::Dry();
  const Optimizer optimizer(run.policy, parameters, arena, 0);
  TensorBytes bytes;
  for (const Parameter& parameter : parameters) {
    const int64_t hidden = HiddenBytes(optimizer, parameter);
    bytes.weights += parameter.value.bytes();
    bytes.hidden_buffers += hidden;
    bytes.gradients += hidden > 0 ? hidden : GradientBytes(parameter, run.config);
  }
  bytes.state = StateBytesOf(run.policy, parameters).total;
  return bytes;
}

}  // namespace terrace
