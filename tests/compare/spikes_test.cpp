#include "compare/spikes.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "core/rng.h"

namespace terrace {
namespace {

// A loss that falls from 8 to 4 as losses do, with noise of 0.05 nats, and `more` on top.
int64_t SpikesOf(int64_t steps, const std::function<double(int64_t step)>& more) {
  SpikeCounter counter;
  for (int64_t step = 1; step <= steps; ++step) {
    const double fall = 4 + 4 * std::exp(-static_cast<double>(step) / 60);
    // Nearly normal: a sum of uniform numbers.
    double noise = -2;
    for (int64_t i = 0; i < 4; ++i) {
      noise += static_cast<double>(MixKeys(7, static_cast<uint64_t>(step), i) >> 11) * 0x1p-53;
    }
    counter.Add(fall + 0.05 * std::sqrt(3.0) * noise + more(step));
  }
  return counter.spikes();
}

TEST(SpikeCounterTest, NoiseAroundAFallingLossIsNone) {
  EXPECT_EQ(SpikesOf(20'000, [](int64_t) { return 0.0; }), 0);
}

TEST(SpikeCounterTest, ASpikeCountsOnceHoweverLong) {
  for (const int64_t first : {30, 300, 900}) {
    for (const int64_t steps : {1, 5, 40}) {
      const auto spike = [&](int64_t step) {
        return step >= first && step < first + steps ? 1.5 : 0.0;
      };
      EXPECT_EQ(SpikesOf(1000, spike), 1) << first << " " << steps;
    }
  }
}

TEST(SpikeCounterTest, SpikesThatAreCloseAreOne) {
  const auto two = [](int64_t apart) {
    return SpikesOf(1000, [=](int64_t step) { return step == 500 || step == 500 + apart ? 1 : 0; });
  };
  EXPECT_EQ(two(SpikeCounter::kApart - 1), 1);
  EXPECT_EQ(two(SpikeCounter::kApart), 2);
}

TEST(SpikeCounterTest, AFallOrANewLevelIsNone) {
  EXPECT_EQ(SpikesOf(1000, [](int64_t step) { return step == 500 ? -2.0 : 0.0; }), 0);
  // A loss that jumps and stays: the jump is one, and what follows is where it is now.
  EXPECT_EQ(SpikesOf(2000, [](int64_t step) { return step >= 500 ? 2.0 : 0.0; }), 1);
}

TEST(SpikeCounterTest, SmallStepsAboveAStillLossAreNone) {
  SpikeCounter counter;
  for (int64_t step = 1; step <= 100; ++step) counter.Add(step % 30 == 0 ? 8.09 : 8.0);
  EXPECT_EQ(counter.spikes(), 0);
  counter.Add(8.2);
  EXPECT_EQ(counter.spikes(), 1);
}

TEST(SpikeCounterTest, LossesThatAreNotFiniteAreLeftOut) {
  SpikeCounter counter;
  for (int64_t step = 1; step <= 200; ++step) {
    counter.Add(step % 3 == 0   ? std::numeric_limits<double>::quiet_NaN()
                : step % 3 == 1 ? std::numeric_limits<double>::infinity()
                                : 4.0);
  }
  EXPECT_EQ(counter.spikes(), 0);
}

}  // namespace
}  // namespace terrace
