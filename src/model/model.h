// The decoder: embedding, blocks, head. Layers have an explicit forward and backward; the
// training step (train/step.h) composes them, so that other schedules can too.
//
// Letters as in backend/backend.h; S is 1 without hyper-connections.
//
// Backward calls take one micro-batch or several. Several at once is what lets a gradient be
// complete, applied and forgotten before the next one begins: every Backward call makes a single
// Begin/End pair (or Skip) for each parameter that it reaches (see model/gradient_sink.h), summed
// over the micro-batches of the call, and does not read a parameter after its End.
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
  // All gradients are of loss_scale * (sum of token losses) + balance_scale * load-balancing
  // losses.
  float loss_scale = 0;     // 1 / counted tokens of the whole step
  float balance_scale = 1;  // 1 / micro-batches of the step: load-balancing losses are means within
                            // a micro-batch, averaged over micro-batches
};

// Router statistics of one MoE layer for one pass.
struct LayerRouting {
  int64_t layer = 0;
  RouterStatistics statistics;
  std::vector<int64_t> counts;  // [E] counted assignments, exact
};

// One decoder layer: x += attention(norm1(x)); x += feed_forward(norm2(x)), or the same by
// hyper-connections (model/sub_layer.h).
class Block {
 public:
  virtual ~Block() = default;

  // What backward needs of forward; views in the arena, valid while their frame is.
  class Saved {
   public:
    virtual ~Saved() = default;
  };

  // Allocates its activations in the arena (Memory::kActivations): the caller frames them.
  // x f32 [N, S * D] is read; returns the block's output in a new activation.
  // `routing`, when given and the block is MoE, receives the pass's statistics; recomputation
  // passes none, so that tokens are counted once.
  virtual TensorView Forward(const Pass& pass, TensorView x, std::unique_ptr<Saved>& saved,
                             LayerRouting* routing) = 0;
  // One micro-batch's part of a backward call.
  struct Work {
    const Pass* pass;
    Saved* saved;   // used up: the activations in it are overwritten
    TensorView dx;  // f32 [N, S * D]: gradient of the output on entry, of the input on return
  };
  virtual void Backward(std::span<const Work> work, GradientSink& sink) = 0;
  void Backward(const Pass& pass, Saved& saved, TensorView dx, GradientSink& sink) {
    const Work work{&pass, &saved, dx};
    Backward({&work, 1}, sink);
  }

  virtual FeedForwardKind feed_forward() const = 0;

  // Generation: keys and values of one layer, at the compute dtype, [capacity, G * C]. One tensor
  // where an attention's keys are its values.
  struct Cache {
    TensorView keys, values;
  };
  // Room for `capacity` tokens, in activations: the caller frames it.
  virtual Cache NewCache(int64_t capacity) const = 0;
  // Appends the keys and values of x f32 [T, S * D], whose first row is at `first_position`, to the
  // cache, and replaces x with the block's output. `pass` is that of the T tokens.
  virtual void Decode(const Pass& pass, int64_t first_position, const Cache& cache,
                      TensorView x) = 0;
};

// Keys and values of the tokens so far, one sequence.
struct KvCache {
  int64_t capacity = 0;  // tokens
  int64_t length = 0;    // tokens so far; lower it to go back
  std::vector<Block::Cache> layers;
};

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

  // x f32 [N, S * D] in a new activation.
  TensorView Embed(const Pass& pass);
  std::span<const std::unique_ptr<Block>> blocks() const { return blocks_; }
  // One micro-batch's part of a call at the model's ends.
  struct EndWork {
    const Pass* pass;
    TensorView x;   // f32 [N, S * D] output of the last block; unused by EmbedBackward
    TensorView dx;  // f32 [N, S * D]
  };
  // Sum of token losses in nats over all of `work`. With a sink: leaves the gradients of the head
  // and the final norm there and replaces every dx with the gradient of its x. Without: loss only,
  // dx is not looked at. 0 in a dry run.
  double HeadAndLoss(std::span<const EndWork> work, GradientSink* sink);
  double HeadAndLoss(const Pass& pass, TensorView x, TensorView dx, GradientSink* sink) {
    const EndWork work{&pass, x, dx};
    return HeadAndLoss({&work, 1}, sink);
  }
  // Leaves the gradients of the embeddings, given those of Embed's output in dx.
  void EmbedBackward(std::span<const EndWork> work, GradientSink& sink);
  void EmbedBackward(const Pass& pass, TensorView dx, GradientSink& sink) {
    const EndWork work{&pass, {}, dx};
    EmbedBackward({&work, 1}, sink);
  }
  // The selection bias of a layer's router, f32 [E]; empty for none.
  TensorView SelectionBias(int64_t layer) const;
  // After a step, with the counts of all its micro-batches: moves the selection biases that
  // balancing moves, by model.router.selection_bias_rate, down for experts with more than the mean
  // of assignments, up for those with fewer.
  void BalanceRouters(std::span<const LayerRouting> layers);

  // logits f32 [N, V] of x f32 [N, S * D], the output of the last block. For few tokens: training
  // never makes this matrix.
  void Logits(TensorView x, TensorView logits);

  // --- Generation -------------------------------------------------------------------------
  // Room for `capacity` tokens, in activations: the caller frames it.
  std::unique_ptr<KvCache> NewCache(int64_t capacity);
  // Appends `tokens` (at least one) to the cache and writes the logits f32 [V] that follow the
  // last of them. Router noise is off. Throws Error when the cache or the model's positions are
  // full, or an id is beyond the vocabulary.
  void Decode(std::span<const int32_t> tokens, KvCache& cache, TensorView logits);

 private:
  ModelConfig config_;
  Backend& backend_;
  Parameters parameters_;
  std::vector<std::unique_ptr<Block>> blocks_;
  struct Ends;  // embedding, positions, final hyper-connection and norm, head
  std::unique_ptr<Ends> ends_;
};

}  // namespace terrace
