// The operations that a model needs, on tensor views. Models never touch tensor memory
// themselves: this seam is what lets one model run on a CPU, on nothing (dry), or on a GPU.
//
// Letters in shapes:
//   N tokens of a micro-batch (B sequences of T)   D model width      H query heads
//   G key/value heads      C head width            F feed-forward width
//   E experts              K experts per token     R = N * K routed rows     V vocabulary
//   I, O input and output width of a product       S residual streams of a hyper-connection
// "any" means float32 or bfloat16. Statistics and sums are float32 (or float64) whatever the
// dtypes; results depend neither on timing nor on the number of threads: they repeat bit for bit.
//
// Operations never allocate results: the caller does. They may take scratch from the arena for
// the length of the call, of a size that depends on shapes only, never on data. In a dry backend
// every operation takes the same scratch and computes nothing.
//
// A wrong shape or dtype is a bug of the caller and throws InternalError.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "core/arena.h"
#include "core/ignored_target.h"
#include "core/rng.h"
#include "core/tensor.h"

namespace terrace {

enum class NormKind : uint8_t { kLayerNorm, kRmsNorm };

struct AttentionShape {
  int64_t batch;         // B
  int64_t query_length;  // Tq per sequence
  int64_t key_length;    // Tk >= Tq; query i sees keys 0 .. i + Tk - Tq
  int64_t heads;         // H
  int64_t kv_heads;      // G, divides H; query head h reads key/value head h / (H / G)
  int64_t head_width;    // C
};

// A router's score of an expert, from its logit.
enum class RouterScore : uint8_t {
  kSoftmax,       // exp(logit) / sum over experts of exp(logit)
  kSigmoid,       // 1 / (1 + exp(-logit))
  kSqrtSoftplus,  // sqrt(log(1 + exp(logit)))
};

struct RouterConfig {
  int64_t top_k = 1;
  RouterScore score = RouterScore::kSoftmax;
  // Combine weights are divided by their sum over the k selected experts.
  bool normalize_weights = true;
  float scaling_factor = 1;   // of the combine weights, after that
  float aux_coefficient = 0;  // of E * sum_e mean_probability_e * assigned_fraction_e
  float z_coefficient = 0;    // of mean(logsumexp(logits)^2)
  float noise_scale = 0;      // logits += noise_scale * N(0, 1) in training
};

// What routing one micro-batch through one layer yields: all of it lives from forward to
// backward. `rows` are the R permuted rows, grouped by expert, in token order within an expert.
struct Routing {
  TensorView probabilities;  // f32 [N, E] scores of the (noisy) logits, over their sum
  TensorView log_sums;    // f32 [N] logsumexp of the logits; log of the scores' sum, if not softmax
  TensorView experts;     // i32 [N, K] selected experts, best first; always K distinct ones
  TensorView weights;     // f32 [N, K] combine weights
  TensorView token_rows;  // i64 [N, K] the permuted row of (token, choice)
  TensorView row_tokens;  // i64 [R] the token of a permuted row
  TensorView row_weights;  // f32 [R] the combine weight of a permuted row
  TensorView offsets;      // i64 [E + 1] expert e has rows offsets[e] .. offsets[e + 1]
  TensorView fractions;    // f32 [E] share of the counted assignments
};

// Hyper-connections (arXiv 2409.19606, 2512.24880): the residual stream of a token is S streams of
// width D. A sub-layer reads a weighted sum of them; its output is added to each with a weight, and
// the streams are mixed by a matrix that alternating normalization makes doubly stochastic. All
// weights follow from the token's streams.
struct HyperConnection {
  static constexpr int64_t kMaxStreams = 16;
  static constexpr int64_t kMaxIterations = 100;

  int64_t streams = 1;  // S; 1: a plain residual stream
  int64_t sinkhorn_iterations = 2;
  float epsilon = 1e-6f;  // added to read weights and where the mixing matrix is normalized
};

// Sums over the counted tokens (those whose target is not ignored). Plain host numbers; all zero
// in a dry run.
struct RouterStatistics {
  double aux_loss = 0;  // with its coefficient
  double z_loss = 0;    // with its coefficient
  double entropy = 0;   // mean over tokens of the entropy of `probabilities`, in nats
  int64_t tokens = 0;   // counted tokens
};

// How a gradient is left where a sum of gradients stands. A long sum must not be rounded to nearest
// at each addition: it would stand still once what is added is below half its last place. What goes
// to bfloat16 is therefore computed in float32 and rounded stochastically
// (core/stochastic_rounding.h) when it is added or stored, a row of the tensor at a time.
struct Adding {
  Adding(bool add_to_it, uint64_t key = 0)  // NOLINT: whether to add is all that float32 needs
      : add(add_to_it), rounding_key(key) {}
  operator bool() const { return add; }  // NOLINT

  // What is added to the same sum after this.
  Adding Next() const { return {true, MixKeys(rounding_key)}; }

  bool add;               // add to what is there, rather than replace it
  uint64_t rounding_key;  // of (seed, tensor, step, addition); of no effect on float32
};

class Backend {
 public:
  explicit Backend(Arena& arena) : arena_(arena) {}
  virtual ~Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  Arena& arena() { return arena_; }
  bool dry() const { return arena_.dry(); }
  virtual std::string_view name() const = 0;

  // --- Matrix products -------------------------------------------------------------------
  // Inputs bfloat16 or float32, accumulation float32, output any. Where input dtypes differ the
  // bfloat16 one is upcast first. `add` sums onto the output instead of replacing it. Zero rows
  // are allowed.

  // y[N, O] (+)= x[N, I] * w[O, I]^T
  virtual void Linear(TensorView x, TensorView w, TensorView y, bool add) = 0;
  // dx[N, I] (+)= dy[N, O] * w[O, I]
  virtual void LinearBackwardInput(TensorView dy, TensorView w, TensorView dx, bool add) = 0;
  // dw[O, I] (+)= dy[N, O]^T * x[N, I]
  virtual void LinearBackwardWeight(TensorView dy, TensorView x, TensorView dw, Adding add) = 0;

  // One product per expert on its rows; `w` has E weights [O, I] of one dtype, `offsets` is
  // i64 [E + 1]. Rows of experts without tokens are nobody's: nothing is written for them.
  virtual void GroupedLinear(TensorView x, TensorView offsets, std::span<const TensorView> w,
                             TensorView y, bool add) = 0;
  virtual void GroupedLinearBackwardInput(TensorView dy, TensorView offsets,
                                          std::span<const TensorView> w, TensorView dx,
                                          bool add) = 0;

  // G products side by side: with x [N, G * I], w [G * O, I] and y [N, G * O], block g of y is
  // block g of x times rows g * O .. (g + 1) * O of w, as Linear.
  virtual void BlockLinear(int64_t blocks, TensorView x, TensorView w, TensorView y) = 0;
  // dx[N, G * I] from dy[N, G * O]; replaced.
  virtual void BlockLinearBackwardInput(int64_t blocks, TensorView dy, TensorView w,
                                        TensorView dx) = 0;
  // dw[G * O, I] (+)= for each block dy^T * x.
  virtual void BlockLinearBackwardWeight(int64_t blocks, TensorView dy, TensorView x, TensorView dw,
                                         Adding add) = 0;

  // --- Normalization -----------------------------------------------------------------------
  // y[N, D] = normalized x[N, D] * weight[D] + bias[D]; x any, y any, weight and bias f32, each
  // empty for none. `statistics` f32 [N, 2] keeps (mean, 1 / std) for backward (mean is 0
  // for RMSNorm). epsilon is added to the variance (mean square).
  virtual void Norm(NormKind kind, TensorView x, TensorView weight, TensorView bias, float epsilon,
                    TensorView y, TensorView statistics) = 0;
  // dx[N, D] += gradient of x (f32); dweight, dbias f32 [D], replaced or added to as told
  // (each empty for none). dy any.
  virtual void NormBackward(NormKind kind, TensorView dy, TensorView x, TensorView weight,
                            TensorView statistics, TensorView dx, TensorView dweight,
                            bool add_dweight, TensorView dbias, bool add_dbias) = 0;

  // --- Positions and attention -------------------------------------------------------------
  // Rotates the last `rotated` (even, W) elements of every head of x[N, heads * C] in place (any
  // dtype). Row n is at position first_position + n % sequence_length. Halves convention: element i
  // of them pairs with i + W / 2, its angle is position * theta^(-2i / W). `inverse` rotates back:
  // the backward pass.
  virtual void Rope(TensorView x, int64_t heads, int64_t rotated, int64_t sequence_length,
                    int64_t first_position, float theta, bool inverse) = 0;
  // Causal softmax attention, scores scaled by 1/sqrt(C). q[B*Tq, H*C], k and v [B*Tk, G*C],
  // out[B*Tq, H*C], one dtype (any); log_sums f32 [B*H*Tq] for backward. The matrix of scores
  // never exists as a whole.
  virtual void Attention(const AttentionShape& shape, TensorView q, TensorView k, TensorView v,
                         TensorView out, TensorView log_sums) = 0;
  // Replaces dq, dk, dv; same shapes and dtype as q, k, v. Needs query_length == key_length. k and
  // v may be one tensor; then dk and dv are one too, which receives the sum.
  virtual void AttentionBackward(const AttentionShape& shape, TensorView q, TensorView k,
                                 TensorView v, TensorView out, TensorView log_sums, TensorView dout,
                                 TensorView dq, TensorView dk, TensorView dv) = 0;

  // --- Feed-forward -------------------------------------------------------------------------
  // h[N, F] = silu(gate[N, F]) * up[N, F] * row_scale[N]; row_scale f32, empty for 1. gate and up
  // any dtype, the same (in backward their gradients too); h any.
  virtual void SwiGlu(TensorView gate, TensorView up, TensorView row_scale, TensorView h) = 0;
  // Replaces dgate, dup, and drow_scale (f32 [N], empty without row_scale). dgate may share
  // memory with gate and dup with up (then gate and up are gone). dh is replaced by h itself, which
  // the gradient of the next weight needs and which costs nothing more here.
  virtual void SwiGluBackward(TensorView dh, TensorView gate, TensorView up, TensorView row_scale,
                              TensorView dgate, TensorView dup, TensorView drow_scale) = 0;

  // --- Routing --------------------------------------------------------------------------------
  // Fills every view of `routing` from logits f32 [N, E]. `noise_key`, one per (seed, step, layer,
  // micro-batch): noise of config.noise_scale is added in place first; empty: none.
  // targets i32 [N]: tokens with kIgnoredTarget are routed but not counted.
  // counts: i64 [E] host array that receives the counted assignments per expert.
  // Ties go to the lower expert number; NaN counts as lower than everything. The formulas see
  // logits limited to +-1e30 and NaN as -1e30, and scores other than a softmax's see none below
  // -60, so that all that comes out is finite and no score is 0. z_coefficient is of a softmax
  // only. selection_bias f32 [E], empty for none: experts are chosen by score + bias, weighted by
  // score.
  virtual RouterStatistics Route(const RouterConfig& config, std::optional<uint64_t> noise_key,
                                 TensorView logits, TensorView selection_bias, TensorView targets,
                                 const Routing& routing, std::span<int64_t> counts) = 0;
  // dlogits f32 [N, E] (replaced) from drow_weights f32 [R], plus the auxiliary and z loss (both
  // means over counted tokens) times `loss_scale`.
  virtual void RouteBackward(const RouterConfig& config, const Routing& routing, TensorView targets,
                             TensorView drow_weights, float loss_scale, TensorView dlogits) = 0;
  // y[R, D] = x[N, D] at row_tokens[R]; any dtype, the same on both sides.
  virtual void GatherRows(TensorView x, TensorView row_tokens, TensorView y) = 0;
  // y[N, D] += sum over k of x[token_rows[n, k], D]; x any, y f32; in the order of k.
  virtual void AddGatheredRows(TensorView x, TensorView token_rows, TensorView y) = 0;

  // --- Hyper-connections ----------------------------------------------------------------------
  // x f32 [N, S * D] holds the streams of a token one after another. Weights are f32
  // [N, S * (S + 2)]: per token S to read with, S to write with, and the mixing matrix [S, S], row
  // by row. Where nothing is written back (the head) there are the first S only.

  // weights from products[N, M] = x * w^T, with p = products / rms(x), scale [3] and base [M] (M is
  // S * (S + 2), or S with a scale of [1]):
  //   read  = sigmoid(scale0 * p + base) + epsilon
  //   write = 2 * sigmoid(scale1 * p + base)
  //   mix   = softmax over each row of (scale2 * p + base), + epsilon; its columns divided by their
  //           sum + epsilon; then sinkhorn_iterations - 1 times rows, and columns, likewise.
  // rms(x) = sqrt(mean square over S * D + norm_epsilon); inverse_rms f32 [N] keeps 1 / rms.
  virtual void HyperWeights(const HyperConnection& config, TensorView x, float norm_epsilon,
                            TensorView products, TensorView scale, TensorView base,
                            TensorView inverse_rms, TensorView weights) = 0;
  // Replaces dproducts[N, M]; dx += gradient through the rms (not through the products); dscale and
  // dbase are replaced or added to. Takes the gradient dweights of the weights.
  virtual void HyperWeightsBackward(const HyperConnection& config, TensorView x,
                                    TensorView products, TensorView scale, TensorView base,
                                    TensorView inverse_rms, TensorView dweights,
                                    TensorView dproducts, TensorView dx, TensorView dscale,
                                    bool add_dscale, TensorView dbase, bool add_dbase) = 0;
  // z[N, D] f32 = sum over s of read_s * x_s.
  virtual void HyperRead(const HyperConnection& config, TensorView x, TensorView weights,
                         TensorView z) = 0;
  // dx[N, S * D] += read_s * dz; dweights: the part of read is replaced.
  virtual void HyperReadBackward(const HyperConnection& config, TensorView dz, TensorView x,
                                 TensorView weights, TensorView dx, TensorView dweights) = 0;
  // out[N, S * D]: out_s = write_s * y + sum over r of mix[s, r] * x_r; y f32 [N, D].
  virtual void HyperWrite(const HyperConnection& config, TensorView x, TensorView y,
                          TensorView weights, TensorView out) = 0;
  // dx on entry: the gradient of out; on return that of x through the mixing. dy[N, D] is replaced,
  // and of dweights all but the part of read.
  virtual void HyperWriteBackward(const HyperConnection& config, TensorView x, TensorView y,
                                  TensorView weights, TensorView dx, TensorView dy,
                                  TensorView dweights) = 0;
  // x_s = y[N, D] for each stream.
  virtual void HyperSpread(const HyperConnection& config, TensorView y, TensorView x) = 0;
  // dy[N, D] = sum over s of dx_s.
  virtual void HyperSpreadBackward(const HyperConnection& config, TensorView dx, TensorView dy) = 0;

  // --- Embedding, head, loss ---------------------------------------------------------------
  // y[N, D] (f32) = tokens_table[V, D] at ids[N] (i32) + positions_table[P, D] at
  // first_position + n % sequence_length (empty for none); tables any dtype.
  virtual void Embedding(TensorView ids, TensorView tokens_table, TensorView positions_table,
                         int64_t sequence_length, int64_t first_position, TensorView y) = 0;
  // dtable[V, D] (any), replaced or added to; rows of ids that do not occur are zeroed when
  // replacing. dy f32 [N, D].
  virtual void EmbeddingBackward(TensorView dy, TensorView ids, TensorView dtable, Adding add) = 0;
  // The same for learned positions: dtable[P, D].
  virtual void PositionsBackward(TensorView dy, int64_t sequence_length, TensorView dtable,
                                 Adding add) = 0;
  // Sum over tokens of the cross-entropy of softmax(x[N, D] * w[V, D]^T) with targets i32 [N],
  // in nats; ignored targets count nothing. Chunked over tokens: logits [N, V] never exist.
  // With gradients: dx[N, D] (any; replaced) and dw[V, D] (replaced or added to), both of
  // loss_scale * sum. dx and dw empty: loss only. 0 in a dry run.
  virtual double HeadLoss(TensorView x, TensorView w, TensorView targets, float loss_scale,
                          TensorView dx, TensorView dw, Adding add_dw) = 0;

  // --- Elementwise --------------------------------------------------------------------------
  virtual void Zero(TensorView x) = 0;
  // y = x, converted where dtypes differ (round to nearest).
  virtual void Copy(TensorView x, TensorView y) = 0;
  // Sum of squares; the order of summation depends on the size only. 0 in a dry run.
  virtual double SumOfSquares(TensorView x) = 0;

 private:
  Arena& arena_;
};

}  // namespace terrace
