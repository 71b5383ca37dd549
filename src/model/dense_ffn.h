// Dense feed-forward: x += (silu(y * w1^T) * (y * w2^T)) * w3^T with y = norm(x).
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
  DType dtype_;          // compute
  const Parameter* w1_;  // [F, D] gate
  const Parameter* w2_;  // [F, D] up
  const Parameter* w3_;  // [D, F] down
};

}  // namespace terrace
