#include "model/attention.h"

#include <vector>

namespace terrace {

struct GqaAttention::SavedAttention final : Saved {
  TensorView q;         // compute [N, H * C], rotated
  TensorView k, v;      // compute [N, G * C], k rotated
  TensorView mixed;     // compute [N, H * C] what out_proj sees
  TensorView log_sums;  // f32 [N * H]
};

GqaAttention::GqaAttention(const LayerContext& context)
    : backend_(context.backend),
      dtype_(context.config.weight_dtype),
      heads_(context.config.heads),
      kv_heads_(context.config.kv_heads),
      head_width_(context.config.HeadWidth()),
      rope_(context.config.positions == PositionKind::kRope),
      rope_width_(context.config.RopeWidth()),
      rope_theta_(context.config.rope_theta),
      q_proj_(context.Find("attn.q_proj")),
      k_proj_(context.Find("attn.k_proj")),
      v_proj_(context.Find("attn.v_proj")),
      out_proj_(context.Find("attn.out_proj")) {}

AttentionShape GqaAttention::ShapeOf(int64_t sequences, int64_t query_length,
                                     int64_t key_length) const {
  return {sequences, query_length, key_length, heads_, kv_heads_, head_width_};
}

void GqaAttention::RotateQueriesAndKeys(TensorView q, TensorView k, int64_t sequence_length,
                                        int64_t first_position, bool inverse) const {
  if (!rope_) return;
  backend_.Rope(q, heads_, rope_width_, sequence_length, first_position, rope_theta_, inverse);
  backend_.Rope(k, kv_heads_, rope_width_, sequence_length, first_position, rope_theta_, inverse);
}

std::unique_ptr<Path::Saved> GqaAttention::Forward(const Pass& pass, TensorView y, TensorView out,
                                                   LayerRouting*) const {
  const int64_t n = y.rows(), length = pass.batch.length;
  auto saved = std::make_unique<SavedAttention>();
  saved->q = Activation(backend_, dtype_, {n, heads_ * head_width_}, "attention.q");
  saved->k = Activation(backend_, dtype_, {n, kv_heads_ * head_width_}, "attention.k");
  saved->v = Activation(backend_, dtype_, {n, kv_heads_ * head_width_}, "attention.v");
  saved->mixed = Activation(backend_, dtype_, {n, heads_ * head_width_}, "attention.mixed");
  saved->log_sums = Activation(backend_, DType::kF32, {n * heads_}, "attention.log_sums");

  backend_.Linear(y, q_proj_->value, saved->q, false);
  backend_.Linear(y, k_proj_->value, saved->k, false);
  backend_.Linear(y, v_proj_->value, saved->v, false);
  RotateQueriesAndKeys(saved->q, saved->k, length, 0, false);
  backend_.Attention(ShapeOf(pass.batch.sequences, length, length), saved->q, saved->k, saved->v,
                     saved->mixed, saved->log_sums);
  backend_.Linear(saved->mixed, out_proj_->value, out, true);
  return saved;
}

void GqaAttention::Backward(std::span<const Work> work, GradientSink& sink) const {
  const Arena::Frame frame(backend_.arena());
  std::vector<WeightProduct> q_products, k_products, v_products, out_products;
  for (const Work& item : work) {
    const auto& saved = static_cast<const SavedAttention&>(*item.saved);
    const TensorView dout = Downcast(backend_, item.dout, dtype_, "attention.dout");
    const TensorView dq = Activation(backend_, dtype_, saved.q.shape, "attention.dq");
    const TensorView dk = Activation(backend_, dtype_, saved.k.shape, "attention.dk");
    const TensorView dv = Activation(backend_, dtype_, saved.v.shape, "attention.dv");
    {
      const Arena::Frame temporaries(backend_.arena());
      const TensorView dmixed = Activation(backend_, dtype_, saved.mixed.shape, "attention.dmixed");
      backend_.LinearBackwardInput(dout, out_proj_->value, dmixed, false);
      const int64_t length = item.pass->batch.length;
      backend_.AttentionBackward(ShapeOf(item.pass->batch.sequences, length, length), saved.q,
                                 saved.k, saved.v, saved.mixed, saved.log_sums, dmixed, dq, dk, dv);
      RotateQueriesAndKeys(dq, dk, length, 0, true);
    }
    backend_.LinearBackwardInput(dq, q_proj_->value, item.dy, false);
    backend_.LinearBackwardInput(dk, k_proj_->value, item.dy, true);
    backend_.LinearBackwardInput(dv, v_proj_->value, item.dy, true);
    q_products.push_back({dq, item.y});
    k_products.push_back({dk, item.y});
    v_products.push_back({dv, item.y});
    out_products.push_back({dout, saved.mixed});
  }
  LeaveWeightGradient(backend_, *out_proj_, out_products, sink);
  LeaveWeightGradient(backend_, *v_proj_, v_products, sink);
  LeaveWeightGradient(backend_, *k_proj_, k_products, sink);
  LeaveWeightGradient(backend_, *q_proj_, q_products, sink);
}

Block::Cache GqaAttention::NewCache(int64_t capacity) const {
  const Shape shape{capacity, kv_heads_ * head_width_};
  return {Activation(backend_, dtype_, shape, "cache.keys"),
          Activation(backend_, dtype_, shape, "cache.values")};
}

void GqaAttention::Decode(const Pass& pass, int64_t first_position, const Block::Cache& cache,
                          TensorView y, TensorView out) const {
  const Arena::Frame frame(backend_.arena());
  const int64_t n = y.rows();
  const TensorView q = Activation(backend_, dtype_, {n, heads_ * head_width_}, "attention.q");
  const TensorView mixed = Activation(backend_, dtype_, q.shape, "attention.mixed");
  const TensorView log_sums = Activation(backend_, DType::kF32, {n * heads_}, "attention.log_sums");
  const TensorView k = cache.keys.Rows(first_position, n);
  const TensorView v = cache.values.Rows(first_position, n);

  backend_.Linear(y, q_proj_->value, q, false);
  backend_.Linear(y, k_proj_->value, k, false);
  backend_.Linear(y, v_proj_->value, v, false);
  RotateQueriesAndKeys(q, k, pass.batch.length, first_position, false);
  const int64_t key_length = first_position + n;
  backend_.Attention(ShapeOf(1, n, key_length), q, cache.keys.Rows(0, key_length),
                     cache.values.Rows(0, key_length), mixed, log_sums);
  backend_.Linear(mixed, out_proj_->value, out, true);
}

}  // namespace terrace
