// The CPU: oneDNN for matrix products, Highway for the rest, threads by core/parallel.h.
// Each group of operations has a file of its own in this folder.
#pragma once

#include <memory>
#include <string_view>

#include "backend/backend.h"

namespace terrace {

class Matmul;

class CpuBackend final : public Backend {
 public:
  // On a dry arena: takes the same scratch and computes nothing. Otherwise the calling thread, and
  // others in its loops, take subnormal numbers as zero from here on (x86).
  explicit CpuBackend(Arena& arena);
  // With matrix products other than this processor's best: tests cover all of them everywhere.
  CpuBackend(Arena& arena, std::unique_ptr<Matmul> matmul);
  ~CpuBackend() override;

  std::string_view name() const override { return dry() ? "cpu (dry)" : "cpu"; }

  // linear.cpp
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

  // norm.cpp
  void Norm(NormKind kind, TensorView x, TensorView weight, TensorView bias, float epsilon,
            TensorView y, TensorView statistics) override;
  void NormBackward(NormKind kind, TensorView dy, TensorView x, TensorView weight,
                    TensorView statistics, TensorView dx, TensorView dweight, bool add_dweight,
                    TensorView dbias, bool add_dbias) override;

  // rope.cpp
  void Rope(TensorView x, int64_t heads, int64_t rotated, int64_t sequence_length,
            int64_t first_position, float theta, bool inverse) override;

  // attention.cpp
  void Attention(const AttentionShape& shape, TensorView q, TensorView k, TensorView v,
                 TensorView out, TensorView log_sums) override;
  void AttentionBackward(const AttentionShape& shape, TensorView q, TensorView k, TensorView v,
                         TensorView out, TensorView log_sums, TensorView dout, TensorView dq,
                         TensorView dk, TensorView dv) override;

  // swiglu.cpp
  void SwiGlu(TensorView gate, TensorView up, TensorView row_scale, TensorView h) override;
  void SwiGluBackward(TensorView dh, TensorView gate, TensorView up, TensorView row_scale,
                      TensorView dgate, TensorView dup, TensorView drow_scale) override;

  // route.cpp
  RouterStatistics Route(const RouterConfig& config, std::optional<uint64_t> noise_key,
                         TensorView logits, TensorView selection_bias, TensorView targets,
                         const Routing& routing, std::span<int64_t> counts) override;
  void RouteBackward(const RouterConfig& config, const Routing& routing, TensorView targets,
                     TensorView drow_weights, float loss_scale, TensorView dlogits) override;

  // hyper_connection.cpp
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

  // rows.cpp
  void GatherRows(TensorView x, TensorView row_tokens, TensorView y) override;
  void AddGatheredRows(TensorView x, TensorView token_rows, TensorView y) override;
  void Embedding(TensorView ids, TensorView tokens_table, TensorView positions_table,
                 int64_t sequence_length, int64_t first_position, TensorView y) override;
  void EmbeddingBackward(TensorView dy, TensorView ids, TensorView dtable, Adding add) override;
  void PositionsBackward(TensorView dy, int64_t sequence_length, TensorView dtable,
                         Adding add) override;

  // head_loss.cpp
  double HeadLoss(TensorView x, TensorView w, TensorView targets, float loss_scale, TensorView dx,
                  TensorView dw, Adding add_dw) override;

  // elementwise.cpp
  void Zero(TensorView x) override;
  void Copy(TensorView x, TensorView y) override;
  double SumOfSquares(TensorView x) override;

 private:
  std::unique_ptr<Matmul> matmul_;
};

// Caps the instruction set that every kernel and product uses, for tests and comparisons: "avx2",
// "avx512" (without bfloat16 products) or "avx512_bf16" (all but AMX). Takes effect only before the
// first operation of the process. Throws Error for other names.
void CapInstructionSet(std::string_view name);

}  // namespace terrace
