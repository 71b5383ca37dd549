#include "plan/dense.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "plan/declared_plan.h"
#include "train/trainer.h"

namespace terrace {
namespace {

bool IsFeedForward(Population population) {
  return population == Population::kDenseFfn || population == Population::kSharedExpert ||
         population == Population::kExpert || population == Population::kRouter;
}

// The subject with a dense feed-forward of that width in every layer.
Subject Dense(const Subject& subject, int64_t ffn_width) {
  Subject dense = subject;
  if (!subject.hugging_face) {
    dense.config.model.ffn = {FeedForwardKind::kDense};
    dense.config.model.ffn_width = ffn_width;
    dense.config.model.experts = 0;
    dense.config.model.expert_width = 0;
    return dense;
  }
  HuggingFaceModel& model = *dense.hugging_face;
  std::erase_if(model.tensors,
                [](const DeclaredTensor& tensor) { return IsFeedForward(tensor.population); });
  for (const char* name : {"gate_proj", "up_proj", "down_proj"}) {
    const bool down = std::string_view(name) == "down_proj";
    model.tensors.push_back({fmt::format("layers.*.mlp.{}", name), Population::kDenseFfn,
                             down ? Shape{model.width, ffn_width} : Shape{ffn_width, model.width},
                             model.layers, model.layers});
  }
  ModelSize& size = model.size;
  size.parameters = size.product_parameters = 0;
  for (const DeclaredTensor& tensor : model.tensors) {
    const int64_t elements = tensor.shape.size() * tensor.count;
    size.parameters += elements;
    if (tensor.in_product) size.product_parameters += elements;
  }
  size.active_parameters = size.parameters;
  return dense;
}

int64_t TargetOf(DenseKind kind, const ModelSize& size) {
  switch (kind) {
    case DenseKind::kEqualActive:
      return size.active_parameters;
    case DenseKind::kEqualTotal:
      return size.parameters;
    case DenseKind::kEqualWorth:
      return std::llround(std::sqrt(static_cast<double>(size.active_parameters)) *
                          std::sqrt(static_cast<double>(size.parameters)));
  }
  return 0;
}

}  // namespace

std::string_view NameOf(DenseKind kind) {
  static constexpr std::string_view kNames[] = {"equal active parameters", "equal worth",
                                                "equal total parameters"};
  return kNames[static_cast<int>(kind)];
}

std::vector<DenseModel> DenseModelsOf(const Subject& subject) {
  const bool moe = subject.hugging_face ? subject.hugging_face->experts > 0
                                        : subject.config.model.MoeLayers() > 0;
  if (!moe) return {};
  const ModelSize size = subject.size();
  // Parameters are a straight line in the width.
  const int64_t narrow = Dense(subject, 1).size().parameters;
  const int64_t slope = Dense(subject, 2).size().parameters - narrow;
  std::vector<DenseModel> models;
  for (const DenseKind kind :
       {DenseKind::kEqualActive, DenseKind::kEqualWorth, DenseKind::kEqualTotal}) {
    DenseModel model;
    model.kind = kind;
    model.ffn_width =
        1 + static_cast<int64_t>(std::llround(static_cast<double>(TargetOf(kind, size) - narrow) /
                                              static_cast<double>(slope)));
    if (model.ffn_width < 1 || model.ffn_width > INT32_MAX) continue;
    const Subject dense = Dense(subject, model.ffn_width);
    model.size = dense.size();
    model.flops_per_token = model.size.FlopsPerToken(subject.config.training.sequence_length);
    model.peak_bytes = dense.hugging_face
                           ? PlanDeclared(*dense.hugging_face, dense.config).ledger.total_peak_bytes
                           : PlanTraining(dense.config).total_peak_bytes;
    models.push_back(model);
  }
  return models;
}

}  // namespace terrace
