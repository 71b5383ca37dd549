// Routing of tokens to experts: scores, top-k, balance, and the permutation by expert.
#include <cmath>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/kernel.h"
#include "core/parallel.h"
#include "core/rng.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/route.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/contrib/math/math-inl.h>

#include "backend/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace terrace {
namespace HWY_NAMESPACE {
namespace {

// Formulas see logits limited to this size, and NaN as its negative: whatever a router yields,
// probabilities are finite and sum to one.
constexpr float kLogitLimit = 1e30f;

// logits[i] += scale * RandomNormal(key, i) for i in [begin, end), but for the last bits of its
// logarithm and cosine.
void AddNoise(float* logits, float scale, uint64_t key, int64_t begin, int64_t end) {
  const hn::ScalableTag<double> wide;
  const hn::Rebind<float, decltype(wide)> d;
  constexpr int64_t kChunk = 64;
  double radius[kChunk], turn[kChunk];
  float normal[kChunk];
  for (int64_t first = begin; first < end; first += kChunk) {
    for (int64_t j = 0; j < kChunk; ++j) {
      radius[j] = RandomUniform(key, 2 * static_cast<uint64_t>(first + j));
      turn[j] = RandomUniform(key, 2 * static_cast<uint64_t>(first + j) + 1);
    }
    for (int64_t j = 0; j < kChunk; j += static_cast<int64_t>(hn::Lanes(wide))) {
      const auto square = hn::Mul(hn::Set(wide, -2.0), hn::Log(wide, hn::LoadU(wide, radius + j)));
      const auto angle = hn::Mul(hn::Set(wide, 2.0 * std::numbers::pi), hn::LoadU(wide, turn + j));
      const auto value = hn::Mul(hn::Sqrt(square), hn::Cos(wide, angle));
      hn::StoreU(hn::DemoteTo(d, value), d, normal + j);
    }
    const int64_t count = std::min(kChunk, end - first);
    for (int64_t j = 0; j < count; ++j) logits[first + j] += scale * normal[j];
  }
}

// Softmax of one row; also its logsumexp and its entropy in nats.
HWY_INLINE void SoftmaxRow(const float* logits, int64_t experts, float* probabilities,
                           float* log_sum, float* entropy) {
  float top = -kLogitLimit;
  for (int64_t e = 0; e < experts; ++e) top = logits[e] > top ? logits[e] : top;
  top = top < kLogitLimit ? top : kLogitLimit;
  LaneSum sum, weighted;
  ForLanes(experts, [&](auto d, int64_t e) HWY_ATTR {
    const auto lowest = hn::Set(d, -kLogitLimit);
    const auto logit = hn::LoadU(d, logits + e);
    const auto limited =
        hn::Clamp(hn::IfThenElse(hn::IsNaN(logit), lowest, logit), lowest, hn::Set(d, kLogitLimit));
    const auto shifted = hn::Sub(limited, hn::Set(d, top));
    const auto power = ExpOrZeroLanes(d, shifted);
    sum.Add(d, power);
    weighted.Add(d, hn::Mul(power, shifted));
    hn::StoreU(power, d, probabilities + e);
  });
  const float total = sum.Total();
  const float log_total = std::log(total);
  *log_sum = top + log_total;
  *entropy = log_total - weighted.Total() / total;
  const float inverse = 1.0f / total;
  ForLanes(experts, [=](auto d, int64_t e) HWY_ATTR {
    hn::StoreU(hn::Mul(hn::LoadU(d, probabilities + e), hn::Set(d, inverse)), d, probabilities + e);
  });
}

// Below this, scores that are no softmax's stay what they are here: none vanishes.
constexpr float kLowestLogit = -60.0f;

template <class D>
HWY_INLINE hn::Vec<D> Sigmoid(D d, hn::Vec<D> x) {
  const auto one = hn::Set(d, 1.0f);
  return hn::Div(one, hn::Add(one, ExpInRange(d, hn::Max(hn::Neg(x), hn::Set(d, -87.0f)))));
}

template <class D>
HWY_INLINE hn::Vec<D> SqrtSoftplus(D d, hn::Vec<D> x) {
  const auto power = ExpOrZeroLanes(d, hn::Neg(hn::Abs(x)));
  return hn::Sqrt(hn::Add(hn::Max(x, hn::Zero(d)), hn::Log1p(d, power)));
}

// As SoftmaxRow, of scores that do not depend on each other. `log_sum`: of the scores.
HWY_INLINE void ScoreRow(RouterScore score, const float* logits, int64_t experts,
                         float* probabilities, float* log_sum, float* entropy) {
  LaneSum sum, weighted;
  ForLanes(experts, [&](auto d, int64_t e) HWY_ATTR {
    const auto lowest = hn::Set(d, kLowestLogit);
    const auto logit = hn::LoadU(d, logits + e);
    const auto limited =
        hn::Clamp(hn::IfThenElse(hn::IsNaN(logit), lowest, logit), lowest, hn::Set(d, kLogitLimit));
    const auto value =
        score == RouterScore::kSigmoid ? Sigmoid(d, limited) : SqrtSoftplus(d, limited);
    sum.Add(d, value);
    weighted.Add(d, hn::Mul(value, hn::Log(d, value)));
    hn::StoreU(value, d, probabilities + e);
  });
  const float total = sum.Total();
  *log_sum = std::log(total);
  *entropy = *log_sum - weighted.Total() / total;
  const float inverse = 1.0f / total;
  ForLanes(experts, [=](auto d, int64_t e) HWY_ATTR {
    hn::StoreU(hn::Mul(hn::LoadU(d, probabilities + e), hn::Set(d, inverse)), d, probabilities + e);
  });
}

// Fills probabilities and log_sums of tokens [begin, end), and their entropies[end - begin].
void ScoreRows(RouterScore score, const TensorView& logits, const Routing& routing,
               float* entropies, int64_t begin, int64_t end) {
  const int64_t experts = logits.columns();
  for (int64_t n = begin; n < end; ++n) {
    const float* row = logits.as<float>() + n * experts;
    float* const probabilities = routing.probabilities.as<float>() + n * experts;
    float* const log_sum = routing.log_sums.as<float>() + n;
    if (score == RouterScore::kSoftmax) {
      SoftmaxRow(row, experts, probabilities, log_sum, entropies + n - begin);
    } else {
      ScoreRow(score, row, experts, probabilities, log_sum, entropies + n - begin);
    }
  }
}

// The derivative of a score by its logit, from the score s: s * (1 - s) of a sigmoid, and
// (1 - e^(-s^2)) / 2s of the root of a softplus.
template <class D>
HWY_INLINE hn::Vec<D> ScoreSlope(D d, RouterScore score, hn::Vec<D> s) {
  const auto one = hn::Set(d, 1.0f);
  if (score == RouterScore::kSigmoid) return hn::Mul(s, hn::Sub(one, s));
  const auto square = hn::Mul(s, s);
  // Of few terms where one less the power would cancel.
  const auto half = hn::Set(d, 0.5f);
  const auto series = hn::Mul(
      square, hn::NegMulAdd(square, hn::NegMulAdd(square, hn::Set(d, 1.0f / 6), half), one));
  const auto far = hn::Sub(one, ExpOrZeroLanes(d, hn::Neg(square)));
  const auto rise = hn::IfThenElse(hn::Lt(square, hn::Set(d, 0.01f)), series, far);
  return hn::Div(hn::Mul(rise, half), s);
}

// Of scores that do not depend on each other. With ds the gradient of a score, p its share of their
// sum: through the load-balancing loss it is (dbalance - sum(p * dbalance)) / sum of scores,
// through weight = factor * score / sum(chosen scores) it is
// (factor * dweight - sum(dweight * weight)) / sum(chosen scores).
void ScoresBackwardRows(const RouterConfig& config, const Routing& routing,
                        const TensorView& targets, const TensorView& drow_weights,
                        const TensorView& dbalance, const TensorView& dlogits, int64_t begin,
                        int64_t end) {
  const int64_t experts = dlogits.columns();
  const int64_t choices = config.top_k;
  const float* db = dbalance.as<float>();
  const float* dweights = drow_weights.as<float>();
  for (int64_t n = begin; n < end; ++n) {
    const float* p = routing.probabilities.as<float>() + n * experts;
    const int32_t* chosen = routing.experts.as<int32_t>() + n * choices;
    const int64_t* rows = routing.token_rows.as<int64_t>() + n * choices;
    const float* weights = routing.weights.as<float>() + n * choices;
    float* to = dlogits.as<float>() + n * experts;
    const float total = std::exp(routing.log_sums.as<float>()[n]);

    const bool counted = targets.as<int32_t>()[n] != kIgnoredTarget;
    LaneSum sum;
    ForLanes(experts, [&](auto d, int64_t e) HWY_ATTR {
      sum.Add(d, hn::Mul(hn::LoadU(d, p + e), hn::LoadU(d, db + e)));
    });
    const float mean = sum.Total();
    const float inverse = counted ? 1.0f / total : 0.0f;
    ForLanes(experts, [=](auto d, int64_t e) HWY_ATTR {
      const auto ds = hn::Sub(hn::LoadU(d, db + e), hn::Set(d, mean));
      hn::StoreU(hn::Mul(ds, hn::Set(d, inverse)), d, to + e);
    });

    float chosen_sum = 0, weighted = 0;
    for (int64_t k = 0; k < choices; ++k) {
      chosen_sum += p[chosen[k]];
      weighted += dweights[rows[k]] * weights[k];
    }
    for (int64_t k = 0; k < choices; ++k) {
      const float dweight = config.scaling_factor * dweights[rows[k]];
      to[chosen[k]] +=
          config.normalize_weights ? (dweight - weighted) / (chosen_sum * total) : dweight;
    }
    ForLanes(experts, [=](auto d, int64_t e) HWY_ATTR {
      const auto score = hn::Mul(hn::LoadU(d, p + e), hn::Set(d, total));
      hn::StoreU(hn::Mul(hn::LoadU(d, to + e), ScoreSlope(d, config.score, score)), d, to + e);
    });
  }
}

// Of a softmax. With dp the gradient of the probabilities: dlogits = p * (dp - sum(p * dp)) + dz *
// p. dp has a part for every expert, dbalance f32 [E], and a part for the chosen ones. Through
// weight = factor * p / sum(chosen p) the latter is
// (factor * dweight - sum(dweight * weight)) / sum(chosen p).
void SoftmaxBackwardRows(const RouterConfig& config, const Routing& routing,
                         const TensorView& targets, const TensorView& drow_weights,
                         const TensorView& dbalance, float dz_scale, const TensorView& dlogits,
                         int64_t begin, int64_t end) {
  const int64_t experts = dlogits.columns();
  const int64_t choices = config.top_k;
  const float* db = dbalance.as<float>();
  for (int64_t n = begin; n < end; ++n) {
    const float* p = routing.probabilities.as<float>() + n * experts;
    const int32_t* chosen = routing.experts.as<int32_t>() + n * choices;
    const int64_t* rows = routing.token_rows.as<int64_t>() + n * choices;
    const float* weights = routing.weights.as<float>() + n * choices;
    const float* dweights = drow_weights.as<float>();
    float* to = dlogits.as<float>() + n * experts;

    float mean_dweight = 0;
    float scale = 1;
    if (config.normalize_weights) {
      float chosen_sum = 0;
      for (int64_t k = 0; k < choices; ++k) {
        chosen_sum += p[chosen[k]];
        mean_dweight += dweights[rows[k]] * weights[k];
      }
      scale = chosen_sum > 0 ? 1.0f / chosen_sum : 0.0f;
    }
    const auto dchosen = [&](int64_t k) {
      return (config.scaling_factor * dweights[rows[k]] - mean_dweight) * scale;
    };
    float mean = 0;
    for (int64_t k = 0; k < choices; ++k) mean += p[chosen[k]] * dchosen(k);
    const bool counted = targets.as<int32_t>()[n] != kIgnoredTarget;
    if (counted) {
      LaneSum sum;
      ForLanes(experts, [&](auto d, int64_t e) HWY_ATTR {
        sum.Add(d, hn::Mul(hn::LoadU(d, p + e), hn::LoadU(d, db + e)));
      });
      mean += sum.Total();
      const float common = dz_scale * routing.log_sums.as<float>()[n] - mean;
      ForLanes(experts, [=](auto d, int64_t e) HWY_ATTR {
        const auto dp = hn::Add(hn::LoadU(d, db + e), hn::Set(d, common));
        hn::StoreU(hn::Mul(hn::LoadU(d, p + e), dp), d, to + e);
      });
    } else {
      ForLanes(experts, [=](auto d, int64_t e) HWY_ATTR {
        hn::StoreU(hn::Mul(hn::LoadU(d, p + e), hn::Set(d, -mean)), d, to + e);
      });
    }
    for (int64_t k = 0; k < choices; ++k) to[chosen[k]] += p[chosen[k]] * dchosen(k);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace terrace
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace terrace {

HWY_EXPORT(AddNoise);
HWY_EXPORT(ScoreRows);
HWY_EXPORT(ScoresBackwardRows);
HWY_EXPORT(SoftmaxBackwardRows);

namespace {

// Tokens per block: counts and sums are made per block, then over blocks in order.
constexpr int64_t kBlockTokens = 128;

int64_t CountedTokens(const TensorView& targets) {
  const std::span<const int32_t> target = targets.span<int32_t>();
  return std::ssize(target) - std::count(target.begin(), target.end(), kIgnoredTarget);
}

bool Above(float a, float b) { return a > b || (std::isnan(b) && !std::isnan(a)); }

// The `choices` experts of highest value, best first. An expert goes before those it is strictly
// above, so that ties stay in the order of experts and all are distinct whatever the values.
template <typename Value>
void SelectExperts(const Value& value, int64_t experts, int64_t choices, int32_t* chosen) {
  int64_t held = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const float own = value(e);
    if (held == choices && !Above(own, value(chosen[held - 1]))) continue;
    int64_t place = held < choices ? held++ : held - 1;
    for (; place > 0 && Above(own, value(chosen[place - 1])); --place) {
      chosen[place] = chosen[place - 1];
    }
    chosen[place] = static_cast<int32_t>(e);
  }
}

// What a block of tokens adds up; [blocks] or [blocks, E], in scratch.
struct BlockSums {
  int64_t* assigned;      // rows per expert; then the expert's next row for this block
  int64_t* counted;       // the same, counted tokens only
  double* probabilities;  // of counted tokens
  double* entropy;
  double* squares;  // of log_sums
};

void RouteBlock(const RouterConfig& config, std::optional<uint64_t> noise_key,
                const TensorView& logits, const TensorView& selection_bias,
                const TensorView& targets, const Routing& routing, const BlockSums& sums,
                int64_t begin, int64_t end) {
  const int64_t experts = logits.columns();
  const int64_t choices = config.top_k;
  const int64_t block = begin / kBlockTokens;
  int64_t* assigned = sums.assigned + block * experts;
  int64_t* counted = sums.counted + block * experts;
  double* probability_sums = sums.probabilities + block * experts;
  std::fill_n(assigned, experts, 0);
  std::fill_n(counted, experts, 0);
  std::fill_n(probability_sums, experts, 0.0);
  sums.entropy[block] = 0;
  sums.squares[block] = 0;

  if (noise_key && config.noise_scale != 0) {
    HWY_DYNAMIC_DISPATCH(AddNoise)
    (logits.as<float>(), config.noise_scale, *noise_key, begin * experts, end * experts);
  }
  float entropies[kBlockTokens];
  HWY_DYNAMIC_DISPATCH(ScoreRows)(config.score, logits, routing, entropies, begin, end);
  const bool softmax = config.score == RouterScore::kSoftmax;

  for (int64_t n = begin; n < end; ++n) {
    const float* p = routing.probabilities.as<float>() + n * experts;
    int32_t* chosen = routing.experts.as<int32_t>() + n * choices;
    float* weights = routing.weights.as<float>() + n * choices;
    const float total = softmax ? 1 : std::exp(routing.log_sums.as<float>()[n]);
    const float* row = logits.as<float>() + n * experts;
    if (selection_bias.empty()) {
      SelectExperts([row](int64_t e) { return row[e]; }, experts, choices, chosen);
    } else {
      const float* bias = selection_bias.as<float>();
      const auto biased = [=](int64_t e) {
        return std::isnan(row[e]) ? row[e] : p[e] * total + bias[e];
      };
      SelectExperts(biased, experts, choices, chosen);
    }
    float chosen_sum = 0;
    for (int64_t k = 0; k < choices; ++k) chosen_sum += p[chosen[k]];
    for (int64_t k = 0; k < choices; ++k) {
      const float score = p[chosen[k]];
      // A biased choice may be of experts whose probabilities are 0.
      const float share = chosen_sum > 0 ? score / chosen_sum : 0.0f;
      weights[k] = config.scaling_factor * (config.normalize_weights ? share : score * total);
      ++assigned[chosen[k]];
    }
    if (targets.as<int32_t>()[n] == kIgnoredTarget) continue;
    for (int64_t k = 0; k < choices; ++k) ++counted[chosen[k]];
    for (int64_t e = 0; e < experts; ++e) probability_sums[e] += p[e];
    const double log_sum = routing.log_sums.as<float>()[n];
    sums.entropy[block] += entropies[n - begin];
    if (softmax) sums.squares[block] += log_sum * log_sum;
  }
}

// Turns rows per (block, expert) into the first row of each, expert by expert.
void PlaceBlocks(int64_t blocks, int64_t experts, int64_t* rows, int64_t* offsets) {
  int64_t next = 0;
  for (int64_t e = 0; e < experts; ++e) {
    offsets[e] = next;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t count = rows[block * experts + e];
      rows[block * experts + e] = next;
      next += count;
    }
  }
  offsets[experts] = next;
}

void PermuteBlock(const Routing& routing, int64_t* next_rows, int64_t begin, int64_t end) {
  const int64_t choices = routing.experts.columns();
  for (int64_t i = begin * choices; i < end * choices; ++i) {
    const int64_t row = next_rows[routing.experts.as<int32_t>()[i]]++;
    routing.token_rows.as<int64_t>()[i] = row;
    routing.row_tokens.as<int64_t>()[row] = i / choices;
    routing.row_weights.as<float>()[row] = routing.weights.as<float>()[i];
  }
}

void CheckRouting(const RouterConfig& config, const Routing& routing, const TensorView& targets,
                  int64_t tokens, int64_t experts) {
  const int64_t choices = config.top_k;
  TERRACE_CHECK(choices >= 1 && choices <= experts, "{}: top {} of {} experts",
                routing.probabilities.name, choices, experts);
  const struct {
    const TensorView& view;
    DType dtype;
    Shape shape;
  } views[] = {
      {targets, DType::kI32, {tokens}},
      {routing.probabilities, DType::kF32, {tokens, experts}},
      {routing.log_sums, DType::kF32, {tokens}},
      {routing.experts, DType::kI32, {tokens, choices}},
      {routing.weights, DType::kF32, {tokens, choices}},
      {routing.token_rows, DType::kI64, {tokens, choices}},
      {routing.row_tokens, DType::kI64, {tokens * choices}},
      {routing.row_weights, DType::kF32, {tokens * choices}},
      {routing.offsets, DType::kI64, {experts + 1}},
      {routing.fractions, DType::kF32, {experts}},
  };
  for (const auto& [view, dtype, shape] : views) {
    CheckDType(view, dtype);
    CheckShape(view, shape);
  }
}

}  // namespace

RouterStatistics CpuBackend::Route(const RouterConfig& config, std::optional<uint64_t> noise_key,
                                   TensorView logits, TensorView selection_bias, TensorView targets,
                                   const Routing& routing, std::span<int64_t> counts) {
  CheckMatrix(logits);
  CheckDType(logits, DType::kF32);
  const int64_t tokens = logits.rows();
  const int64_t experts = logits.columns();
  CheckRouting(config, routing, targets, tokens, experts);
  if (!selection_bias.empty()) {
    CheckShape(selection_bias, {experts});
    CheckDType(selection_bias, DType::kF32);
  }
  TERRACE_CHECK(std::ssize(counts) == experts, "{}: {} counts of {} experts", logits.name,
                counts.size(), experts);
  const int64_t blocks = (tokens + kBlockTokens - 1) / kBlockTokens;
  const Arena::Frame frame(arena());
  const TensorView rows =
      arena().Allocate(Memory::kScratch, DType::kI64, {2, blocks, experts}, "Route.block_rows");
  double* const doubles = AllocateDoubles(arena(), blocks * (experts + 2), "Route.block_sums");
  std::fill(counts.begin(), counts.end(), 0);
  if (dry()) return {};

  BlockSums sums;
  sums.assigned = rows.as<int64_t>();
  sums.counted = sums.assigned + blocks * experts;
  sums.probabilities = doubles;
  sums.entropy = sums.probabilities + blocks * experts;
  sums.squares = sums.entropy + blocks;
  ParallelFor(tokens, kBlockTokens, [&](int64_t begin, int64_t end) {
    RouteBlock(config, noise_key, logits, selection_bias, targets, routing, sums, begin, end);
  });
  PlaceBlocks(blocks, experts, sums.assigned, routing.offsets.as<int64_t>());
  ParallelFor(tokens, kBlockTokens, [&](int64_t begin, int64_t end) {
    PermuteBlock(routing, sums.assigned + begin / kBlockTokens * experts, begin, end);
  });

  RouterStatistics statistics;
  statistics.tokens = CountedTokens(targets);
  const double counted_tokens = static_cast<double>(std::max<int64_t>(statistics.tokens, 1));
  double balance = 0;
  for (int64_t e = 0; e < experts; ++e) {
    double probability_sum = 0;
    for (int64_t block = 0; block < blocks; ++block) {
      counts[e] += sums.counted[block * experts + e];
      probability_sum += sums.probabilities[block * experts + e];
    }
    const double fraction =
        static_cast<double>(counts[e]) / (counted_tokens * static_cast<double>(config.top_k));
    routing.fractions.as<float>()[e] = static_cast<float>(fraction);
    balance += probability_sum / counted_tokens * fraction;
  }
  for (int64_t block = 0; block < blocks; ++block) {
    statistics.entropy += sums.entropy[block] / counted_tokens;
    statistics.z_loss += config.z_coefficient * sums.squares[block] / counted_tokens;
  }
  statistics.aux_loss = config.aux_coefficient * static_cast<double>(experts) * balance;
  return statistics;
}

void CpuBackend::RouteBackward(const RouterConfig& config, const Routing& routing,
                               TensorView targets, TensorView drow_weights, float loss_scale,
                               TensorView dlogits) {
  CheckMatrix(dlogits);
  CheckDType(dlogits, DType::kF32);
  const int64_t tokens = dlogits.rows();
  const int64_t experts = dlogits.columns();
  CheckRouting(config, routing, targets, tokens, experts);
  CheckShape(drow_weights, routing.row_weights.shape);
  CheckDType(drow_weights, DType::kF32);
  const Arena::Frame frame(arena());
  const TensorView dbalance =
      arena().Allocate(Memory::kScratch, DType::kF32, {experts}, "RouteBackward.dbalance");
  if (dry()) return;

  // Of one counted token: gradients of the two load-balancing losses, which are means over them.
  const double scale =
      loss_scale / static_cast<double>(std::max<int64_t>(CountedTokens(targets), 1));
  for (int64_t e = 0; e < experts; ++e) {
    dbalance.as<float>()[e] =
        static_cast<float>(scale * config.aux_coefficient * static_cast<double>(experts) *
                           routing.fractions.as<float>()[e]);
  }
  const float dz_scale = static_cast<float>(scale * 2.0 * config.z_coefficient);
  ParallelFor(tokens, kBlockTokens, [&](int64_t begin, int64_t end) {
    if (config.score == RouterScore::kSoftmax) {
      HWY_DYNAMIC_DISPATCH(SoftmaxBackwardRows)
      (config, routing, targets, drow_weights, dbalance, dz_scale, dlogits, begin, end);
    } else {
      HWY_DYNAMIC_DISPATCH(ScoresBackwardRows)
      (config, routing, targets, drow_weights, dbalance, dlogits, begin, end);
    }
  });
}

}  // namespace terrace
#endif  // HWY_ONCE
