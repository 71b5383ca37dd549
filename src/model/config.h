// What a model is made of. Presets and TOML (train/config.h) fill this; derived values are
// computed here and typed nowhere else.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "backend/backend.h"
#include "core/dtype.h"
#include "core/settings.h"
#include "model/parameter.h"

namespace terrace {

enum class PositionKind : uint8_t { kLearned, kRope };
enum class FeedForwardKind : uint8_t { kDense, kMoe };
enum class AttentionKind : uint8_t {
  kGqa,  // grouped queries: projections of its own for queries, keys and values
  // As in nanowhale and DeepSeek-V4: low-rank queries, one head that is both key and value, a
  // grouped low-rank projection of the output, whose positions are rotated back.
  kNanowhaleMla,
};
enum class SelectionBias : uint8_t {
  kNone,
  kFixed,  // as loaded
  // Moved after each step against the load (arXiv 2408.15664): less for experts with more than the
  // mean of assignments, more for those with fewer.
  kBalancing,
};

struct ModelConfig {
  int64_t vocab_size = 0;     // V
  int64_t max_positions = 0;  // longest sequence
  int64_t width = 0;          // D
  int64_t layers = 0;
  int64_t heads = 0;       // H
  int64_t kv_heads = 0;    // G
  int64_t head_width = 0;  // C; 0: width / heads
  AttentionKind attention = AttentionKind::kGqa;
  // Of nanowhale-mla only.
  int64_t query_rank = 0;
  int64_t output_groups = 1;  // divides heads
  int64_t output_rank = 0;    // of each group
  PositionKind positions = PositionKind::kRope;
  float rope_theta = 10000.0f;
  int64_t rope_width = 0;  // W, of each head's last elements that are rotated; 0: all
  NormKind norm = NormKind::kRmsNorm;
  float norm_epsilon = 1e-5f;
  int64_t ffn_width = 0;  // F of dense layers

  // Feed-forward of layer i: ffn[i % ffn.size()]. {kDense, kMoe} alternates.
  std::vector<FeedForwardKind> ffn = {FeedForwardKind::kDense};
  int64_t experts = 0;       // E
  int64_t expert_width = 0;  // F of experts; 0: ffn_width
  RouterConfig router;       // of every MoE layer
  SelectionBias selection_bias = SelectionBias::kNone;
  float selection_bias_rate = 1e-3f;  // of kBalancing: a step's change
  int64_t shared_expert_width = 0;    // F of an expert that every token goes to; 0: none

  HyperConnection hyper_connection;  // of every sub-layer

  bool tied_head = true;
  DType weight_dtype = DType::kF32;  // of matrices and embeddings; norms and routers are float32
  float init_std = 0.02f;            // of matrices; into the residual stream / sqrt(2 * layers)

  int64_t HeadWidth() const { return head_width != 0 ? head_width : width / heads; }
  int64_t RopeWidth() const { return rope_width != 0 ? rope_width : HeadWidth(); }
  int64_t ExpertWidth() const { return expert_width != 0 ? expert_width : ffn_width; }
  bool HasHyperConnections() const { return hyper_connection.streams > 1; }
  // Of the residual stream between layers: S * D.
  int64_t StreamWidth() const { return hyper_connection.streams * width; }
  FeedForwardKind FeedForwardOf(int64_t layer) const {
    return ffn[static_cast<size_t>(layer) % ffn.size()];
  }
  int64_t MoeLayers() const;
  // Whether a layer has feed-forwards of this kind, whatever is set for the other.
  bool HasLayerOf(FeedForwardKind kind) const;
  // Whether it has parameters of this population.
  bool Has(Population population) const;

  // Throws Error naming the setting at fault ("model.kv_heads = 3 does not divide model.heads =
  // 8"). Whatever it takes can be trained, saved and read again.
  void Check() const;
};

// Bounds of what other descriptions of models set too.
inline constexpr Range kRopeThetas = {1, 1e12};
inline constexpr Range kNormEpsilons = {1e-30, 1};
inline constexpr Range kInitStds = {0, 10};
inline constexpr Range kCoefficients = {0, std::numeric_limits<double>::infinity()};

// The settings of a model, bound to `config`, as "model.KEY"; weight_dtype, training.precision, is
// not among them. Their bounds are those of Check.
Fields FieldsOf(ModelConfig& config);

// Every parameter of the model in order, `value` without memory: the one place that knows names,
// shapes, dtypes, populations and initial values. `config` is checked.
std::vector<Parameter> ParametersOf(const ModelConfig& config);

// Exact, from the configuration alone.
struct ModelSize {
  int64_t parameters = 0;
  int64_t active_parameters = 0;  // per token: top_k experts of each MoE layer
  // Floating-point operations of one training step's matrix products per token (forward and
  // backward, recomputation not counted): 6 per active parameter that takes part in a product
  // (embeddings look up, the head multiplies), plus causal attention's 6 * layers * H * C * T
  // (half of the full square).
  double FlopsPerToken(int64_t sequence_length) const;

  int64_t product_parameters = 0;
  int64_t attention_width_sum = 0;  // sum over layers of H * C
};
ModelSize SizeOf(const ModelConfig& config);

}  // namespace terrace
