// Mixture-of-experts feed-forward: every token goes to K of E experts, chosen by a router.
//
//   logits = y * router^T;  (experts, weights) = route(logits)
//   out += sum over the selected experts e of weight_e * SwiGLU_e(y)
//        + SwiGLU of a shared expert(y), where there is one
//
// Dropless: the tokens' rows are gathered by expert, R = N * K rows always. The combine weight is
// folded into the hidden rows, so that the experts' outputs need not be kept for its gradient.
// Letters as in backend/backend.h.
#pragma once

#include <optional>
#include <vector>

#include "model/path.h"
#include "model/swiglu_path.h"

namespace terrace {

class MoeFfn final : public Path {
 public:
  explicit MoeFfn(const LayerContext& context);

  std::unique_ptr<Saved> Forward(const Pass& pass, TensorView y, TensorView out,
                                 LayerRouting* routing) const override;
  void Backward(std::span<const Work> work, GradientSink& sink) const override;

 private:
  struct SavedMoe;

  // One matrix of every expert.
  struct ExpertMatrices {
    std::vector<const Parameter*> parameters;  // [E]
    std::vector<TensorView> values;            // [E]
  };
  // The factors of the experts' gradients in one micro-batch: rows grouped by expert.
  struct GroupedProduct {
    TensorView dy, x, offsets;
  };

  ExpertMatrices FindExperts(const LayerContext& context, std::string_view matrix) const;
  // Gradient of one expert's matrix, or a skip when it has no rows.
  void LeaveExpertGradient(const Parameter& parameter, std::span<const GroupedProduct> products,
                           GradientSink& sink) const;

  Backend& backend_;
  DType dtype_;  // compute
  int64_t layer_;
  int64_t experts_;  // E
  RouterConfig router_config_;
  const Parameter* router_;          // f32 [E, D]
  const Parameter* selection_bias_;  // f32 [E]; null for none
  std::optional<SwiGluPath> shared_expert_;
  ExpertMatrices gate_proj_;  // [F, D] gate
  ExpertMatrices up_proj_;    // [F, D] up
  ExpertMatrices down_proj_;  // [D, F] down
};

}  // namespace terrace
