// Grouped-query attention: x += (causal attention over q, k, v of norm(x)) * out_proj^T.
//
// Letters as in backend/backend.h.
#pragma once

#include "model/sub_layer.h"

namespace terrace {

class GqaAttention final : public SubLayer {
 public:
  explicit GqaAttention(const LayerContext& context);

  std::unique_ptr<Saved> Forward(const Pass& pass, TensorView x, TensorView out,
                                 LayerRouting* routing) override;
  void Backward(std::span<const Work> work, GradientSink& sink) override;
  // Generation: as Block::Decode.
  void Decode(const Pass& pass, int64_t first_position, const Block::Cache& cache, TensorView x);

 private:
  struct SavedAttention;

  AttentionShape ShapeOf(int64_t sequences, int64_t query_length, int64_t key_length) const;
  void RotateQueriesAndKeys(TensorView q, TensorView k, int64_t sequence_length,
                            int64_t first_position, bool inverse);

  Backend& backend_;
  NormLayer norm_;
  DType dtype_;  // compute
  int64_t heads_, kv_heads_, head_width_;
  bool rope_;
  float rope_theta_;
  const Parameter* q_proj_;    // [H * C, D]
  const Parameter* k_proj_;    // [G * C, D]
  const Parameter* v_proj_;    // [G * C, D]
  const Parameter* out_proj_;  // [D, H * C]
};

}  // namespace terrace
