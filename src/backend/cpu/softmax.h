// Row kernels of attention and of the loss: softmax and its gradient, in place on float32 scores.
// Where the next product wants bfloat16, a row's result replaces the first half of its own
// float32 row (so the stride in elements doubles): no second buffer.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace terrace {

// Rows of scores of one key/value head: `heads` stacks of `queries` rows. Row r belongs to query
// r % queries, which sees the first `first_visible + r % queries` of `width` keys.
struct ScoreBlock {
  int64_t heads, queries;
  int64_t width;          // keys; columns beyond a row's visible ones become 0
  int64_t stride;         // floats from row to row
  int64_t first_visible;  // of query 0
  float scale;            // multiplies scores before the softmax
  DType output;           // of the results in place
};

// scores -> probabilities in place; log_sums[row] = log of the sum of exp(scale * score).
void SoftmaxScores(const ScoreBlock& block, float* scores, float* log_sums);

// Recomputes probabilities from scores and log_sums, in place, and turns their gradient into that
// of the unscaled scores: dscore = p * (dp - delta) * scale, in place of dp.
// delta[row] = sum over channels of dout * out.
void SoftmaxScoresBackward(const ScoreBlock& block, float* scores, float* gradients,
                           const float* log_sums, const float* deltas);

// delta of one row: the dot product of two vectors of `dtype` elements.
float Dot(DType dtype, const void* a, const void* b, int64_t count);

// One row of logits[width], which is overwritten: returns the cross-entropy with `target`.
// `gradient`, unless null, receives scale * (softmax - onehot(target)) as `dtype`; it may be
// `logits` itself when that is float32.
float CrossEntropyRow(float* logits, int64_t width, int64_t target, float scale, void* gradient,
                      DType dtype);

}  // namespace terrace
