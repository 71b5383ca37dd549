// What attention and the feed-forwards have in common.
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

// What a sub-layer computes between its norm and the residual stream, of which a path knows
// neither.
class Path {
 public:
  virtual ~Path() = default;

  // What backward needs of forward beside the input; a path adds its own. Views in the arena.
  struct Saved {
    virtual ~Saved() = default;
  };

  // Adds to out f32 [N, D], given y compute [N, D]. Saved activations are allocated in the caller's
  // frame. `routing`: as Block::Forward.
  virtual std::unique_ptr<Saved> Forward(const Pass& pass, TensorView y, TensorView out,
                                         LayerRouting* routing) const = 0;

  // One micro-batch's part of a backward call.
  struct Work {
    const Pass* pass;
    TensorView y;     // compute [N, D]
    Saved* saved;     // used up
    TensorView dout;  // f32 [N, D]
    TensorView dy;    // f32 [N, D], replaced
  };
  // As Block::Backward: one Begin/End pair or Skip a parameter, no parameter read after its End.
  virtual void Backward(std::span<const Work> work, GradientSink& sink) const = 0;
};

// An attention, which also generates.
class AttentionPath : public Path {
 public:
  // Room for `capacity` tokens, in activations: the caller frames it.
  virtual Block::Cache NewCache(int64_t capacity) const = 0;
  // As Forward for the tokens of `pass`, the first of them at `first_position`; appends what later
  // tokens need of them to the cache.
  virtual void Decode(const Pass& pass, int64_t first_position, const Block::Cache& cache,
                      TensorView y, TensorView out) const = 0;
};

// What a layer is made from.
struct LayerContext {
  const ModelConfig& config;
  Backend& backend;
  const ParameterIndex& parameters;
  int64_t layer;

  // "attn.q_proj" -> layers.N.attn.q_proj.weight
  const Parameter* Find(std::string_view name) const;
  // "ff.router.bias" -> layers.N.ff.router.bias
  const Parameter* Named(std::string_view name) const;
  // "norm1" -> layers.N.norm1.weight, and .bias where there is one.
  NormLayer Norm(std::string_view name) const;
};

// "norm_f" -> norm_f.weight, and .bias where there is one.
NormLayer MakeNorm(const ModelConfig& config, const ParameterIndex& parameters,
                   std::string_view name);

// Allocates saved activations or temporaries: the caller's frame tells how long they live.
TensorView Activation(Backend& backend, DType dtype, Shape shape, const char* name);

// The same, f32 and zero.
TensorView ZeroedActivation(Backend& backend, Shape shape, const char* name);

// `wide` f32 at `dtype`: itself, or a copy in a new activation.
TensorView Downcast(Backend& backend, TensorView wide, DType dtype, const char* name);

// The two factors of a matrix's gradient, dy[N, O]^T * x[N, I], in one micro-batch.
struct WeightProduct {
  TensorView dy, x;
};
// Sums the products of all micro-batches into the sink.
void LeaveWeightGradient(Backend& backend, const Parameter& parameter,
                         std::span<const WeightProduct> products, GradientSink& sink);

}  // namespace terrace
