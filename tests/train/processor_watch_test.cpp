#include "train/processor_watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <chrono>
#include <thread>

namespace terrace {
namespace {

using ::testing::HasSubstr;

// Warnings of a run of `seconds` in steps of half a second, in which `waiting` threads wait.
std::vector<std::string> WarningsOf(int64_t threads, double seconds, double waiting) {
  double waited = 3;  // before the run
  ProcessorWatch watch(threads, [&] { return waited; });
  std::vector<std::string> warnings;
  for (double now = 0; now <= seconds; now += 0.5, waited += 0.5 * waiting) {
    if (auto warning = watch.Step(now)) warnings.push_back(*warning);
  }
  return warnings;
}

TEST(ProcessorWatchTest, WarnsOnceAndNamesHowManyThreadsWouldBeFaster) {
  const std::vector<std::string> one = WarningsOf(2, 100, 0.5);
  ASSERT_EQ(one.size(), 1u);
  EXPECT_THAT(one[0], HasSubstr("of 2 threads 0.5 wait"));
  EXPECT_THAT(one[0], HasSubstr("training.threads = 1 "));
  EXPECT_EQ(one[0].find('\n'), std::string::npos);
  EXPECT_THAT(WarningsOf(16, 100, 0.9).at(0), HasSubstr("training.threads = 15 "));
  EXPECT_THAT(WarningsOf(16, 100, 3.2).at(0), HasSubstr("training.threads = 12 "));
  EXPECT_THAT(WarningsOf(4, 100, 9).at(0), HasSubstr("training.threads = 1 "));
}

TEST(ProcessorWatchTest, SaysNothingOnAQuietMachineOfOneThreadOrOfShortRuns) {
  EXPECT_TRUE(WarningsOf(2, 100, 0).empty());
  EXPECT_TRUE(WarningsOf(2, 100, 0.1).empty());
  EXPECT_TRUE(WarningsOf(16, 100, 0.25).empty());
  EXPECT_TRUE(WarningsOf(1, 100, 0.9).empty());
  EXPECT_TRUE(WarningsOf(2, 9, 0.9).empty());
}

TEST(ProcessorWatchTest, AShortDisturbancePassesAndALaterOneIsSeen) {
  double waited = 0;
  ProcessorWatch watch(2, [&] { return waited; });
  int warnings = 0;
  for (int second = 0; second <= 100; ++second) {
    if (second == 31 || second == 32) waited += 1;  // of ten seconds
    if (second > 60) waited += 1;
    if (watch.Step(second)) {
      ++warnings;
      EXPECT_GT(second, 60);
    }
  }
  EXPECT_EQ(warnings, 1);
}

TEST(ProcessorWatchTest, ThreadsOnOneProcessorWaitForEachOther) {
  cpu_set_t before, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  CPU_ZERO(&one);
  for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++cpu) {
    if (CPU_ISSET(cpu, &before)) CPU_SET(cpu, &one);
  }
  const double waited = ReadWaitingSeconds();
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  const auto spin = [] {
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(300);
    while (std::chrono::steady_clock::now() < end) {
    }
  };
  std::thread other(spin);  // inherits the processor
  spin();
  const double waited_now = ReadWaitingSeconds();
  other.join();
  sched_setaffinity(0, sizeof(before), &before);
  if (waited_now == 0) GTEST_SKIP() << "the kernel keeps no statistics of waiting";
  EXPECT_GT(waited_now - waited, 0.1);
}

}  // namespace
}  // namespace terrace
