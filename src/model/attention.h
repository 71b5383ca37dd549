// Grouped-query attention: out += (causal attention over q, k, v of y) * out_proj^T.
//
// Letters as in backend/backend.h.
#pragma once

#include "model/path.h"

namespace terrace {

class GqaAttention final : public AttentionPath {
 public:
  explicit GqaAttention(const LayerContext& context);

  std::unique_ptr<Saved> Forward(const Pass& pass, TensorView y, TensorView out,
                                 LayerRouting* routing) const override;
  void Backward(std::span<const Work> work, GradientSink& sink) const override;
  Block::Cache NewCache(int64_t capacity) const override;
  void Decode(const Pass& pass, int64_t first_position, const Block::Cache& cache, TensorView y,
              TensorView out) const override;

 private:
  struct SavedAttention;

  AttentionShape ShapeOf(int64_t sequences, int64_t query_length, int64_t key_length) const;
  void RotateQueriesAndKeys(TensorView q, TensorView k, int64_t sequence_length,
                            int64_t first_position, bool inverse) const;

  Backend& backend_;
  DType dtype_;  // compute
  int64_t heads_, kv_heads_, head_width_;
  bool rope_;
  int64_t rope_width_;
  float rope_theta_;
  const Parameter* q_proj_;    // [H * C, D]
  const Parameter* k_proj_;    // [G * C, D]
  const Parameter* v_proj_;    // [G * C, D]
  const Parameter* out_proj_;  // [D, H * C]
};

}  // namespace terrace
