#include "model/nanowhale_attention.h"

#include <vector>

namespace terrace {

struct NanowhaleAttention::Queries {
  TensorView low_wide;        // f32 [N, r] y * q_a^T
  TensorView low_statistics;  // f32 [N, 2]
  TensorView low;             // compute [N, r] its norm
  TensorView wide;            // f32 [N, H * C] low * q_b^T
  TensorView statistics;      // f32 [N * H, 2]
  TensorView q;               // compute [N, H * C] its norm by heads, rotated
};

struct NanowhaleAttention::SavedAttention final : Saved {
  Queries queries;
  TensorView kv_wide;        // f32 [N, C] y * kv_proj^T
  TensorView kv_statistics;  // f32 [N, 2]
  TensorView kv;             // compute [N, C] its norm, rotated
  TensorView mixed;          // compute [N, H * C] not rotated back yet
  TensorView log_sums;       // f32 [N * H]
  TensorView low_out;        // compute [N, groups * rank] what out_b_proj sees
};

NanowhaleAttention::NanowhaleAttention(const LayerContext& context)
    : backend_(context.backend),
      dtype_(context.config.weight_dtype),
      heads_(context.config.heads),
      head_width_(context.config.HeadWidth()),
      rope_(context.config.positions == PositionKind::kRope),
      rope_width_(context.config.RopeWidth()),
      rope_theta_(context.config.rope_theta),
      norm_epsilon_(context.config.norm_epsilon),
      output_groups_(context.config.output_groups),
      q_norm_(NormKind::kRmsNorm, norm_epsilon_, context.Find("attn.q_norm"), nullptr),
      kv_norm_(NormKind::kRmsNorm, norm_epsilon_, context.Find("attn.kv_norm"), nullptr),
      q_a_proj_(context.Find("attn.q_a_proj")),
      q_b_proj_(context.Find("attn.q_b_proj")),
      kv_proj_(context.Find("attn.kv_proj")),
      out_a_proj_(context.Find("attn.out_a_proj")),
      out_b_proj_(context.Find("attn.out_b_proj")) {}

AttentionShape NanowhaleAttention::ShapeOf(int64_t sequences, int64_t query_length,
                                           int64_t key_length) const {
  return {sequences, query_length, key_length, heads_, /*kv_heads=*/1, head_width_};
}

void NanowhaleAttention::Rotate(TensorView x, int64_t heads, int64_t sequence_length,
                                int64_t first_position, bool back) const {
  if (!rope_) return;
  backend_.Rope(x, heads, rope_width_, sequence_length, first_position, rope_theta_,
                /*inverse=*/!back);
}

NanowhaleAttention::Queries NanowhaleAttention::QueriesOf(TensorView y, int64_t sequence_length,
                                                          int64_t first_position) const {
  const int64_t n = y.rows(), rank = q_a_proj_->value.rows(), width = heads_ * head_width_;
  const auto activation = [&](DType dtype, Shape shape, const char* name) {
    return Activation(backend_, dtype, shape, name);
  };
  const Queries queries{
      .low_wide = activation(DType::kF32, {n, rank}, "attention.q_low_wide"),
      .low_statistics = activation(DType::kF32, {n, 2}, "attention.q_low_statistics"),
      .low = activation(dtype_, {n, rank}, "attention.q_low"),
      .wide = activation(DType::kF32, {n, width}, "attention.q_wide"),
      .statistics = activation(DType::kF32, {n * heads_, 2}, "attention.q_statistics"),
      .q = activation(dtype_, {n, width}, "attention.q")};
  backend_.Linear(y, q_a_proj_->value, queries.low_wide, false);
  q_norm_.Forward(backend_, queries.low_wide, queries.low, queries.low_statistics);
  backend_.Linear(queries.low, q_b_proj_->value, queries.wide, false);
  const Shape heads{n * heads_, head_width_};
  backend_.Norm(NormKind::kRmsNorm, queries.wide.Reshaped(heads), {}, {}, norm_epsilon_,
                queries.q.Reshaped(heads), queries.statistics);
  Rotate(queries.q, heads_, sequence_length, first_position, /*back=*/false);
  return queries;
}

void NanowhaleAttention::KeysOf(TensorView y, int64_t sequence_length, int64_t first_position,
                                TensorView wide, TensorView statistics, TensorView kv) const {
  backend_.Linear(y, kv_proj_->value, wide, false);
  kv_norm_.Forward(backend_, wide, kv, statistics);
  Rotate(kv, 1, sequence_length, first_position, /*back=*/false);
}

std::unique_ptr<Path::Saved> NanowhaleAttention::Forward(const Pass& pass, TensorView y,
                                                         TensorView out, LayerRouting*) const {
  const int64_t n = y.rows(), length = pass.batch.length;
  auto saved = std::make_unique<SavedAttention>();
  saved->queries = QueriesOf(y, length, 0);
  saved->kv_wide = Activation(backend_, DType::kF32, {n, head_width_}, "attention.kv_wide");
  saved->kv_statistics = Activation(backend_, DType::kF32, {n, 2}, "attention.kv_statistics");
  saved->kv = Activation(backend_, dtype_, {n, head_width_}, "attention.kv");
  saved->mixed = Activation(backend_, dtype_, {n, heads_ * head_width_}, "attention.mixed");
  saved->log_sums = Activation(backend_, DType::kF32, {n * heads_}, "attention.log_sums");
  saved->low_out =
      Activation(backend_, dtype_, {n, out_a_proj_->value.rows()}, "attention.low_out");
  KeysOf(y, length, 0, saved->kv_wide, saved->kv_statistics, saved->kv);
  backend_.Attention(ShapeOf(pass.batch.sequences, length, length), saved->queries.q, saved->kv,
                     saved->kv, saved->mixed, saved->log_sums);

  const Arena::Frame temporaries(backend_.arena());
  const TensorView rotated = Activation(backend_, dtype_, saved->mixed.shape, "attention.rotated");
  backend_.Copy(saved->mixed, rotated);
  Rotate(rotated, heads_, length, 0, /*back=*/true);
  backend_.BlockLinear(output_groups_, rotated, out_a_proj_->value, saved->low_out);
  backend_.Linear(saved->low_out, out_b_proj_->value, out, true);
  return saved;
}

void NanowhaleAttention::Backward(std::span<const Work> work, GradientSink& sink) const {
  const Arena::Frame frame(backend_.arena());
  struct Gradients {  // of one micro-batch
    TensorView dout, dlow_out, rotated;
    TensorView dq_wide;              // compute [N, H * C]
    TensorView dlow, dkv;            // compute, of the norms' outputs
    TensorView dlow_wide, dkv_wide;  // f32, of their inputs
  };
  std::vector<Gradients> all;
  for (const Work& item : work) {
    const auto& saved = static_cast<const SavedAttention&>(*item.saved);
    const int64_t n = item.y.rows(), length = item.pass->batch.length;
    Gradients& g = all.emplace_back();
    g.dout = Downcast(backend_, item.dout, dtype_, "attention.dout");
    g.dlow_out = Activation(backend_, dtype_, saved.low_out.shape, "attention.dlow_out");
    g.rotated = Activation(backend_, dtype_, saved.mixed.shape, "attention.rotated");
    g.dq_wide = Activation(backend_, dtype_, saved.mixed.shape, "attention.dq_wide");
    g.dlow = Activation(backend_, dtype_, saved.queries.low.shape, "attention.dq_low");
    g.dkv = Activation(backend_, dtype_, saved.kv.shape, "attention.dkv");
    g.dlow_wide = ZeroedActivation(backend_, saved.queries.low.shape, "attention.dq_low_wide");
    g.dkv_wide = ZeroedActivation(backend_, saved.kv.shape, "attention.dkv_wide");

    const Arena::Frame temporaries(backend_.arena());
    backend_.Copy(saved.mixed, g.rotated);
    Rotate(g.rotated, heads_, length, 0, /*back=*/true);
    const TensorView dmixed = Activation(backend_, dtype_, saved.mixed.shape, "attention.dmixed");
    const TensorView dq = Activation(backend_, dtype_, saved.mixed.shape, "attention.dq");
    backend_.LinearBackwardInput(g.dout, out_b_proj_->value, g.dlow_out, false);
    backend_.BlockLinearBackwardInput(output_groups_, g.dlow_out, out_a_proj_->value, dmixed);
    Rotate(dmixed, heads_, length, 0, /*back=*/false);
    backend_.AttentionBackward(ShapeOf(item.pass->batch.sequences, length, length), saved.queries.q,
                               saved.kv, saved.kv, saved.mixed, saved.log_sums, dmixed, dq, g.dkv,
                               g.dkv);
    Rotate(dq, heads_, length, 0, /*back=*/true);
    Rotate(g.dkv, 1, length, 0, /*back=*/true);
    const TensorView wide = ZeroedActivation(backend_, dq.shape, "attention.dq_sum");
    const Shape heads{n * heads_, head_width_};
    backend_.NormBackward(NormKind::kRmsNorm, dq.Reshaped(heads),
                          saved.queries.wide.Reshaped(heads), {}, saved.queries.statistics,
                          wide.Reshaped(heads), {}, false, {}, false);
    backend_.Copy(wide, g.dq_wide);
    backend_.LinearBackwardInput(g.dq_wide, q_b_proj_->value, g.dlow, false);
  }

  NormLayer::Slots q_slots = q_norm_.Begin(sink);
  for (size_t i = 0; i < work.size(); ++i) {
    const auto& saved = static_cast<const SavedAttention&>(*work[i].saved);
    q_norm_.Backward(backend_, all[i].dlow, saved.queries.low_wide, saved.queries.low_statistics,
                     all[i].dlow_wide, q_slots);
  }
  q_norm_.End(sink, q_slots);
  NormLayer::Slots kv_slots = kv_norm_.Begin(sink);
  for (size_t i = 0; i < work.size(); ++i) {
    const auto& saved = static_cast<const SavedAttention&>(*work[i].saved);
    kv_norm_.Backward(backend_, all[i].dkv, saved.kv_wide, saved.kv_statistics, all[i].dkv_wide,
                      kv_slots);
  }
  kv_norm_.End(sink, kv_slots);

  std::vector<WeightProduct> q_a_products, q_b_products, kv_products, out_b_products;
  for (size_t i = 0; i < work.size(); ++i) {
    const auto& saved = static_cast<const SavedAttention&>(*work[i].saved);
    const Gradients& g = all[i];
    const TensorView dlow = Downcast(backend_, g.dlow_wide, dtype_, "attention.dq_low");
    const TensorView dkv = Downcast(backend_, g.dkv_wide, dtype_, "attention.dkv");
    backend_.LinearBackwardInput(dlow, q_a_proj_->value, work[i].dy, false);
    backend_.LinearBackwardInput(dkv, kv_proj_->value, work[i].dy, true);
    q_a_products.push_back({dlow, work[i].y});
    q_b_products.push_back({g.dq_wide, saved.queries.low});
    kv_products.push_back({dkv, work[i].y});
    out_b_products.push_back({g.dout, saved.low_out});
  }
  LeaveWeightGradient(backend_, *out_b_proj_, out_b_products, sink);
  GradientSlot out_a_slot = sink.Begin(*out_a_proj_);
  for (const Gradients& g : all) {
    backend_.BlockLinearBackwardWeight(output_groups_, g.dlow_out, g.rotated, out_a_slot.view,
                                       out_a_slot.add);
    out_a_slot.add = out_a_slot.add.Next();
  }
  sink.End(*out_a_proj_, out_a_slot);
  LeaveWeightGradient(backend_, *kv_proj_, kv_products, sink);
  LeaveWeightGradient(backend_, *q_b_proj_, q_b_products, sink);
  LeaveWeightGradient(backend_, *q_a_proj_, q_a_products, sink);
}

Block::Cache NanowhaleAttention::NewCache(int64_t capacity) const {
  const TensorView kv = Activation(backend_, dtype_, {capacity, head_width_}, "cache.keys");
  return {kv, kv};
}

void NanowhaleAttention::Decode(const Pass& pass, int64_t first_position, const Block::Cache& cache,
                                TensorView y, TensorView out) const {
  const Arena::Frame frame(backend_.arena());
  const int64_t n = y.rows(), length = pass.batch.length, key_length = first_position + n;
  const Queries queries = QueriesOf(y, length, first_position);
  const TensorView wide = Activation(backend_, DType::kF32, {n, head_width_}, "attention.kv_wide");
  const TensorView statistics =
      Activation(backend_, DType::kF32, {n, 2}, "attention.kv_statistics");
  const TensorView mixed = Activation(backend_, dtype_, queries.q.shape, "attention.mixed");
  const TensorView log_sums = Activation(backend_, DType::kF32, {n * heads_}, "attention.log_sums");
  const TensorView low_out =
      Activation(backend_, dtype_, {n, out_a_proj_->value.rows()}, "attention.low_out");
  KeysOf(y, length, first_position, wide, statistics, cache.keys.Rows(first_position, n));
  const TensorView keys = cache.keys.Rows(0, key_length);
  backend_.Attention(ShapeOf(1, n, key_length), queries.q, keys, keys, mixed, log_sums);
  Rotate(mixed, heads_, length, first_position, /*back=*/true);
  backend_.BlockLinear(output_groups_, mixed, out_a_proj_->value, low_out);
  backend_.Linear(low_out, out_b_proj_->value, out, true);
}

}  // namespace terrace
