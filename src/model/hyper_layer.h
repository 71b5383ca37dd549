// A hyper-connection with its parameters: what a sub-layer, or the head, reads of the residual
// streams, and how its output goes back. Letters as in backend/backend.h; M is S * (S + 2), or S
// where nothing is written.
#pragma once

#include <span>
#include <string_view>

#include "model/path.h"

namespace terrace {

class HyperLayer {
 public:
  // `name`: "layers.N.hyper1" or "hyper_f", for NAME.weight, .base and .scale.
  HyperLayer(const ModelConfig& config, const ParameterIndex& parameters, std::string_view name);

  // Every stream of x f32 [N, S * D] = y f32 [N, D]: where streams begin.
  void Spread(Backend& backend, TensorView y, TensorView x) const {
    backend.HyperSpread(config_, y, x);
  }
  // dy f32 [N, D] is replaced.
  void SpreadBackward(Backend& backend, TensorView dx, TensorView dy) const {
    backend.HyperSpreadBackward(config_, dx, dy);
  }

  // What backward needs of forward. Views in the arena.
  struct Saved {
    TensorView x;            // f32 [N, S * D] the streams, the caller's
    TensorView products;     // f32 [N, M]
    TensorView inverse_rms;  // f32 [N]
    TensorView weights;      // f32 [N, M]
  };

  // z f32 [N, D]; what `saved` holds is allocated in the caller's frame.
  void Read(Backend& backend, TensorView x, TensorView z, Saved& saved) const;
  // out f32 [N, S * D] from the output y f32 [N, D] of what read them.
  void Write(Backend& backend, const Saved& saved, TensorView y, TensorView out) const;

  // Backward comes in two parts, since what reads and writes lies between them. dweights f32 [N, M]
  // is the caller's and holds from the first to the second.
  //
  // dx f32 [N, S * D]: the gradient of out on entry, that of x through the mixing on return; dy f32
  // [N, D] is replaced.
  void WriteBackward(Backend& backend, const Saved& saved, TensorView y, TensorView dx,
                     TensorView dy, TensorView dweights) const;
  struct Work {
    const Saved* saved;
    TensorView dz;        // f32 [N, D]
    TensorView dweights;  // f32 [N, M]
    TensorView dx;        // f32 [N, S * D], added to
  };
  void ReadBackward(Backend& backend, std::span<const Work> work, GradientSink& sink) const;

 private:
  HyperConnection config_;
  float norm_epsilon_;
  const Parameter* weight_;  // f32 [M, S * D]
  const Parameter* base_;    // f32 [M]
  const Parameter* scale_;   // f32 [3]; [1] where nothing is written
};

}  // namespace terrace
