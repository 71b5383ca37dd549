// Dense feed-forward: x += (silu(y * gate_proj^T) * (y * up_proj^T)) * down_proj^T with y =
// norm(x).
//
// Letters as in backend/backend.h.
#pragma once

#include "model/sub_layer.h"

namespace terrace {

class DenseFfn final : public SubLayer {
 public:
  explicit DenseFfn(const LayerContext& context);

  std::unique_ptr<Saved> Forward(const Pass& pass, TensorView x, TensorView out,
                                 LayerRouting* routing) override;
  void Backward(std::span<const Work> work, GradientSink& sink) override;

 private:
  struct SavedFfn;

  Backend& backend_;
  NormLayer norm_;
  DType dtype_;                 // compute
  const Parameter* gate_proj_;  // [F, D] gate
  const Parameter* up_proj_;    // [F, D] up
  const Parameter* down_proj_;  // [D, F] down
};

}  // namespace terrace
