// Dense feed-forward: x += SwiGLU(norm(x)).
//
// Letters as in backend/backend.h.
#pragma once

#include "model/sub_layer.h"
#include "model/swiglu_path.h"

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
  DType dtype_;  // compute
  SwiGluPath path_;
};

}  // namespace terrace
