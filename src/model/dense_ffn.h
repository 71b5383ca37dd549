// Dense feed-forward: out += SwiGLU(y).
//
// Letters as in backend/backend.h.
#pragma once

#include "model/path.h"
#include "model/swiglu_path.h"

namespace terrace {

class DenseFfn final : public Path {
 public:
  explicit DenseFfn(const LayerContext& context);

  std::unique_ptr<Saved> Forward(const Pass& pass, TensorView y, TensorView out,
                                 LayerRouting* routing) const override;
  void Backward(std::span<const Work> work, GradientSink& sink) const override;

 private:
  struct SavedFfn;

  Backend& backend_;
  DType dtype_;  // compute
  SwiGluPath path_;
};

}  // namespace terrace
