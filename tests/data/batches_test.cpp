#include "data/batches.h"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <numeric>
#include <set>
#include <vector>

#include "core/error.h"
#include "support/temporary_folder.h"

namespace terrace {
namespace {

// Tokens 0, 1, 2, ...: an id says where it stands.
class CountedTokens {
 public:
  explicit CountedTokens(int64_t size) {
    std::vector<int32_t> tokens(static_cast<size_t>(size));
    std::iota(tokens.begin(), tokens.end(), 0);
    ShardWriter writer(folder_ / "train-00000.bin", size);
    writer.Write(tokens);
    writer.Close();
    dataset_ = std::make_unique<Dataset>(folder_.path(), Split::kTrain, size);
  }
  const Dataset& dataset() const { return *dataset_; }

 private:
  TemporaryFolder folder_;
  std::unique_ptr<Dataset> dataset_;
};

struct Batch {
  std::vector<int32_t> inputs;
  std::vector<int32_t> targets;
  bool operator==(const Batch&) const = default;
};

template <typename Batches>
Batch Read(const Batches& batches, int64_t index, int64_t size) {
  // Values that a batch never has, to see that each is written.
  Batch batch{std::vector<int32_t>(static_cast<size_t>(size), -7),
              std::vector<int32_t>(static_cast<size_t>(size), -7)};
  batches.Read(index, batch.inputs, batch.targets);
  return batch;
}

TEST(Permute, IsABijectionForEverySize) {
  for (uint64_t size = 1; size <= 300; ++size) {
    std::set<uint64_t> seen;
    for (uint64_t index = 0; index < size; ++index) {
      const uint64_t place = Permute(size * 77, size, index);
      EXPECT_LT(place, size);
      seen.insert(place);
    }
    EXPECT_EQ(seen.size(), size);
  }
}

TEST(Permute, MovesAlmostEverythingAndFarOn) {
  constexpr uint64_t kSize = 100'003;
  int64_t fixed = 0;
  double distance = 0;
  for (uint64_t index = 0; index < kSize; ++index) {
    const double place = static_cast<double>(Permute(1, kSize, index));
    fixed += place == static_cast<double>(index);
    distance += std::abs(place - static_cast<double>(index));
  }
  EXPECT_LT(fixed, 10);  // 1 is expected of a random permutation
  EXPECT_NEAR(distance / static_cast<double>(kSize) / static_cast<double>(kSize), 1.0 / 3, 0.01);
  EXPECT_NE(Permute(1, kSize, 5), Permute(2, kSize, 5));
}

TEST(Permute, TakesLargeSizes) {
  constexpr uint64_t kSize = (uint64_t{1} << 40) + 7;
  std::set<uint64_t> seen;
  for (uint64_t index = 0; index < 1000; ++index) {
    const uint64_t place = Permute(3, kSize, kSize - 1 - index);
    EXPECT_LT(place, kSize);
    seen.insert(place);
  }
  EXPECT_EQ(seen.size(), 1000u);
}

TEST(TrainBatches, TargetsAreTheNextTokens) {
  const CountedTokens tokens(1000);
  const TrainBatches batches(tokens.dataset(), 4, 16, 1);
  for (int64_t index = 0; index < 50; ++index) {
    const Batch batch = Read(batches, index, 4 * 16);
    for (size_t i = 0; i < batch.inputs.size(); ++i) {
      EXPECT_EQ(batch.targets[i], batch.inputs[i] + 1);
      EXPECT_EQ(batch.inputs[i], batch.inputs[i - i % 16] + static_cast<int32_t>(i % 16));
    }
  }
}

TEST(TrainBatches, EachEpochHasEveryWindowOnce) {
  // 33 windows of 30 tokens, and 9 tokens that vary the first; batches straddle epochs.
  const CountedTokens tokens(1000);
  const TrainBatches batches(tokens.dataset(), 7, 30, 5);
  EXPECT_EQ(batches.windows(), 33);
  std::vector<int32_t> starts;
  for (int64_t index = 0; std::ssize(starts) < 33 * 20; ++index) {
    const Batch batch = Read(batches, index, 7 * 30);
    for (size_t row = 0; row < 7; ++row) starts.push_back(batch.inputs[row * 30]);
  }
  std::set<int32_t> phases;
  std::set<std::vector<int32_t>> orders;
  for (size_t epoch = 0; epoch < 20; ++epoch) {
    const std::vector<int32_t> order(starts.begin() + static_cast<int64_t>(epoch * 33),
                                     starts.begin() + static_cast<int64_t>(epoch * 33 + 33));
    const std::set<int32_t> unique(order.begin(), order.end());
    EXPECT_EQ(unique.size(), 33u);
    for (const int32_t start : order) EXPECT_EQ((start - *unique.begin()) % 30, 0);
    EXPECT_LE(*unique.rbegin() + 30, 999);
    phases.insert(*unique.begin());
    orders.insert(order);
  }
  EXPECT_EQ(orders.size(), 20u);
  EXPECT_GT(phases.size(), 5u);
  EXPECT_LE(*phases.rbegin(), 9);
}

TEST(TrainBatches, DependOnTheSeedAndTheIndexAlone) {
  const CountedTokens tokens(5000);
  const TrainBatches batches(tokens.dataset(), 3, 20, 9);
  const TrainBatches same(tokens.dataset(), 3, 20, 9);
  const TrainBatches other(tokens.dataset(), 3, 20, 10);
  std::vector<Batch> forward;
  for (int64_t index = 0; index < 200; ++index) forward.push_back(Read(batches, index, 60));
  int64_t equal = 0;
  for (int64_t index = 199; index >= 0; --index) {
    EXPECT_EQ(Read(same, index, 60), forward[static_cast<size_t>(index)]);
    equal += Read(other, index, 60) == forward[static_cast<size_t>(index)];
  }
  EXPECT_EQ(equal, 0);
}

TEST(TrainBatches, SplitIntoMicroBatchesWithoutChange) {
  const CountedTokens tokens(3000);
  const TrainBatches large(tokens.dataset(), 8, 20, 9);
  const TrainBatches small(tokens.dataset(), 2, 20, 9);
  for (int64_t index = 0; index < 30; ++index) {
    Batch joined;
    for (int64_t part = 0; part < 4; ++part) {
      const Batch batch = Read(small, 4 * index + part, 40);
      joined.inputs.insert(joined.inputs.end(), batch.inputs.begin(), batch.inputs.end());
      joined.targets.insert(joined.targets.end(), batch.targets.begin(), batch.targets.end());
    }
    EXPECT_EQ(joined, Read(large, index, 160));
  }
}

TEST(TrainBatches, NeedOneSequence) {
  const CountedTokens tokens(21);
  const TrainBatches just_enough(tokens.dataset(), 2, 20, 1);
  const Batch batch = Read(just_enough, 0, 40);
  EXPECT_EQ(batch.inputs[0], 0);
  EXPECT_EQ(batch.inputs[20], 0);
  EXPECT_EQ(batch.targets[19], 20);
  EXPECT_THROW(TrainBatches(tokens.dataset(), 2, 21, 1), Error);
}

TEST(EvaluationBatches, CoverEveryTargetOnceInOrder) {
  for (const int64_t size : {2, 20, 21, 22, 100, 101, 102, 161, 162}) {
    const CountedTokens tokens(size);
    const EvaluationBatches batches(tokens.dataset(), 3, 20);
    std::vector<int32_t> targets;
    for (int64_t index = 0; index < batches.batches(); ++index) {
      const Batch batch = Read(batches, index, 60);
      for (size_t i = 0; i < 60; ++i) {
        if (batch.targets[i] == kIgnoredTarget) {
          EXPECT_EQ(batch.inputs[i], 0);
          continue;
        }
        EXPECT_EQ(batch.inputs[i], batch.targets[i] - 1);
        targets.push_back(batch.targets[i]);
      }
    }
    std::vector<int32_t> expected(static_cast<size_t>(size - 1));
    std::iota(expected.begin(), expected.end(), 1);
    EXPECT_EQ(targets, expected);
    EXPECT_EQ(batches.targets(), size - 1);
  }
}

TEST(EvaluationBatches, StopAfterTheWindowsAskedFor) {
  const CountedTokens tokens(1000);
  const EvaluationBatches batches(tokens.dataset(), 4, 10, 6);
  EXPECT_EQ(batches.batches(), 2);
  EXPECT_EQ(batches.targets(), 60);
  const Batch batch = Read(batches, 1, 40);
  EXPECT_EQ(batch.inputs[10], 50);
  EXPECT_EQ(batch.targets[19], 60);
  EXPECT_EQ(batch.targets[20], kIgnoredTarget);
  EXPECT_EQ(batch.targets[39], kIgnoredTarget);
  EXPECT_THROW(Read(batches, 2, 40), InternalError);
}

TEST(EvaluationBatches, NeedTwoTokens) {
  const CountedTokens tokens(1);
  EXPECT_THROW(EvaluationBatches(tokens.dataset(), 1, 4), Error);
}

}  // namespace
}  // namespace terrace
