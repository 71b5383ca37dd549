#include "optim/schedule.h"

#include <gtest/gtest.h>

#include "core/error.h"

namespace terrace {
namespace {

TEST(ScheduleTest, WarmsUpFromTheFirstStep) {
  for (ScheduleKind kind : {ScheduleKind::kConstant, ScheduleKind::kLinear, ScheduleKind::kCosine,
                            ScheduleKind::kWsd}) {
    const Schedule schedule{
        .kind = kind, .peak = 0.4, .steps = 20, .warmup_steps = 4, .decay_steps = 8};
    schedule.Check();
    EXPECT_DOUBLE_EQ(schedule.LearningRate(1), 0.1) << NameOf(kind);
    EXPECT_DOUBLE_EQ(schedule.LearningRate(3), 0.3) << NameOf(kind);
    EXPECT_DOUBLE_EQ(schedule.LearningRate(4), 0.4) << NameOf(kind);
  }
}

TEST(ScheduleTest, ReachesTheMinimumRatioJustAfterTheLastStep) {
  for (ScheduleKind kind : {ScheduleKind::kLinear, ScheduleKind::kCosine, ScheduleKind::kWsd}) {
    const Schedule schedule{.kind = kind,
                            .peak = 2,
                            .steps = 10,
                            .warmup_steps = 2,
                            .decay_steps = 5,
                            .min_ratio = 0.1};
    EXPECT_GT(schedule.LearningRate(9), schedule.LearningRate(10)) << NameOf(kind);
    EXPECT_GT(schedule.LearningRate(10), 0.2) << NameOf(kind);
    EXPECT_NEAR(schedule.LearningRate(11), 0.2, 1e-15) << NameOf(kind);
    EXPECT_NEAR(schedule.LearningRate(12), 0.2, 1e-15) << NameOf(kind);
  }
}

// A step at rate 0 costs as much as any other and changes nothing.
TEST(ScheduleTest, EveryStepOfARunMovesTheWeights) {
  for (ScheduleKind kind : {ScheduleKind::kConstant, ScheduleKind::kLinear, ScheduleKind::kCosine,
                            ScheduleKind::kWsd}) {
    for (int64_t steps = 1; steps <= 12; ++steps) {
      for (int64_t warmup = 0; warmup <= steps; ++warmup) {
        for (int64_t decay = 0; decay <= steps - warmup; ++decay) {
          const Schedule schedule{.kind = kind,
                                  .peak = 1,
                                  .steps = steps,
                                  .warmup_steps = warmup,
                                  .decay_steps = decay};
          schedule.Check();
          double highest = 0;
          for (int64_t step = 1; step <= steps; ++step) {
            EXPECT_GT(schedule.LearningRate(step), 1e-3) << NameOf(kind) << " " << step;
            highest = std::max(highest, schedule.LearningRate(step));
          }
          EXPECT_DOUBLE_EQ(highest, 1);
        }
      }
    }
  }
}

TEST(ScheduleTest, ValuesInBetween) {
  Schedule schedule{.kind = ScheduleKind::kLinear, .peak = 1, .steps = 10, .warmup_steps = 2};
  EXPECT_DOUBLE_EQ(schedule.LearningRate(3), 1);
  EXPECT_DOUBLE_EQ(schedule.LearningRate(5), 0.75);
  schedule.kind = ScheduleKind::kCosine;
  EXPECT_DOUBLE_EQ(schedule.LearningRate(7), 0.5);
  EXPECT_NEAR(schedule.LearningRate(5), 0.8535533905932737, 1e-15);
  schedule.kind = ScheduleKind::kConstant;
  EXPECT_DOUBLE_EQ(schedule.LearningRate(10), 1);
  schedule.kind = ScheduleKind::kWsd;
  schedule.decay_steps = 4;
  EXPECT_DOUBLE_EQ(schedule.LearningRate(7), 1);
  EXPECT_DOUBLE_EQ(schedule.LearningRate(8), 0.75);
  EXPECT_DOUBLE_EQ(schedule.LearningRate(10), 0.25);
}

TEST(ScheduleTest, EdgesWithoutDivisionByZero) {
  const Schedule all_warmup{
      .kind = ScheduleKind::kCosine, .peak = 1, .steps = 4, .warmup_steps = 4};
  all_warmup.Check();
  EXPECT_DOUBLE_EQ(all_warmup.LearningRate(4), 1);
  EXPECT_DOUBLE_EQ(all_warmup.LearningRate(5), 0);
  const Schedule no_decay{.kind = ScheduleKind::kWsd, .peak = 1, .steps = 4};
  no_decay.Check();
  EXPECT_DOUBLE_EQ(no_decay.LearningRate(4), 1);
  EXPECT_EQ(StepsOfFraction(0.03, 1000), 30);
  EXPECT_EQ(StepsOfFraction(0.03, 50), 2);
}

TEST(ScheduleTest, NamesTheWrongValue) {
  const auto message = [](const Schedule& schedule) -> std::string {
    try {
      schedule.Check();
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message({.peak = 1, .steps = 20, .warmup_steps = 30}),
            "schedule.warmup_steps = 30 exceeds the 20 steps");
  EXPECT_NE(message({.peak = 0, .steps = 20}).find("learning_rate"), std::string::npos);
  EXPECT_NE(message({.peak = 1, .steps = 0}).find("schedule.steps"), std::string::npos);
  EXPECT_NE(message({.peak = 1, .steps = 5, .min_ratio = 1.5}).find("min_ratio"),
            std::string::npos);
  EXPECT_NE(message({.kind = ScheduleKind::kWsd, .peak = 1, .steps = 5, .decay_steps = 6})
                .find("decay_steps"),
            std::string::npos);
}

}  // namespace
}  // namespace terrace
