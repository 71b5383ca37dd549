#include "data/batches.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "core/counted.h"
#include "core/error.h"
#include "core/rng.h"

namespace terrace {
namespace {

// Purposes of random numbers here.
enum Purpose : uint64_t { kWindowOrder = 0x77696e646f77, kWindowPhase = 0x7068617365 };

constexpr int kFeistelRounds = 6;

// Reads a window of at most T + 1 tokens into a row of T inputs and T targets.
void ReadWindow(const Dataset& dataset, int64_t first, std::vector<int32_t>& window,
                std::span<int32_t> inputs, std::span<int32_t> targets) {
  const size_t length = inputs.size();
  const size_t count = static_cast<size_t>(
      std::clamp<int64_t>(dataset.size() - first, 0, static_cast<int64_t>(length) + 1));
  const size_t pairs = count > 0 ? count - 1 : 0;
  window.resize(length + 1);
  if (pairs > 0) dataset.Read(first, std::span(window).first(count));
  std::copy_n(window.begin(), pairs, inputs.begin());
  std::fill(inputs.begin() + static_cast<int64_t>(pairs), inputs.end(), 0);
  std::copy_n(window.begin() + 1, pairs, targets.begin());
  std::fill(targets.begin() + static_cast<int64_t>(pairs), targets.end(), kIgnoredTarget);
}

void CheckShape(int64_t B, int64_t T, size_t inputs, size_t targets) {
  TERRACE_CHECK(inputs == static_cast<size_t>(B * T) && targets == inputs,
                "a batch of {} x {} read into {} inputs and {} targets", B, T, inputs, targets);
}

}  // namespace

uint64_t Permute(uint64_t key, uint64_t size, uint64_t index) {
  const int half_bits = std::max(1, (static_cast<int>(std::bit_width(size - 1)) + 1) / 2);
  const uint64_t mask = (uint64_t{1} << half_bits) - 1;
  do {
    uint64_t left = index >> half_bits;
    uint64_t right = index & mask;
    for (uint64_t round = 0; round < kFeistelRounds; ++round) {
      const uint64_t mixed = left ^ (MixKeys(key, round, right) & mask);
      left = right;
      right = mixed;
    }
    index = left << half_bits | right;
  } while (index >= size);
  return index;
}

TrainBatches::TrainBatches(const Dataset& dataset, int64_t B, int64_t T, uint64_t seed)
    : dataset_(dataset),
      sequences_(B),
      length_(T),
      seed_(seed),
      windows_((dataset.size() - 1) / T) {
  TERRACE_CHECK(B > 0 && T > 0, "{} sequences of {} tokens", B, T);
  if (windows_ == 0) {
    Fail("{} has {} to train on, fewer than the {} of one sequence and its targets",
         dataset.path().string(), Counted(dataset.size(), "token"), T + 1);
  }
}

void TrainBatches::Read(int64_t index, std::span<int32_t> inputs,
                        std::span<int32_t> targets) const {
  CheckShape(sequences_, length_, inputs.size(), targets.size());
  const uint64_t spare = static_cast<uint64_t>(dataset_.size() - 1 - windows_ * length_);
  std::vector<int32_t> window;
  for (int64_t row = 0; row < sequences_; ++row) {
    const int64_t sequence = index * sequences_ + row;
    const uint64_t epoch = static_cast<uint64_t>(sequence / windows_);
    const uint64_t place =
        Permute(MixKeys(seed_, kWindowOrder, epoch), static_cast<uint64_t>(windows_),
                static_cast<uint64_t>(sequence % windows_));
    const uint64_t phase = RandomBits(MixKeys(seed_, kWindowPhase), epoch) % (spare + 1);
    const int64_t first = static_cast<int64_t>(place) * length_ + static_cast<int64_t>(phase);
    const size_t offset = static_cast<size_t>(row * length_);
    const size_t length = static_cast<size_t>(length_);
    ReadWindow(dataset_, first, window, inputs.subspan(offset, length),
               targets.subspan(offset, length));
  }
}

EvaluationBatches::EvaluationBatches(const Dataset& dataset, int64_t B, int64_t T,
                                     int64_t max_windows)
    : dataset_(dataset),
      sequences_(B),
      length_(T),
      windows_(std::min(max_windows, (dataset.size() - 1 + T - 1) / T)) {
  TERRACE_CHECK(B > 0 && T > 0 && max_windows > 0, "{} windows, {} sequences of {} tokens",
                max_windows, B, T);
  if (dataset.size() < 2) Fail("{} has a single token", dataset.path().string());
}

int64_t EvaluationBatches::batches() const { return (windows_ + sequences_ - 1) / sequences_; }

int64_t EvaluationBatches::targets() const {
  return std::min(windows_ * length_, dataset_.size() - 1);
}

void EvaluationBatches::Read(int64_t index, std::span<int32_t> inputs,
                             std::span<int32_t> targets) const {
  CheckShape(sequences_, length_, inputs.size(), targets.size());
  TERRACE_CHECK(index >= 0 && index < batches(), "batch {} of {}", index, batches());
  std::vector<int32_t> window;
  for (int64_t row = 0; row < sequences_; ++row) {
    const int64_t place = index * sequences_ + row;
    // Past the last window there is nothing to read.
    const int64_t first = place < windows_ ? place * length_ : dataset_.size();
    const size_t offset = static_cast<size_t>(row * length_);
    const size_t length = static_cast<size_t>(length_);
    ReadWindow(dataset_, first, window, inputs.subspan(offset, length),
               targets.subspan(offset, length));
  }
}

}  // namespace terrace
