// A backend that passes every operation on to another and adds up the time each kind takes.
#pragma once

#include <chrono>
#include <map>
#include <string>

#include "backend/backend.h"

namespace terrace {

class ProfilingBackend final : public Backend {
 public:
  explicit ProfilingBackend(Backend& inner) : Backend(inner.arena()), inner_(inner) {}
  std::string_view name() const override { return inner_.name(); }

  // Seconds by operation since the last Reset.
  const std::map<std::string, double>& seconds() const { return seconds_; }
  void Reset() { seconds_.clear(); }

  void Linear(TensorView x, TensorView w, TensorView y, bool add) override {
    Timed("linear", [&] { inner_.Linear(x, w, y, add); });
  }
  void LinearBackwardInput(TensorView dy, TensorView w, TensorView dx, bool add) override {
    Timed("linear backward input", [&] { inner_.LinearBackwardInput(dy, w, dx, add); });
  }
  void LinearBackwardWeight(TensorView dy, TensorView x, TensorView dw, Adding add) override {
    Timed("linear backward weight", [&] { inner_.LinearBackwardWeight(dy, x, dw, add); });
  }
  void GroupedLinear(TensorView x, TensorView offsets, std::span<const TensorView> w, TensorView y,
                     bool add) override {
    Timed("grouped linear", [&] { inner_.GroupedLinear(x, offsets, w, y, add); });
  }
  void GroupedLinearBackwardInput(TensorView dy, TensorView offsets, std::span<const TensorView> w,
                                  TensorView dx, bool add) override {
    Timed("grouped linear backward input",
          [&] { inner_.GroupedLinearBackwardInput(dy, offsets, w, dx, add); });
  }
  void BlockLinear(int64_t blocks, TensorView x, TensorView w, TensorView y) override {
    Timed("block linear", [&] { inner_.BlockLinear(blocks, x, w, y); });
  }
  void BlockLinearBackwardInput(int64_t blocks, TensorView dy, TensorView w,
                                TensorView dx) override {
    Timed("block linear backward input",
          [&] { inner_.BlockLinearBackwardInput(blocks, dy, w, dx); });
  }
  void BlockLinearBackwardWeight(int64_t blocks, TensorView dy, TensorView x, TensorView dw,
                                 Adding add) override {
    Timed("block linear backward weight",
          [&] { inner_.BlockLinearBackwardWeight(blocks, dy, x, dw, add); });
  }
  void Norm(NormKind kind, TensorView x, TensorView weight, TensorView bias, float epsilon,
            TensorView y, TensorView statistics) override {
    Timed("norm", [&] { inner_.Norm(kind, x, weight, bias, epsilon, y, statistics); });
  }
  void NormBackward(NormKind kind, TensorView dy, TensorView x, TensorView weight,
                    TensorView statistics, TensorView dx, TensorView dweight, bool add_dweight,
                    TensorView dbias, bool add_dbias) override {
    Timed("norm backward", [&] {
      inner_.NormBackward(kind, dy, x, weight, statistics, dx, dweight, add_dweight, dbias,
                          add_dbias);
    });
  }
  void Rope(TensorView x, int64_t heads, int64_t rotated, int64_t sequence_length,
            int64_t first_position, float theta, bool inverse) override {
    Timed("rope",
          [&] { inner_.Rope(x, heads, rotated, sequence_length, first_position, theta, inverse); });
  }
  void Attention(const AttentionShape& shape, TensorView q, TensorView k, TensorView v,
                 TensorView out, TensorView log_sums) override {
    Timed("attention", [&] { inner_.Attention(shape, q, k, v, out, log_sums); });
  }
  void AttentionBackward(const AttentionShape& shape, TensorView q, TensorView k, TensorView v,
                         TensorView out, TensorView log_sums, TensorView dout, TensorView dq,
                         TensorView dk, TensorView dv) override {
    Timed("attention backward",
          [&] { inner_.AttentionBackward(shape, q, k, v, out, log_sums, dout, dq, dk, dv); });
  }
  void SwiGlu(TensorView gate, TensorView up, TensorView row_scale, TensorView h) override {
    Timed("swiglu", [&] { inner_.SwiGlu(gate, up, row_scale, h); });
  }
  void SwiGluBackward(TensorView dh, TensorView gate, TensorView up, TensorView row_scale,
                      TensorView dgate, TensorView dup, TensorView drow_scale) override {
    Timed("swiglu backward",
          [&] { inner_.SwiGluBackward(dh, gate, up, row_scale, dgate, dup, drow_scale); });
  }
  RouterStatistics Route(const RouterConfig& config, std::optional<uint64_t> noise_key,
                         TensorView logits, TensorView selection_bias, TensorView targets,
                         const Routing& routing, std::span<int64_t> counts) override {
    RouterStatistics statistics;
    Timed("route", [&] {
      statistics =
          inner_.Route(config, noise_key, logits, selection_bias, targets, routing, counts);
    });
    return statistics;
  }
  void RouteBackward(const RouterConfig& config, const Routing& routing, TensorView targets,
                     TensorView drow_weights, float loss_scale, TensorView dlogits) override {
    Timed("route backward", [&] {
      inner_.RouteBackward(config, routing, targets, drow_weights, loss_scale, dlogits);
    });
  }
  void GatherRows(TensorView x, TensorView row_tokens, TensorView y) override {
    Timed("gather rows", [&] { inner_.GatherRows(x, row_tokens, y); });
  }
  void AddGatheredRows(TensorView x, TensorView token_rows, TensorView y) override {
    Timed("add gathered rows", [&] { inner_.AddGatheredRows(x, token_rows, y); });
  }
  void HyperWeights(const HyperConnection& config, TensorView x, float norm_epsilon,
                    TensorView products, TensorView scale, TensorView base, TensorView inverse_rms,
                    TensorView weights) override {
    Timed("hyper-connections", [&] {
      inner_.HyperWeights(config, x, norm_epsilon, products, scale, base, inverse_rms, weights);
    });
  }
  void HyperWeightsBackward(const HyperConnection& config, TensorView x, TensorView products,
                            TensorView scale, TensorView base, TensorView inverse_rms,
                            TensorView dweights, TensorView dproducts, TensorView dx,
                            TensorView dscale, bool add_dscale, TensorView dbase,
                            bool add_dbase) override {
    Timed("hyper-connections", [&] {
      inner_.HyperWeightsBackward(config, x, products, scale, base, inverse_rms, dweights,
                                  dproducts, dx, dscale, add_dscale, dbase, add_dbase);
    });
  }
  void HyperRead(const HyperConnection& config, TensorView x, TensorView weights,
                 TensorView z) override {
    Timed("hyper-connections", [&] { inner_.HyperRead(config, x, weights, z); });
  }
  void HyperReadBackward(const HyperConnection& config, TensorView dz, TensorView x,
                         TensorView weights, TensorView dx, TensorView dweights) override {
    Timed("hyper-connections",
          [&] { inner_.HyperReadBackward(config, dz, x, weights, dx, dweights); });
  }
  void HyperWrite(const HyperConnection& config, TensorView x, TensorView y, TensorView weights,
                  TensorView out) override {
    Timed("hyper-connections", [&] { inner_.HyperWrite(config, x, y, weights, out); });
  }
  void HyperWriteBackward(const HyperConnection& config, TensorView x, TensorView y,
                          TensorView weights, TensorView dx, TensorView dy,
                          TensorView dweights) override {
    Timed("hyper-connections",
          [&] { inner_.HyperWriteBackward(config, x, y, weights, dx, dy, dweights); });
  }
  void HyperSpread(const HyperConnection& config, TensorView y, TensorView x) override {
    Timed("hyper-connections", [&] { inner_.HyperSpread(config, y, x); });
  }
  void HyperSpreadBackward(const HyperConnection& config, TensorView dx, TensorView dy) override {
    Timed("hyper-connections", [&] { inner_.HyperSpreadBackward(config, dx, dy); });
  }
  void Embedding(TensorView ids, TensorView tokens_table, TensorView positions_table,
                 int64_t sequence_length, int64_t first_position, TensorView y) override {
    Timed("embedding", [&] {
      inner_.Embedding(ids, tokens_table, positions_table, sequence_length, first_position, y);
    });
  }
  void EmbeddingBackward(TensorView dy, TensorView ids, TensorView dtable, Adding add) override {
    Timed("embedding backward", [&] { inner_.EmbeddingBackward(dy, ids, dtable, add); });
  }
  void PositionsBackward(TensorView dy, int64_t sequence_length, TensorView dtable,
                         Adding add) override {
    Timed("embedding backward",
          [&] { inner_.PositionsBackward(dy, sequence_length, dtable, add); });
  }
  double HeadLoss(TensorView x, TensorView w, TensorView targets, float loss_scale, TensorView dx,
                  TensorView dw, Adding add_dw) override {
    double loss = 0;
    Timed("head and loss",
          [&] { loss = inner_.HeadLoss(x, w, targets, loss_scale, dx, dw, add_dw); });
    return loss;
  }
  void Zero(TensorView x) override {
    Timed("elementwise", [&] { inner_.Zero(x); });
  }
  void Copy(TensorView x, TensorView y) override {
    Timed("elementwise", [&] { inner_.Copy(x, y); });
  }
  double SumOfSquares(TensorView x) override {
    double sum = 0;
    Timed("sum of squares", [&] { sum = inner_.SumOfSquares(x); });
    return sum;
  }

 private:
  template <typename Operation>
  void Timed(const char* kind, const Operation& operation) {
    const auto start = std::chrono::steady_clock::now();
    operation();
    seconds_[kind] +=
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

  Backend& inner_;
  std::map<std::string, double> seconds_;
};

}  // namespace terrace
