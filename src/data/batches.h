// Batches of a dataset, by number: any batch can be read at any time, in any order, so resuming
// needs no more than the number of the step.
//
// A sequence of T inputs and its T targets, each the next token, is a window of T + 1 tokens;
// windows start every T tokens, so that each token but the first is a target once.
#pragma once

#include <cstdint>
#include <span>

#include "core/ignored_target.h"
#include "data/dataset.h"

namespace terrace {

// A pseudo-random bijection of [0, size), one a key, without memory: a Feistel network over
// the next even power of two, walked until it lands within (Black and Rogaway, CT-RSA 2002).
uint64_t Permute(uint64_t key, uint64_t size, uint64_t index);

// Training batches. Each epoch visits every window once, in an order and from a first token (below
// the remainder of the division into windows) that depend on the seed and the epoch. Batches run
// on across epochs.
class TrainBatches {
 public:
  // B sequences of T tokens. Throws Error when the dataset is shorter than T + 1 tokens. The
  // dataset must outlive this.
  TrainBatches(const Dataset& dataset, int64_t B, int64_t T, uint64_t seed);

  int64_t windows() const { return windows_; }  // an epoch's

  // Batch `index`, from 0: inputs and targets [B, T], row-major. Throws Error as Dataset::Read.
  void Read(int64_t index, std::span<int32_t> inputs, std::span<int32_t> targets) const;

 private:
  const Dataset& dataset_;
  int64_t sequences_;
  int64_t length_;
  uint64_t seed_;
  int64_t windows_;
};

// Batches that go through a dataset once, in order. Where the windows, or the tokens of the last
// window, run out, inputs are 0 and targets kIgnoredTarget.
class EvaluationBatches {
 public:
  // The first `max_windows` windows, or all there are. Throws Error when the dataset has fewer
  // than two tokens. The dataset must outlive this.
  EvaluationBatches(const Dataset& dataset, int64_t B, int64_t T, int64_t max_windows = INT64_MAX);

  int64_t batches() const;
  int64_t windows() const { return windows_; }
  // Targets that are not kIgnoredTarget, over all batches.
  int64_t targets() const;

  // As TrainBatches::Read, for index in [0, batches()).
  void Read(int64_t index, std::span<int32_t> inputs, std::span<int32_t> targets) const;

 private:
  const Dataset& dataset_;
  int64_t sequences_;
  int64_t length_;
  int64_t windows_;
};

}  // namespace terrace
