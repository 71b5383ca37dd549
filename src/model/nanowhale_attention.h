// The attention of nanowhale, after DeepSeek-V4: low-rank queries, one head that is both key and
// value, positions in a part of each head, which the output is rotated back by, and a low-rank
// projection of the output, the heads' first factor by groups.
//
//   q = rotated rms(norm(y * q_a^T) * q_b^T), rms over each head
//   kv = rotated norm(y * kv_proj^T)
//   mixed = rotated-back causal attention of q over keys kv and values kv
//   out += blocks(mixed, out_a) * out_b^T
//
// It rotates against the direction of other models: first half * cos + second half * sin. Norms are
// RMSNorms and see float32, whatever the weights' dtype: in bfloat16 a head of small numbers would
// lose what its norm then scales up.
//
// Letters as in backend/backend.h.
#pragma once

#include "model/norm_layer.h"
#include "model/path.h"

namespace terrace {

class NanowhaleAttention final : public AttentionPath {
 public:
  explicit NanowhaleAttention(const LayerContext& context);

  std::unique_ptr<Saved> Forward(const Pass& pass, TensorView y, TensorView out,
                                 LayerRouting* routing) const override;
  void Backward(std::span<const Work> work, GradientSink& sink) const override;
  // Keys and values are one tensor.
  Block::Cache NewCache(int64_t capacity) const override;
  void Decode(const Pass& pass, int64_t first_position, const Block::Cache& cache, TensorView y,
              TensorView out) const override;

 private:
  struct SavedAttention;
  struct Queries;

  AttentionShape ShapeOf(int64_t sequences, int64_t query_length, int64_t key_length) const;
  // Computes them from y; the views are allocated in the caller's frame.
  Queries QueriesOf(TensorView y, int64_t sequence_length, int64_t first_position) const;
  // kv [N, C] from y; `wide` f32 [N, C] and `statistics` f32 [N, 2] keep what goes into the norm.
  void KeysOf(TensorView y, int64_t sequence_length, int64_t first_position, TensorView wide,
              TensorView statistics, TensorView kv) const;
  // Rotates into the position of each row, or back from it.
  void Rotate(TensorView x, int64_t heads, int64_t sequence_length, int64_t first_position,
              bool back) const;

  Backend& backend_;
  DType dtype_;  // compute
  int64_t heads_, head_width_;
  bool rope_;
  int64_t rope_width_;
  float rope_theta_;
  float norm_epsilon_;
  int64_t output_groups_;
  NormLayer q_norm_, kv_norm_;
  const Parameter* q_a_proj_;    // [r, D]
  const Parameter* q_b_proj_;    // [H * C, r]
  const Parameter* kv_proj_;     // [C, D]
  const Parameter* out_a_proj_;  // [groups * rank, H * C / groups]
  const Parameter* out_b_proj_;  // [D, groups * rank]
};

}  // namespace terrace
