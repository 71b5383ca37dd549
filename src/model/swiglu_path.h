// The SwiGLU path of a feed-forward, without norm and residual:
//   out += (silu(y * gate_proj^T) * (y * up_proj^T)) * down_proj^T
//
// Letters as in backend/backend.h; "compute" is the dtype of the weights.
#pragma once

#include <span>

#include "model/path.h"

namespace terrace {

class SwiGluPath {
 public:
  // The matrices are layers.N.PREFIX.gate_proj.weight, .up_proj.weight and .down_proj.weight.
  SwiGluPath(const LayerContext& context, std::string_view prefix);

  // What backward needs of forward beside the input.
  struct Saved {
    TensorView gate, up;  // compute [N, F]; become their gradients
  };
  // Adds to out f32 [N, D], given y compute [N, D]. Saved activations are allocated in the
  // caller's frame.
  Saved Forward(TensorView y, TensorView out) const;

  // One micro-batch's part of a backward call.
  struct Work {
    TensorView y;     // compute [N, D]
    Saved saved;      // used up
    TensorView dout;  // compute [N, D]
    TensorView dy;    // f32 [N, D]
  };
  // As Path::Backward; dy is replaced.
  void Backward(std::span<const Work> work, GradientSink& sink) const;

 private:
  Backend& backend_;
  DType dtype_;                 // compute
  const Parameter* gate_proj_;  // [F, D]
  const Parameter* up_proj_;    // [F, D]
  const Parameter* down_proj_;  // [D, F]
};

}  // namespace terrace
