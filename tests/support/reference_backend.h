// The plainest correct implementation of every backend operation: the oracle of the tests.
//
// One loop per formula, sums in double, one thread, any dtypes that the contract allows, no
// scratch from the arena. Where backend.h leaves a choice open, what this one does is the rule:
//
// Routing of logits that are not finite. Selection orders the (noisy) logits as they are, NaN
// below everything, ties to the lower expert, so that the K experts are always distinct. All
// other formulas see the logits limited to +-kLogitLimit, NaN as -kLogitLimit: probabilities,
// combine weights and gradients are finite and each token's probabilities sum to one.
// Without counted tokens every statistic is 0, and so are the fractions.
#pragma once

#include <span>
#include <string_view>

#include "backend/backend.h"

namespace terrace {

class ReferenceBackend final : public Backend {
 public:
  static constexpr double kLogitLimit = 1e30;

  using Backend::Backend;
  std::string_view name() const override { return "reference"; }

  void Linear(TensorView x, TensorView w, TensorView y, bool add) override;
  void LinearBackwardInput(TensorView dy, TensorView w, TensorView dx, bool add) override;
  void LinearBackwardWeight(TensorView dy, TensorView x, TensorView dw, Adding add) override;
  void GroupedLinear(TensorView x, TensorView offsets, std::span<const TensorView> w, TensorView y,
                     bool add) override;
  void GroupedLinearBackwardInput(TensorView dy, TensorView offsets, std::span<const TensorView> w,
                                  TensorView dx, bool add) override;
  void BlockLinear(int64_t blocks, TensorView x, TensorView w, TensorView y) override;
  void BlockLinearBackwardInput(int64_t blocks, TensorView dy, TensorView w,
                                TensorView dx) override;
  void BlockLinearBackwardWeight(int64_t blocks, TensorView dy, TensorView x, TensorView dw,
                                 Adding add) override;

  void Norm(NormKind kind, TensorView x, TensorView weight, TensorView bias, float epsilon,
            TensorView y, TensorView statistics) override;
  void NormBackward(NormKind kind, TensorView dy, TensorView x, TensorView weight,
                    TensorView statistics, TensorView dx, TensorView dweight, bool add_dweight,
                    TensorView dbias, bool add_dbias) override;

  void Rope(TensorView x, int64_t heads, int64_t rotated, int64_t sequence_length,
            int64_t first_position, float theta, bool inverse) override;
  void Attention(const AttentionShape& shape, TensorView q, TensorView k, TensorView v,
                 TensorView out, TensorView log_sums) override;
  void AttentionBackward(const AttentionShape& shape, TensorView q, TensorView k, TensorView v,
                         TensorView out, TensorView log_sums, TensorView dout, TensorView dq,
                         TensorView dk, TensorView dv) override;

  void SwiGlu(TensorView gate, TensorView up, TensorView row_scale, TensorView h) override;
  void SwiGluBackward(TensorView dh, TensorView gate, TensorView up, TensorView row_scale,
                      TensorView dgate, TensorView dup, TensorView drow_scale) override;

  RouterStatistics Route(const RouterConfig& config, std::optional<uint64_t> noise_key,
                         TensorView logits, TensorView selection_bias, TensorView targets,
                         const Routing& routing, std::span<int64_t> counts) override;
  void RouteBackward(const RouterConfig& config, const Routing& routing, TensorView targets,
                     TensorView drow_weights, float loss_scale, TensorView dlogits) override;
  void GatherRows(TensorView x, TensorView row_tokens, TensorView y) override;
  void AddGatheredRows(TensorView x, TensorView token_rows, TensorView y) override;

  void HyperWeights(const HyperConnection& config, TensorView x, float norm_epsilon,
                    TensorView products, TensorView scale, TensorView base, TensorView inverse_rms,
                    TensorView weights) override;
  void HyperWeightsBackward(const HyperConnection& config, TensorView x, TensorView products,
                            TensorView scale, TensorView base, TensorView inverse_rms,
                            TensorView dweights, TensorView dproducts, TensorView dx,
                            TensorView dscale, bool add_dscale, TensorView dbase,
                            bool add_dbase) override;
  void HyperRead(const HyperConnection& config, TensorView x, TensorView weights,
                 TensorView z) override;
  void HyperReadBackward(const HyperConnection& config, TensorView dz, TensorView x,
                         TensorView weights, TensorView dx, TensorView dweights) override;
  void HyperWrite(const HyperConnection& config, TensorView x, TensorView y, TensorView weights,
                  TensorView out) override;
  void HyperWriteBackward(const HyperConnection& config, TensorView x, TensorView y,
                          TensorView weights, TensorView dx, TensorView dy,
                          TensorView dweights) override;
  void HyperSpread(const HyperConnection& config, TensorView y, TensorView x) override;
  void HyperSpreadBackward(const HyperConnection& config, TensorView dx, TensorView dy) override;

  void Embedding(TensorView ids, TensorView tokens_table, TensorView positions_table,
                 int64_t sequence_length, int64_t first_position, TensorView y) override;
  void EmbeddingBackward(TensorView dy, TensorView ids, TensorView dtable, Adding add) override;
  void PositionsBackward(TensorView dy, int64_t sequence_length, TensorView dtable,
                         Adding add) override;
  double HeadLoss(TensorView x, TensorView w, TensorView targets, float loss_scale, TensorView dx,
                  TensorView dw, Adding add_dw) override;

  void Zero(TensorView x) override;
  void Copy(TensorView x, TensorView y) override;
  double SumOfSquares(TensorView x) override;
};

// Element `index` of a float tensor, upcast.
double ElementAt(const TensorView& tensor, int64_t index);
// Rounds to the tensor's dtype (to nearest).
void SetElement(const TensorView& tensor, int64_t index, double value);

}  // namespace terrace
