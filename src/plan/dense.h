// What one could train instead of a MoE: dense models of the same architecture, whose feed-forwards
// are as wide as it takes.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "model/config.h"
#include "plan/subject.h"

namespace terrace {

// Which dense model: as many parameters as the MoE uses per token, as it has, or the geometric mean
// of both, which by a rule of thumb is the dense model that such a MoE is worth at equal data.
enum class DenseKind : uint8_t { kEqualActive, kEqualWorth, kEqualTotal };
std::string_view NameOf(DenseKind kind);  // "equal active parameters" ...

struct DenseModel {
  DenseKind kind = DenseKind::kEqualActive;
  int64_t ffn_width = 0;
  ModelSize size;
  double flops_per_token = 0;  // of training, as of a MoE's
  int64_t peak_bytes = 0;  // under the MoE's own settings; Hugging Face models: without activations
};

// The kinds in order; those are left out that would need a feed-forward of no width. Empty for a
// model without experts.
std::vector<DenseModel> DenseModelsOf(const Subject& subject);

}  // namespace terrace
