#include "plan/declared_plan.h"

#include <algorithm>

#include "core/error.h"
#include "optim/optimizer.h"

namespace terrace {
namespace {

DType GradientTypeOf(DType weight, const RunConfig& config) {
  return weight == DType::kBF16 ? config.training.gradient_dtype : DType::kF32;
}

struct TensorMemory {
  int64_t weight_bytes;
  int64_t gradient_bytes;
  int64_t state_bytes;
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
  TensorMemory memory{parameter.value.bytes(), 0, 0};
  if (!tensor.trained) return memory;
  memory.gradient_bytes =
      tensor.shape.size() * BytesOf(GradientTypeOf(parameter.value.dtype, config));
  memory.state_bytes = StateBytesOf(policy, one).total;
  return memory;
}

}  // namespace

MemoryPlan PlanDeclared(const ForeignModel& model, const RunConfig& config) {
  const Policy policy = PolicyOf(config);
  const bool release = config.training.sink == SinkKind::kRelease;
  MemoryPlan plan;
  int64_t largest_bytes = 0;
  size_t largest_row = 0;
  for (const DeclaredTensor& tensor : model.tensors) {
    const TensorMemory memory = MemoryOf(tensor, policy, config);
    const size_t row = static_cast<size_t>(tensor.population);
    CategoryBytes& bytes = plan.at_peak[row];
    bytes[static_cast<size_t>(Memory::kWeights)] += tensor.count * memory.weight_bytes;
    bytes[static_cast<size_t>(Memory::kOptimizer)] += tensor.count * memory.state_bytes;
    // Tied: complete only at the end of a step.
    const bool kept = tensor.population == Population::kEmbedding && tensor.in_product;
    if (!release || kept) {
      bytes[static_cast<size_t>(Memory::kGradients)] += tensor.count * memory.gradient_bytes;
    } else if (memory.gradient_bytes > largest_bytes) {
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

TensorBytes BytesOfTensors(const ForeignModel& model, const RunConfig& config) {
  const Policy policy = PolicyOf(config);
  TensorBytes bytes;
  for (const DeclaredTensor& tensor : model.tensors) {
    const TensorMemory memory = MemoryOf(tensor, policy, config);
    bytes.weights += tensor.count * memory.weight_bytes;
    bytes.gradients += tensor.count * memory.gradient_bytes;
    bytes.state += tensor.count * memory.state_bytes;
  }
  return bytes;
}

TensorBytes BytesOfTensors(const RunConfig& config) {
  Parameters parameters;
  TensorBytes bytes;
  for (Parameter& parameter : ParametersOf(config.model)) {
    bytes.weights += parameter.value.bytes();
    bytes.gradients +=
        parameter.value.size() * BytesOf(GradientTypeOf(parameter.value.dtype, config));
    parameters.push_back(std::move(parameter));
  }
  bytes.state = StateBytesOf(PolicyOf(config), parameters).total;
  return bytes;
}

}  // namespace terrace
