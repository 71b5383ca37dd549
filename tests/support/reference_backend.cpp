#include "support/reference_backend.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "core/rng.h"
#include "core/stochastic_rounding.h"

namespace terrace {

double ElementAt(const TensorView& tensor, int64_t index) {
  if (tensor.dtype == DType::kBF16) return ToFloat(tensor.as<BF16>()[index]);
  return tensor.as<float>()[index];
}

void SetElement(const TensorView& tensor, int64_t index, double value) {
  if (tensor.dtype == DType::kBF16) {
    tensor.as<BF16>()[index] = ToBF16(static_cast<float>(value));
  } else {
    tensor.as<float>()[index] = static_cast<float>(value);
  }
}

namespace {

void Put(const TensorView& tensor, int64_t index, double value, bool add) {
  SetElement(tensor, index, add ? ElementAt(tensor, index) + value : value);
}

// A gradient, in bfloat16 by the definition of core/stochastic_rounding.h, in stripes of rows.
void Leave(const TensorView& tensor, int64_t index, double value, const Adding& add) {
  if (tensor.dtype == DType::kF32) return Put(tensor, index, value, add);
  const int64_t width = tensor.columns();
  const int64_t stripes = (width + kernels::kStripe - 1) / kernels::kStripe;
  const int64_t column = index % width;
  const uint64_t stripe_key =
      kernels::StripeKey(add.rounding_key, index / width * stripes + column / kernels::kStripe);
  const double sum = add ? ElementAt(tensor, index) + value : value;
  tensor.as<BF16>()[index] = kernels::RoundStochastically(
      static_cast<float>(sum), kernels::RoundingBits(stripe_key, column % kernels::kStripe));
}

void CheckShape(const TensorView& tensor, const Shape& shape) {
  TERRACE_CHECK(tensor.shape == shape, "{}: is {}, not {}", tensor.name, tensor.shape.ToString(),
                shape.ToString());
}

void CheckDType(const TensorView& tensor, DType dtype) {
  TERRACE_CHECK(tensor.dtype == dtype, "{}: is {}, not {}", tensor.name, NameOf(tensor.dtype),
                NameOf(dtype));
}

// The rows of expert e.
TensorView RowsOf(const TensorView& tensor, const TensorView& offsets, int64_t e) {
  const int64_t* offset = offsets.as<int64_t>();
  return tensor.Rows(offset[e], offset[e + 1] - offset[e]);
}

double Sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

double LogSum(std::span<const double> values) {
  const double largest = *std::max_element(values.begin(), values.end());
  double sum = 0;
  for (double value : values) sum += std::exp(value - largest);
  return largest + std::log(sum);
}

}  // namespace

// --- Matrix products -------------------------------------------------------------------------

void ReferenceBackend::Linear(TensorView x, TensorView w, TensorView y, bool add) {
  const int64_t n_rows = x.rows(), inputs = w.columns(), outputs = w.rows();
  CheckShape(x, {n_rows, inputs});
  CheckShape(y, {n_rows, outputs});
  if (dry()) return;
  for (int64_t n = 0; n < n_rows; ++n) {
    for (int64_t o = 0; o < outputs; ++o) {
      double sum = 0;
      for (int64_t i = 0; i < inputs; ++i) {
        sum += ElementAt(x, n * inputs + i) * ElementAt(w, o * inputs + i);
      }
      Put(y, n * outputs + o, sum, add);
    }
  }
}

void ReferenceBackend::LinearBackwardInput(TensorView dy, TensorView w, TensorView dx, bool add) {
  const int64_t n_rows = dy.rows(), inputs = w.columns(), outputs = w.rows();
  CheckShape(dy, {n_rows, outputs});
  CheckShape(dx, {n_rows, inputs});
  if (dry()) return;
  for (int64_t n = 0; n < n_rows; ++n) {
    for (int64_t i = 0; i < inputs; ++i) {
      double sum = 0;
      for (int64_t o = 0; o < outputs; ++o) {
        sum += ElementAt(dy, n * outputs + o) * ElementAt(w, o * inputs + i);
      }
      Put(dx, n * inputs + i, sum, add);
    }
  }
}

void ReferenceBackend::LinearBackwardWeight(TensorView dy, TensorView x, TensorView dw,
                                            Adding add) {
  const int64_t n_rows = dy.rows(), inputs = dw.columns(), outputs = dw.rows();
  CheckShape(dy, {n_rows, outputs});
  CheckShape(x, {n_rows, inputs});
  if (dry()) return;
  for (int64_t o = 0; o < outputs; ++o) {
    for (int64_t i = 0; i < inputs; ++i) {
      double sum = 0;
      for (int64_t n = 0; n < n_rows; ++n) {
        sum += ElementAt(dy, n * outputs + o) * ElementAt(x, n * inputs + i);
      }
      Leave(dw, o * inputs + i, sum, add);
    }
  }
}

void ReferenceBackend::GroupedLinear(TensorView x, TensorView offsets,
                                     std::span<const TensorView> w, TensorView y, bool add) {
  CheckShape(offsets, {static_cast<int64_t>(w.size()) + 1});
  if (dry()) return;
  for (size_t e = 0; e < w.size(); ++e) {
    Linear(RowsOf(x, offsets, e), w[e], RowsOf(y, offsets, e), add);
  }
}

void ReferenceBackend::GroupedLinearBackwardInput(TensorView dy, TensorView offsets,
                                                  std::span<const TensorView> w, TensorView dx,
                                                  bool add) {
  CheckShape(offsets, {static_cast<int64_t>(w.size()) + 1});
  if (dry()) return;
  for (size_t e = 0; e < w.size(); ++e) {
    LinearBackwardInput(RowsOf(dy, offsets, e), w[e], RowsOf(dx, offsets, e), add);
  }
}

// --- Normalization ---------------------------------------------------------------------------

void ReferenceBackend::Norm(NormKind kind, TensorView x, TensorView weight, TensorView bias,
                            float epsilon, TensorView y, TensorView statistics) {
  const int64_t n_rows = x.rows(), width = x.columns();
  if (!weight.empty()) CheckShape(weight, {width});
  if (!bias.empty()) CheckShape(bias, {width});
  CheckShape(y, {n_rows, width});
  CheckShape(statistics, {n_rows, 2});
  if (dry()) return;
  for (int64_t n = 0; n < n_rows; ++n) {
    double mean = 0;
    if (kind == NormKind::kLayerNorm) {
      for (int64_t d = 0; d < width; ++d) mean += ElementAt(x, n * width + d);
      mean /= static_cast<double>(width);
    }
    double variance = 0;
    for (int64_t d = 0; d < width; ++d) {
      const double centered = ElementAt(x, n * width + d) - mean;
      variance += centered * centered;
    }
    variance /= static_cast<double>(width);
    const double inverse = 1.0 / std::sqrt(variance + epsilon);
    for (int64_t d = 0; d < width; ++d) {
      const double normalized = (ElementAt(x, n * width + d) - mean) * inverse;
      SetElement(y, n * width + d,
                 normalized * (weight.empty() ? 1 : ElementAt(weight, d)) +
                     (bias.empty() ? 0.0 : ElementAt(bias, d)));
    }
    SetElement(statistics, 2 * n, mean);
    SetElement(statistics, 2 * n + 1, inverse);
  }
}

void ReferenceBackend::NormBackward(NormKind kind, TensorView dy, TensorView x, TensorView weight,
                                    TensorView statistics, TensorView dx, TensorView dweight,
                                    bool add_dweight, TensorView dbias, bool add_dbias) {
  const int64_t n_rows = x.rows(), width = x.columns();
  CheckShape(dy, {n_rows, width});
  CheckShape(dx, {n_rows, width});
  if (!dweight.empty()) CheckShape(dweight, {width});
  if (!dbias.empty()) CheckShape(dbias, {width});
  if (dry()) return;
  const auto weight_at = [&](int64_t d) { return weight.empty() ? 1 : ElementAt(weight, d); };
  std::vector<double> weight_sums(width), bias_sums(width);
  for (int64_t n = 0; n < n_rows; ++n) {
    const double mean = ElementAt(statistics, 2 * n);
    const double inverse = ElementAt(statistics, 2 * n + 1);
    const auto normalized = [&](int64_t d) {
      return (ElementAt(x, n * width + d) - mean) * inverse;
    };
    // g: gradient of the normalized row. dx = inverse * (g - mean(g) - normalized * mean(g *
    // normalized)), without mean(g) for RMSNorm.
    double g_mean = 0, g_normalized_mean = 0;
    for (int64_t d = 0; d < width; ++d) {
      const double slope = ElementAt(dy, n * width + d);
      weight_sums[d] += slope * normalized(d);
      bias_sums[d] += slope;
      const double g = slope * weight_at(d);
      g_mean += g / static_cast<double>(width);
      g_normalized_mean += g * normalized(d) / static_cast<double>(width);
    }
    if (kind == NormKind::kRmsNorm) g_mean = 0;
    for (int64_t d = 0; d < width; ++d) {
      const double g = ElementAt(dy, n * width + d) * weight_at(d);
      Put(dx, n * width + d, inverse * (g - g_mean - normalized(d) * g_normalized_mean), true);
    }
  }
  for (int64_t d = 0; d < width; ++d) {
    if (!dweight.empty()) Put(dweight, d, weight_sums[d], add_dweight);
    if (!dbias.empty()) Put(dbias, d, bias_sums[d], add_dbias);
  }
}

// --- Products by blocks ------------------------------------------------------------------------

void ReferenceBackend::BlockLinear(int64_t blocks, TensorView x, TensorView w, TensorView y) {
  const int64_t in = w.columns(), out = w.rows() / blocks;
  CheckShape(w, {blocks * out, in});
  CheckShape(x, {y.rows(), blocks * in});
  CheckShape(y, {x.rows(), blocks * out});
  if (dry()) return;
  for (int64_t n = 0; n < x.rows(); ++n) {
    for (int64_t row = 0; row < blocks * out; ++row) {
      double sum = 0;
      for (int64_t i = 0; i < in; ++i) {
        sum += ElementAt(x, n * blocks * in + row / out * in + i) * ElementAt(w, row * in + i);
      }
      SetElement(y, n * blocks * out + row, sum);
    }
  }
}

void ReferenceBackend::BlockLinearBackwardInput(int64_t blocks, TensorView dy, TensorView w,
                                                TensorView dx) {
  const int64_t in = w.columns(), out = w.rows() / blocks;
  CheckShape(dx, {dy.rows(), blocks * in});
  CheckShape(dy, {dx.rows(), blocks * out});
  if (dry()) return;
  for (int64_t n = 0; n < dy.rows(); ++n) {
    for (int64_t column = 0; column < blocks * in; ++column) {
      double sum = 0;
      for (int64_t o = 0; o < out; ++o) {
        const int64_t row = column / in * out + o;
        sum += ElementAt(dy, n * blocks * out + row) * ElementAt(w, row * in + column % in);
      }
      SetElement(dx, n * blocks * in + column, sum);
    }
  }
}

void ReferenceBackend::BlockLinearBackwardWeight(int64_t blocks, TensorView dy, TensorView x,
                                                 TensorView dw, Adding add) {
  const int64_t in = dw.columns(), out = dw.rows() / blocks;
  CheckShape(x, {dy.rows(), blocks * in});
  CheckShape(dy, {x.rows(), blocks * out});
  if (dry()) return;
  for (int64_t row = 0; row < blocks * out; ++row) {
    for (int64_t i = 0; i < in; ++i) {
      double sum = 0;
      for (int64_t n = 0; n < x.rows(); ++n) {
        sum += ElementAt(dy, n * blocks * out + row) *
               ElementAt(x, n * blocks * in + row / out * in + i);
      }
      Leave(dw, row * in + i, sum, add);
    }
  }
}

// --- Positions and attention -----------------------------------------------------------------

void ReferenceBackend::Rope(TensorView x, int64_t heads, int64_t rotated, int64_t sequence_length,
                            int64_t first_position, float theta, bool inverse) {
  const int64_t width = x.columns() / heads;
  TERRACE_CHECK(x.columns() == heads * width && rotated > 0 && rotated % 2 == 0 && rotated <= width,
                "{}: {} elements of each of {} heads in {}", x.name, rotated, heads,
                x.shape.ToString());
  if (dry()) return;
  const int64_t half = rotated / 2;
  for (int64_t n = 0; n < x.rows(); ++n) {
    const double position = static_cast<double>(first_position + n % sequence_length);
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t i = 0; i < half; ++i) {
        const double angle =
            position * std::pow(static_cast<double>(theta),
                                -2.0 * static_cast<double>(i) / static_cast<double>(rotated));
        const double cosine = std::cos(angle);
        const double sine = inverse ? -std::sin(angle) : std::sin(angle);
        const int64_t low = (n * heads + h + 1) * width - rotated + i, high = low + half;
        const double a = ElementAt(x, low), b = ElementAt(x, high);
        SetElement(x, low, a * cosine - b * sine);
        SetElement(x, high, a * sine + b * cosine);
      }
    }
  }
}

namespace {

// Where attention's tensors have what, and how many keys a query sees.
struct AttentionIndex {
  const AttentionShape& shape;

  int64_t Query(int64_t b, int64_t i, int64_t h) const {
    return ((b * shape.query_length + i) * shape.heads + h) * shape.head_width;
  }
  int64_t Key(int64_t b, int64_t j, int64_t h) const {
    const int64_t g = h / (shape.heads / shape.kv_heads);
    return ((b * shape.key_length + j) * shape.kv_heads + g) * shape.head_width;
  }
  int64_t LogSum(int64_t b, int64_t i, int64_t h) const {
    return (b * shape.heads + h) * shape.query_length + i;
  }
  int64_t VisibleKeys(int64_t i) const { return i + shape.key_length - shape.query_length + 1; }
  double scale() const { return 1.0 / std::sqrt(static_cast<double>(shape.head_width)); }
};

void CheckAttention(const AttentionShape& shape, const TensorView& q, const TensorView& k,
                    const TensorView& v, const TensorView& out, const TensorView& log_sums) {
  const int64_t queries = shape.batch * shape.query_length;
  const int64_t keys = shape.batch * shape.key_length;
  CheckShape(q, {queries, shape.heads * shape.head_width});
  CheckShape(k, {keys, shape.kv_heads * shape.head_width});
  CheckShape(v, {keys, shape.kv_heads * shape.head_width});
  CheckShape(out, q.shape);
  CheckShape(log_sums, {queries * shape.heads});
  TERRACE_CHECK(shape.heads % shape.kv_heads == 0 && shape.key_length >= shape.query_length,
                "{}: attention of {} queries to {} keys, {} heads to {}", q.name,
                shape.query_length, shape.key_length, shape.heads, shape.kv_heads);
}

double Dot(const TensorView& a, int64_t a_first, const TensorView& b, int64_t b_first,
           int64_t count) {
  double sum = 0;
  for (int64_t c = 0; c < count; ++c) sum += ElementAt(a, a_first + c) * ElementAt(b, b_first + c);
  return sum;
}

}  // namespace

void ReferenceBackend::Attention(const AttentionShape& shape, TensorView q, TensorView k,
                                 TensorView v, TensorView out, TensorView log_sums) {
  CheckAttention(shape, q, k, v, out, log_sums);
  if (dry()) return;
  const AttentionIndex at{shape};
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      for (int64_t i = 0; i < shape.query_length; ++i) {
        std::vector<double> scores(at.VisibleKeys(i));
        for (int64_t j = 0; j < at.VisibleKeys(i); ++j) {
          scores[j] = at.scale() * Dot(q, at.Query(b, i, h), k, at.Key(b, j, h), shape.head_width);
        }
        const double log_sum = LogSum(scores);
        for (int64_t c = 0; c < shape.head_width; ++c) {
          double sum = 0;
          for (int64_t j = 0; j < at.VisibleKeys(i); ++j) {
            sum += std::exp(scores[j] - log_sum) * ElementAt(v, at.Key(b, j, h) + c);
          }
          SetElement(out, at.Query(b, i, h) + c, sum);
        }
        SetElement(log_sums, at.LogSum(b, i, h), log_sum);
      }
    }
  }
}

void ReferenceBackend::AttentionBackward(const AttentionShape& shape, TensorView q, TensorView k,
                                         TensorView v, TensorView out, TensorView log_sums,
                                         TensorView dout, TensorView dq, TensorView dk,
                                         TensorView dv) {
  CheckAttention(shape, q, k, v, out, log_sums);
  CheckShape(dout, q.shape);
  CheckShape(dq, q.shape);
  CheckShape(dk, k.shape);
  CheckShape(dv, v.shape);
  TERRACE_CHECK(shape.query_length == shape.key_length, "{}: {} queries, {} keys", q.name,
                shape.query_length, shape.key_length);
  if (dry()) return;
  const AttentionIndex at{shape};
  const int64_t width = shape.head_width;
  std::vector<double> q_sums(q.size()), k_sums(k.size()), v_sums(v.size());
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      for (int64_t i = 0; i < shape.query_length; ++i) {
        const int64_t query = at.Query(b, i, h);
        const double log_sum = ElementAt(log_sums, at.LogSum(b, i, h));
        // sum over keys of probability * dprobability
        const double mean_slope = Dot(dout, query, out, query, width);
        for (int64_t j = 0; j < at.VisibleKeys(i); ++j) {
          const int64_t key = at.Key(b, j, h);
          const double probability = std::exp(at.scale() * Dot(q, query, k, key, width) - log_sum);
          const double slope =
              at.scale() * probability * (Dot(dout, query, v, key, width) - mean_slope);
          for (int64_t c = 0; c < width; ++c) {
            q_sums[query + c] += slope * ElementAt(k, key + c);
            k_sums[key + c] += slope * ElementAt(q, query + c);
            v_sums[key + c] += probability * ElementAt(dout, query + c);
          }
        }
      }
    }
  }
  for (int64_t i = 0; i < q.size(); ++i) SetElement(dq, i, q_sums[i]);
  const bool shared = dk.data == dv.data;
  for (int64_t i = 0; i < k.size(); ++i) SetElement(dk, i, k_sums[i] + (shared ? v_sums[i] : 0));
  if (shared) return;
  for (int64_t i = 0; i < v.size(); ++i) SetElement(dv, i, v_sums[i]);
}

// --- Feed-forward ----------------------------------------------------------------------------

void ReferenceBackend::SwiGlu(TensorView gate, TensorView up, TensorView row_scale, TensorView h) {
  CheckShape(up, gate.shape);
  CheckShape(h, gate.shape);
  if (!row_scale.empty()) CheckShape(row_scale, {gate.rows()});
  if (dry()) return;
  for (int64_t i = 0; i < gate.size(); ++i) {
    const double g = ElementAt(gate, i);
    const double scale = row_scale.empty() ? 1.0 : ElementAt(row_scale, i / gate.columns());
    SetElement(h, i, g * Sigmoid(g) * ElementAt(up, i) * scale);
  }
}

void ReferenceBackend::SwiGluBackward(TensorView dh, TensorView gate, TensorView up,
                                      TensorView row_scale, TensorView dgate, TensorView dup,
                                      TensorView drow_scale) {
  CheckShape(dh, gate.shape);
  CheckShape(up, gate.shape);
  CheckShape(dgate, gate.shape);
  CheckShape(dup, gate.shape);
  TERRACE_CHECK(row_scale.empty() == drow_scale.empty(), "{}: row scale without its gradient",
                gate.name);
  if (!row_scale.empty()) {
    CheckShape(row_scale, {gate.rows()});
    CheckShape(drow_scale, {gate.rows()});
  }
  if (dry()) return;
  for (int64_t n = 0; n < gate.rows(); ++n) {
    const double scale = row_scale.empty() ? 1.0 : ElementAt(row_scale, n);
    double scale_sum = 0;
    for (int64_t i = n * gate.columns(); i < (n + 1) * gate.columns(); ++i) {
      const double g = ElementAt(gate, i), u = ElementAt(up, i), slope = ElementAt(dh, i);
      const double sigmoid = Sigmoid(g);
      scale_sum += slope * g * sigmoid * u;
      SetElement(dgate, i, slope * scale * u * sigmoid * (1.0 + g * (1.0 - sigmoid)));
      SetElement(dup, i, slope * scale * g * sigmoid);
      SetElement(dh, i, g * sigmoid * u * scale);
    }
    if (!drow_scale.empty()) SetElement(drow_scale, n, scale_sum);
  }
}

// --- Routing ---------------------------------------------------------------------------------

namespace {

// NaN below everything else.
bool LowerLogit(float a, float b) { return std::isnan(a) ? !std::isnan(b) : a < b; }

double LimitedLogit(float logit) {
  constexpr double kLimit = ReferenceBackend::kLogitLimit;
  return std::isnan(logit) ? -kLimit : std::clamp(static_cast<double>(logit), -kLimit, kLimit);
}

void CheckRouting(const RouterConfig& config, const Routing& routing, int64_t tokens,
                  int64_t experts) {
  const int64_t top_k = config.top_k;
  TERRACE_CHECK(top_k >= 1 && top_k <= experts, "{}: top {} of {} experts",
                routing.probabilities.name, top_k, experts);
  CheckShape(routing.probabilities, {tokens, experts});
  CheckShape(routing.log_sums, {tokens});
  CheckShape(routing.experts, {tokens, top_k});
  CheckShape(routing.weights, {tokens, top_k});
  CheckShape(routing.token_rows, {tokens, top_k});
  CheckShape(routing.row_tokens, {tokens * top_k});
  CheckShape(routing.row_weights, {tokens * top_k});
  CheckShape(routing.offsets, {experts + 1});
  CheckShape(routing.fractions, {experts});
  CheckDType(routing.experts, DType::kI32);
  CheckDType(routing.token_rows, DType::kI64);
  CheckDType(routing.row_tokens, DType::kI64);
  CheckDType(routing.offsets, DType::kI64);
}

int64_t CountedTokens(const TensorView& targets) {
  const auto span = targets.span<int32_t>();
  return static_cast<int64_t>(span.size()) - std::count(span.begin(), span.end(), kIgnoredTarget);
}

// A score that is not a softmax's; as backend.h says, of no logit below -60.
double ScoreOf(RouterScore score, double logit) {
  const double x = std::max(logit, -60.0);
  if (score == RouterScore::kSigmoid) return 1 / (1 + std::exp(-x));
  return std::sqrt(std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))));
}

// Its derivative, from the score.
double ScoreSlope(RouterScore score, double value) {
  if (score == RouterScore::kSigmoid) return value * (1 - value);
  return -std::expm1(-value * value) / (2 * value);
}

}  // namespace

RouterStatistics ReferenceBackend::Route(const RouterConfig& config,
                                         std::optional<uint64_t> noise_key, TensorView logits,
                                         TensorView selection_bias, TensorView targets,
                                         const Routing& routing, std::span<int64_t> counts) {
  const int64_t tokens = logits.rows(), experts = logits.columns(), top_k = config.top_k;
  CheckRouting(config, routing, tokens, experts);
  CheckShape(targets, {tokens});
  CheckDType(logits, DType::kF32);
  TERRACE_CHECK(std::ssize(counts) == experts, "{}: {} counts for {} experts", logits.name,
                counts.size(), experts);
  std::fill(counts.begin(), counts.end(), 0);
  if (dry()) return {};

  float* logit = logits.as<float>();
  float* probability = routing.probabilities.as<float>();
  int32_t* selected = routing.experts.as<int32_t>();
  float* weight = routing.weights.as<float>();
  const int32_t* target = targets.as<int32_t>();

  RouterStatistics statistics;
  statistics.tokens = CountedTokens(targets);
  std::vector<double> probability_sums(experts);
  std::vector<int64_t> rows_of(experts);
  double z_sum = 0, entropy_sum = 0;
  for (int64_t n = 0; n < tokens; ++n) {
    const bool counted = target[n] != kIgnoredTarget;
    float* row = logit + n * experts;
    if (noise_key && config.noise_scale != 0) {
      for (int64_t e = 0; e < experts; ++e) {
        row[e] += config.noise_scale * RandomNormal(*noise_key, n * experts + e);
      }
    }
    std::vector<double> limited(experts);
    std::transform(row, row + experts, limited.begin(), LimitedLogit);
    const bool softmax = config.score == RouterScore::kSoftmax;
    std::vector<double> scores(experts);  // not of a softmax
    for (int64_t e = 0; e < experts; ++e) scores[e] = ScoreOf(config.score, limited[e]);
    const double log_sum =
        softmax ? LogSum(limited) : std::log(std::accumulate(scores.begin(), scores.end(), 0.0));
    routing.log_sums.as<float>()[n] = static_cast<float>(log_sum);
    // Not exp(limited - log_sum), whose terms sum to 2 when two logits are at the limit: there
    // log(2) is lost in the rounding of the logarithm.
    const double largest = *std::max_element(limited.begin(), limited.end());
    double sum = 0;
    for (double value : limited) sum += std::exp(value - largest);
    for (int64_t e = 0; e < experts; ++e) {
      const double p =
          softmax ? std::exp(limited[e] - largest) / sum : scores[e] / std::exp(log_sum);
      probability[n * experts + e] = static_cast<float>(p);
      if (counted) {
        probability_sums[e] += p;
        if (p > 0) entropy_sum -= p * std::log(p);
      }
    }
    if (counted && softmax) z_sum += log_sum * log_sum;

    std::vector<float> choice(row, row + experts);
    for (int64_t e = 0; e < experts && !selection_bias.empty(); ++e) {
      if (std::isnan(row[e])) continue;
      const double score = probability[n * experts + e] * (softmax ? 1 : std::exp(log_sum));
      choice[e] = static_cast<float>(score + ElementAt(selection_bias, e));
    }
    std::vector<int32_t> order(experts);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return LowerLogit(choice[b], choice[a]); });
    double selected_sum = 0;
    for (int64_t k = 0; k < top_k; ++k) selected_sum += probability[n * experts + order[k]];
    for (int64_t k = 0; k < top_k; ++k) {
      selected[n * top_k + k] = order[k];
      ++rows_of[order[k]];
      if (counted) ++counts[order[k]];
      const double p = probability[n * experts + order[k]];
      const double score = softmax ? p : p * std::exp(log_sum);
      weight[n * top_k + k] = static_cast<float>(
          config.scaling_factor *
          (config.normalize_weights ? (selected_sum > 0 ? p / selected_sum : 0) : score));
    }
  }

  int64_t* offset = routing.offsets.as<int64_t>();
  offset[0] = 0;
  for (int64_t e = 0; e < experts; ++e) offset[e + 1] = offset[e] + rows_of[e];
  std::vector<int64_t> next_row(offset, offset + experts);
  for (int64_t n = 0; n < tokens; ++n) {
    for (int64_t k = 0; k < top_k; ++k) {
      const int64_t row = next_row[selected[n * top_k + k]]++;
      routing.token_rows.as<int64_t>()[n * top_k + k] = row;
      routing.row_tokens.as<int64_t>()[row] = n;
      routing.row_weights.as<float>()[row] = weight[n * top_k + k];
    }
  }

  const double counted_tokens = static_cast<double>(std::max<int64_t>(statistics.tokens, 1));
  double balance = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const double fraction =
        static_cast<double>(counts[e]) / (counted_tokens * static_cast<double>(top_k));
    routing.fractions.as<float>()[e] = static_cast<float>(fraction);
    balance += probability_sums[e] / counted_tokens * fraction;
  }
  statistics.aux_loss = config.aux_coefficient * static_cast<double>(experts) * balance;
  statistics.z_loss = config.z_coefficient * z_sum / counted_tokens;
  statistics.entropy = entropy_sum / counted_tokens;
  return statistics;
}

void ReferenceBackend::RouteBackward(const RouterConfig& config, const Routing& routing,
                                     TensorView targets, TensorView drow_weights, float loss_scale,
                                     TensorView dlogits) {
  const int64_t tokens = dlogits.rows(), experts = dlogits.columns(), top_k = config.top_k;
  CheckRouting(config, routing, tokens, experts);
  CheckShape(targets, {tokens});
  CheckShape(drow_weights, {tokens * top_k});
  if (dry()) return;

  const int32_t* selected = routing.experts.as<int32_t>();
  const int64_t counted_tokens = std::max<int64_t>(CountedTokens(targets), 1);
  const double balance_scale = loss_scale / static_cast<double>(counted_tokens);
  for (int64_t n = 0; n < tokens; ++n) {
    const bool counted = targets.as<int32_t>()[n] != kIgnoredTarget;
    const bool softmax = config.score == RouterScore::kSoftmax;
    const double total = softmax ? 1 : std::exp(ElementAt(routing.log_sums, n));
    // p = score / total; ds is the gradient of the scores.
    std::vector<double> p(experts), ds(experts);
    double mean_slope = 0;
    for (int64_t e = 0; e < experts; ++e) {
      p[e] = ElementAt(routing.probabilities, n * experts + e);
      if (!counted) continue;
      ds[e] = balance_scale * config.aux_coefficient * static_cast<double>(experts) *
              ElementAt(routing.fractions, e) / total;
      mean_slope += p[e] * ds[e];
    }
    for (int64_t e = 0; e < experts; ++e) ds[e] -= mean_slope;

    double selected_sum = 0, weighted_slope = 0;
    for (int64_t k = 0; k < top_k; ++k) {
      const int64_t row = routing.token_rows.as<int64_t>()[n * top_k + k];
      selected_sum += p[selected[n * top_k + k]] * total;
      weighted_slope += ElementAt(drow_weights, row) * ElementAt(routing.weights, n * top_k + k);
    }
    for (int64_t k = 0; k < top_k; ++k) {
      const double slope = config.scaling_factor *
                           ElementAt(drow_weights, routing.token_rows.as<int64_t>()[n * top_k + k]);
      ds[selected[n * top_k + k]] += !config.normalize_weights ? slope
                                     : selected_sum > 0 ? (slope - weighted_slope) / selected_sum
                                                        : 0;
    }

    mean_slope = 0;
    for (int64_t e = 0; e < experts; ++e) mean_slope += p[e] * ds[e];
    const double z_slope =
        counted ? balance_scale * config.z_coefficient * 2 * ElementAt(routing.log_sums, n) : 0;
    for (int64_t e = 0; e < experts; ++e) {
      SetElement(dlogits, n * experts + e,
                 softmax ? p[e] * (ds[e] - mean_slope + z_slope)
                         : ds[e] * ScoreSlope(config.score, p[e] * total));
    }
  }
}

void ReferenceBackend::GatherRows(TensorView x, TensorView row_tokens, TensorView y) {
  const int64_t width = x.columns();
  CheckShape(y, {row_tokens.size(), width});
  CheckDType(y, x.dtype);
  if (dry()) return;
  for (int64_t r = 0; r < y.rows(); ++r) {
    const int64_t n = row_tokens.as<int64_t>()[r];
    for (int64_t d = 0; d < width; ++d) {
      SetElement(y, r * width + d, ElementAt(x, n * width + d));
    }
  }
}

void ReferenceBackend::AddGatheredRows(TensorView x, TensorView token_rows, TensorView y) {
  const int64_t width = y.columns(), top_k = token_rows.columns();
  CheckShape(x, {y.rows() * top_k, width});
  CheckShape(token_rows, {y.rows(), top_k});
  CheckDType(y, DType::kF32);
  if (dry()) return;
  for (int64_t n = 0; n < y.rows(); ++n) {
    for (int64_t d = 0; d < width; ++d) {
      double sum = 0;
      for (int64_t k = 0; k < top_k; ++k) {
        sum += ElementAt(x, token_rows.as<int64_t>()[n * top_k + k] * width + d);
      }
      Put(y, n * width + d, sum, true);
    }
  }
}

// --- Embedding, head, loss -------------------------------------------------------------------

void ReferenceBackend::Embedding(TensorView ids, TensorView tokens_table,
                                 TensorView positions_table, int64_t sequence_length,
                                 int64_t first_position, TensorView y) {
  const int64_t width = y.columns();
  CheckShape(y, {ids.size(), width});
  TERRACE_CHECK(tokens_table.columns() == width, "{}: {} for width {}", tokens_table.name,
                tokens_table.shape.ToString(), width);
  TERRACE_CHECK(
      positions_table.empty() || first_position + sequence_length <= positions_table.rows(),
      "{}: {} for {} positions from {}", positions_table.name, positions_table.shape.ToString(),
      sequence_length, first_position);
  if (dry()) return;
  for (int64_t n = 0; n < ids.size(); ++n) {
    const int64_t id = ids.as<int32_t>()[n];
    TERRACE_CHECK(id >= 0 && id < tokens_table.rows(), "{}: id {} of {}", ids.name, id,
                  tokens_table.rows());
    const int64_t position = first_position + n % sequence_length;
    for (int64_t d = 0; d < width; ++d) {
      double sum = ElementAt(tokens_table, id * width + d);
      if (!positions_table.empty()) sum += ElementAt(positions_table, position * width + d);
      SetElement(y, n * width + d, sum);
    }
  }
}

void ReferenceBackend::EmbeddingBackward(TensorView dy, TensorView ids, TensorView dtable,
                                         Adding add) {
  const int64_t width = dtable.columns();
  CheckShape(dy, {ids.size(), width});
  if (dry()) return;
  std::vector<double> sums(dtable.size());
  for (int64_t n = 0; n < ids.size(); ++n) {
    for (int64_t d = 0; d < width; ++d) {
      sums[ids.as<int32_t>()[n] * width + d] += ElementAt(dy, n * width + d);
    }
  }
  for (int64_t i = 0; i < dtable.size(); ++i) Leave(dtable, i, sums[i], add);
}

void ReferenceBackend::PositionsBackward(TensorView dy, int64_t sequence_length, TensorView dtable,
                                         Adding add) {
  const int64_t width = dtable.columns();
  CheckShape(dy, {dy.rows(), width});
  TERRACE_CHECK(sequence_length <= dtable.rows(), "{}: {} for {} positions", dtable.name,
                dtable.shape.ToString(), sequence_length);
  if (dry()) return;
  std::vector<double> sums(dtable.size());
  for (int64_t n = 0; n < dy.rows(); ++n) {
    for (int64_t d = 0; d < width; ++d) {
      sums[n % sequence_length * width + d] += ElementAt(dy, n * width + d);
    }
  }
  for (int64_t i = 0; i < dtable.size(); ++i) Leave(dtable, i, sums[i], add);
}

double ReferenceBackend::HeadLoss(TensorView x, TensorView w, TensorView targets, float loss_scale,
                                  TensorView dx, TensorView dw, Adding add_dw) {
  const int64_t tokens = x.rows(), width = w.columns(), vocabulary = w.rows();
  CheckShape(x, {tokens, width});
  CheckShape(targets, {tokens});
  if (!dx.empty()) CheckShape(dx, x.shape);
  if (!dw.empty()) CheckShape(dw, w.shape);
  if (dry()) return 0;
  std::vector<double> x_sums(dx.empty() ? 0 : dx.size());
  std::vector<double> w_sums(dw.empty() ? 0 : dw.size());
  double loss = 0;
  for (int64_t n = 0; n < tokens; ++n) {
    const int64_t target = targets.as<int32_t>()[n];
    if (target == kIgnoredTarget) continue;
    TERRACE_CHECK(target >= 0 && target < vocabulary, "{}: id {} of {}", targets.name, target,
                  vocabulary);
    std::vector<double> logits(vocabulary);
    for (int64_t v = 0; v < vocabulary; ++v) {
      logits[v] = Dot(x, n * width, w, v * width, width);
    }
    const double log_sum = LogSum(logits);
    loss += log_sum - logits[target];
    for (int64_t v = 0; v < vocabulary; ++v) {
      const double slope = loss_scale * (std::exp(logits[v] - log_sum) - (v == target ? 1 : 0));
      for (int64_t d = 0; d < width; ++d) {
        if (!dx.empty()) x_sums[n * width + d] += slope * ElementAt(w, v * width + d);
        if (!dw.empty()) w_sums[v * width + d] += slope * ElementAt(x, n * width + d);
      }
    }
  }
  for (size_t i = 0; i < x_sums.size(); ++i) SetElement(dx, i, x_sums[i]);
  for (size_t i = 0; i < w_sums.size(); ++i) Leave(dw, i, w_sums[i], add_dw);
  return loss;
}

// --- Elementwise -----------------------------------------------------------------------------

void ReferenceBackend::Zero(TensorView x) {
  if (!dry()) std::fill_n(x.data, x.bytes(), std::byte{0});
}

void ReferenceBackend::Copy(TensorView x, TensorView y) {
  TERRACE_CHECK(x.size() == y.size(), "{}: {} to {}", x.name, x.size(), y.size());
  if (dry()) return;
  for (int64_t i = 0; i < x.size(); ++i) SetElement(y, i, ElementAt(x, i));
}

double ReferenceBackend::SumOfSquares(TensorView x) {
  if (dry()) return 0;
  double sum = 0;
  for (int64_t i = 0; i < x.size(); ++i) sum += ElementAt(x, i) * ElementAt(x, i);
  return sum;
}

}  // namespace terrace
