// The decoder: embedding, blocks, head. Layers have an explicit forward and backward; the
// training step (train/step.h) composes them, so that other schedules can too.
//
// Letters as in backend/backend.h.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "model/config.h"
#include "model/gradient_sink.h"
#include "model/parameter.h"

namespace terrace {

// One micro-batch: B sequences of T tokens. Views are i32 [B * T].
struct MicroBatch {
  int64_t sequences = 0;
  int64_t length = 0;
  TensorView inputs;
  TensorView targets;  // kIgnoredTarget: no loss, not counted in balance

  int64_t tokens() const { return sequences * length; }
};

// What one pass over a micro-batch needs beside its tensors.
struct Pass {
  MicroBatch batch;
  bool training = false;   // router noise applies
  uint64_t noise_key = 0;  // of (seed, step, micro-batch); layers derive their own from it
  // All gradients are of loss_scale * (sum of token losses) + balance_scale * balance losses.
  float loss_scale = 0;     // 1 / counted tokens of the whole step
  float balance_scale = 1;  // 1 / micro-batches of the step: balance losses are means within a
                            // micro-batch, averaged over micro-batches
};

// Router statistics of one MoE layer for one pass.
struct LayerRouting {
  int64_t layer = 0;
  RouterStatistics statistics;
  std::vector<int64_t> counts;  // [E] counted assignments, exact
};

// One decoder layer: x += attention(norm1(x)); x += feed_forward(norm2(x)).
class Block {
 public:
  virtual ~Block() = default;

  // What backward needs of forward; views in the arena, valid while their frame is.
  class Saved {
   public:
    virtual ~Saved() = default;
  };

  // Allocates its activations in the arena (Memory::kActivations): the caller frames them.
  // x f32 [N, D] is read; returns the block's output in a new activation.
  // `routing`, when given and the block is MoE, receives the pass's statistics; recomputation
  // passes none, so that tokens are counted once.
  virtual TensorView Forward(const Pass& pass, TensorView x, std::unique_ptr<Saved>& saved,
                             LayerRouting* routing) = 0;
  // dx f32 [N, D]: gradient of the output on entry, of the input on return.
  virtual void Backward(const Pass& pass, const Saved& saved, TensorView dx,
                        GradientSink& sink) = 0;

  virtual FeedForwardKind feed_forward() const = 0;
};

// Keys and values of the tokens generated so far, one sequence.
class KvCache;

class Model {
 public:
  // Declares and allocates all parameters (Memory::kWeights), uninitialised. `config` is checked.
  Model(const ModelConfig& config, Backend& backend);
  ~Model();

  const ModelConfig& config() const { return config_; }
  Backend& backend() { return backend_; }
  Parameters& parameters() { return parameters_; }
  const Parameters& parameters() const { return parameters_; }
  // Throws Error naming the nearest name when there is none.
  Parameter& Find(std::string_view name);

  // Fills every parameter from (seed, parameter id), straight into place. Independent of threads.
  void Initialize(uint64_t seed);

  // Activation dtype of what enters matrix products: the weights' dtype.
  DType compute_dtype() const { return config_.weight_dtype; }

  // x f32 [N, D] in a new activation.
  TensorView Embed(const Pass& pass);
  std::span<const std::unique_ptr<Block>> blocks() const { return blocks_; }
  // Sum of token losses in nats. With a sink: leaves the head's gradient there and replaces
  // dx f32 [N, D] with the gradient of x.
  double HeadAndLoss(const Pass& pass, TensorView x, TensorView dx, GradientSink* sink);
  void EmbedBackward(const Pass& pass, TensorView dx, GradientSink& sink);

  // --- Generation -------------------------------------------------------------------------
  // Room for `length` tokens, in activations: the caller frames it.
  std::unique_ptr<KvCache> NewCache(int64_t length);
  // Appends `tokens` to the cache and writes the logits f32 [V] that follow the last of them.
  void Decode(std::span<const int32_t> tokens, KvCache& cache, TensorView logits);

 private:
  ModelConfig config_;
  Backend& backend_;
  Parameters parameters_;
  std::vector<std::unique_ptr<Block>> blocks_;
  struct Ends;  // embedding, positions, final norm, head
  std::unique_ptr<Ends> ends_;
};

}  // namespace terrace
