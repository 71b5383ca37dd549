// A path with its norm and its place in the residual stream: x + path(norm(x)), or with a
// hyper-connection mixed x + path(norm(what it reads of x)), written to each stream.
//
// S is 1 for a plain residual stream.
// Letters as in backend/backend.h.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "model/hyper_layer.h"
#include "model/norm_layer.h"
#include "model/path.h"

namespace terrace {

class SubLayer {
 public:
  // `number`: 1 or 2, for the parameters layers.N.norm1.* and layers.N.hyper1.*. The path must
  // outlive the sub-layer.
  SubLayer(const LayerContext& context, int number, const Path& path);

  // What backward needs of forward. Views in the arena.
  struct Saved {
    HyperLayer::Saved hyper;
    TensorView x;           // f32 [N, D] the norm's input; without streams the caller's
    TensorView statistics;  // f32 [N, 2] of the norm
    TensorView y;           // compute [N, D] the normalized input
    std::unique_ptr<Path::Saved> path;
    TensorView path_out;  // f32 [N, D]; with streams only
  };

  // The output in a new activation `name`, x and it f32 [N, S * D]. Saved activations are allocated
  // in the caller's frame.
  TensorView Forward(const Pass& pass, TensorView x, const char* name, Saved& saved,
                     LayerRouting* routing) const;

  struct Work {
    const Pass* pass;
    const Saved* saved;  // used up
    TensorView dx;       // f32 [N, S * D]: gradient of the output on entry, of the input on return
  };
  // As Block::Backward.
  void Backward(std::span<const Work> work, GradientSink& sink) const;

  // Generation: replaces x f32 [N, S * D] with the output. `path` adds to `out` what the path
  // computes of y.
  void Decode(TensorView x, const std::function<void(TensorView y, TensorView out)>& path) const;

 private:
  void Normalize(TensorView x, Saved& saved) const;

  Backend& backend_;
  std::optional<HyperLayer> hyper_;
  NormLayer norm_;
  int64_t path_width_;  // D
  DType dtype_;         // compute
  const Path& path_;
};

}  // namespace terrace
