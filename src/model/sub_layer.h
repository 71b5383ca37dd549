// A path with its norm and its place in the residual stream: x + path(norm(x)).
//
// Letters as in backend/backend.h.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string_view>

#include "model/norm_layer.h"
#include "model/path.h"

namespace terrace {

class SubLayer {
 public:
  // `norm`: "norm1" for the parameters layers.N.norm1.*. The path must outlive the sub-layer.
  SubLayer(const LayerContext& context, std::string_view norm, const Path& path);

  // What backward needs of forward. Views in the arena.
  struct Saved {
    TensorView x;           // f32 [N, D] the input, the caller's
    TensorView statistics;  // f32 [N, 2] of the norm
    TensorView y;           // compute [N, D] the normalized input
    std::unique_ptr<Path::Saved> path;
  };

  // x + path(norm(x)) in a new activation `name`, f32 [N, D]. Saved activations are allocated in
  // the caller's frame.
  TensorView Forward(const Pass& pass, TensorView x, const char* name, Saved& saved,
                     LayerRouting* routing) const;

  struct Work {
    const Pass* pass;
    const Saved* saved;  // used up
    TensorView dx;       // f32 [N, D]: gradient of the output on entry, of the input on return
  };
  // As Block::Backward.
  void Backward(std::span<const Work> work, GradientSink& sink) const;

  // Generation: replaces x f32 [N, D] with the output. `path` adds to `out` what the path computes
  // of y.
  void Decode(TensorView x, const std::function<void(TensorView y, TensorView out)>& path) const;

 private:
  void Normalize(TensorView x, Saved& saved) const;

  Backend& backend_;
  NormLayer norm_;
  DType dtype_;  // compute
  const Path& path_;
};

}  // namespace terrace
