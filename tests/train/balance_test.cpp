#include "train/balance.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace terrace {
namespace {

using ::testing::HasSubstr;

TEST(LoadTest, EvenSkewedAndEmpty) {
  const Load even = LoadOf(std::vector<int64_t>{5, 5, 5, 5});
  EXPECT_DOUBLE_EQ(even.max_share, 0.25);
  EXPECT_NEAR(even.effective_experts, 4, 1e-12);
  const Load skewed = LoadOf(std::vector<int64_t>{0, 30, 10, 0});
  EXPECT_EQ(skewed.busiest, 1);
  EXPECT_DOUBLE_EQ(skewed.max_share, 0.75);
  EXPECT_NEAR(skewed.effective_experts, 1.7548, 1e-4);
  const Load empty = LoadOf(std::vector<int64_t>{0, 0});
  EXPECT_EQ(empty.max_share, 0);
  EXPECT_EQ(empty.effective_experts, 0);
}

LayerRouting Routing(int64_t layer, std::vector<int64_t> counts) {
  return {layer, {}, std::move(counts)};
}

TEST(CollapseWatchTest, WarnsAfterPatienceAndAgainLater) {
  CollapseWatch watch(1);
  const LayerRouting collapsed = Routing(3, {0, 97, 3, 0, 0, 0, 0, 0});
  for (int64_t step = 1; step <= 250; ++step) {
    const auto warning = watch.Step(collapsed);
    EXPECT_EQ(warning.has_value(), step == 10 || step == 110 || step == 210) << step;
    if (warning) {
      EXPECT_THAT(*warning, HasSubstr("layers.3 is collapsing: expert 1 gets 97 % of the"));
      EXPECT_EQ(warning->find('\n'), std::string::npos);
    }
  }
}

TEST(CollapseWatchTest, OneGoodStepStartsThePatienceAgain) {
  CollapseWatch watch(1);
  for (int64_t step = 1; step <= 60; ++step) {
    const bool good = step % 10 == 0;
    EXPECT_FALSE(watch.Step(
        Routing(0, good ? std::vector<int64_t>{5, 5, 5, 5} : std::vector<int64_t>{20, 0, 0, 0})));
  }
}

TEST(CollapseWatchTest, LayersAreWatchedApart) {
  CollapseWatch watch(2);
  for (int64_t step = 1; step <= 10; ++step) {
    EXPECT_FALSE(watch.Step(Routing(1, {9, 9, 9, 9, 9, 9})));
    EXPECT_EQ(watch.Step(Routing(3, {27, 27, 0, 0, 0, 0})).has_value(), step == 10);
  }
}

TEST(CollapseWatchTest, AllExpertsForEveryTokenIsNoCollapse) {
  CollapseWatch watch(3);
  for (int64_t step = 1; step <= 20; ++step) EXPECT_FALSE(watch.Step(Routing(0, {7, 7, 7})));
}

}  // namespace
}  // namespace terrace
