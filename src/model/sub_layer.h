// What attention and the feed-forwards have in common: x += f(norm(x)).
//
// Letters as in backend/backend.h.
#pragma once

#include <memory>
#include <span>
#include <string_view>
#include <unordered_map>

#include "model/model.h"
#include "model/norm_layer.h"

namespace terrace {

using ParameterIndex = std::unordered_map<std::string_view, Parameter*>;  // by name

class SubLayer {
 public:
  virtual ~SubLayer() = default;

  // What every backward needs of forward; a sub-layer adds its own. Views in the arena.
  struct Saved {
    virtual ~Saved() = default;
    TensorView x;           // f32 [N, D] the input, the caller's
    TensorView statistics;  // f32 [N, 2] of the norm
    TensorView y;           // compute [N, D] the normalized input
  };

  // `out` f32 [N, D] holds x on entry and x + f(norm(x)) on return. Saved activations are
  // allocated in the caller's frame.
  virtual std::unique_ptr<Saved> Forward(const Pass& pass, TensorView x, TensorView out,
                                         LayerRouting* routing) = 0;

  struct Work {
    const Pass* pass;
    Saved* saved;   // used up
    TensorView dx;  // f32 [N, D]: gradient of the output on entry, of the input on return
  };
  // As Block::Backward: one Begin/End pair or Skip a parameter, no parameter read after its End.
  virtual void Backward(std::span<const Work> work, GradientSink& sink) = 0;
};

// What a sub-layer is made from.
struct LayerContext {
  const ModelConfig& config;
  Backend& backend;
  const ParameterIndex& parameters;
  int64_t layer;

  // "attn.q_proj" -> layers.N.attn.q_proj.weight
  const Parameter* Find(std::string_view name) const;
  // "norm1" -> layers.N.norm1.weight, and .bias where there is one.
  NormLayer Norm(std::string_view name) const;
};

// "norm_f" -> norm_f.weight, and .bias where there is one.
NormLayer MakeNorm(const ModelConfig& config, const ParameterIndex& parameters,
                   std::string_view name);

// Allocates saved activations or temporaries: the caller's frame tells how long they live.
TensorView Activation(Backend& backend, DType dtype, Shape shape, const char* name);

// `wide` f32 at `dtype`: itself, or a copy in a new activation.
TensorView Downcast(Backend& backend, TensorView wide, DType dtype, const char* name);

// Fills `saved.x`, `statistics` and `y` at `dtype`.
void NormalizeInput(Backend& backend, const NormLayer& norm, TensorView x, DType dtype,
                    SubLayer::Saved& saved);

// dx of all `work` += gradient through the norm, given dy [N, D] of each normalized input.
void NormBackward(Backend& backend, const NormLayer& norm, std::span<const SubLayer::Work> work,
                  std::span<const TensorView> dy, GradientSink& sink);

// The two factors of a matrix's gradient, dy[N, O]^T * x[N, I], in one micro-batch.
struct WeightProduct {
  TensorView dy, x;
};
// Sums the products of all micro-batches into the sink.
void LeaveWeightGradient(Backend& backend, const Parameter& parameter,
                         std::span<const WeightProduct> products, GradientSink& sink);

}  // namespace terrace
