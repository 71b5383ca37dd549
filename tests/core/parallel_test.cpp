#include "core/parallel.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace terrace {
namespace {

class ParallelTest : public testing::TestWithParam<int> {
 protected:
  ParallelTest() : before_(omp_get_max_threads()) { omp_set_num_threads(GetParam()); }
  ~ParallelTest() override { omp_set_num_threads(before_); }

  // Loops whose blocks are over before other threads wake, and such as give them time.
  static void BeBusyFor(std::chrono::microseconds time) {
    const auto end = std::chrono::steady_clock::now() + time;
    while (std::chrono::steady_clock::now() < end) {
    }
  }

 private:
  int before_;
};

TEST_P(ParallelTest, DoesEveryIndexOnceInBlocks) {
  for (const int64_t count : {0, 1, 2, 3, 7, 64, 1000}) {
    for (const int64_t grain : {1, 2, 3, 64, 1001}) {
      std::vector<std::atomic<int>> done(static_cast<size_t>(count));
      ParallelFor(count, grain, [&](int64_t begin, int64_t end) {
        EXPECT_EQ(begin % grain, 0);
        EXPECT_EQ(end, std::min(count, begin + grain));
        for (int64_t i = begin; i < end; ++i) ++done[static_cast<size_t>(i)];
      });
      for (const auto& times : done) ASSERT_EQ(times, 1) << count << ", " << grain;
    }
  }
}

// Threads that were away come back into another loop than they left.
TEST_P(ParallelTest, ManyShortLoopsStayApart) {
  for (int64_t loop = 0; loop < 20000; ++loop) {
    const int64_t count = 1 + loop % 9;
    std::atomic<int64_t> sum = 0;
    ParallelFor(count, 1, [&, loop](int64_t i, int64_t) { sum += loop * 16 + i; });
    ASSERT_EQ(sum, count * loop * 16 + count * (count - 1) / 2);
    if (loop % 1000 == 0) BeBusyFor(std::chrono::microseconds(300));  // others fall asleep
  }
}

TEST_P(ParallelTest, NumbersBelongToOneThreadAtATime) {
  std::vector<std::atomic<bool>> taken(static_cast<size_t>(GetParam()));
  ParallelFor(200, 1, [&](int64_t, int64_t) {
    const int64_t number = ThreadNumber();
    ASSERT_GE(number, 0);
    ASSERT_LT(number, GetParam());
    EXPECT_FALSE(taken[static_cast<size_t>(number)].exchange(true));
    BeBusyFor(std::chrono::microseconds(20));
    taken[static_cast<size_t>(number)] = false;
  });
  EXPECT_EQ(ThreadNumber(), 0);
}

TEST_P(ParallelTest, TheLowestBlocksExceptionReachesTheCaller) {
  for (int repeat = 0; repeat < 20; ++repeat) {
    try {
      ParallelFor(100, 1, [](int64_t i, int64_t) {
        if (i >= 3) throw i;
      });
      FAIL();
    } catch (int64_t i) {
      EXPECT_EQ(i, 3);
    }
  }
  std::atomic<int> done = 0;
  ParallelFor(100, 1, [&](int64_t, int64_t) { ++done; });
  EXPECT_EQ(done, 100);
}

TEST_P(ParallelTest, LoopsInsideLoopsAndBesideOthersAreWhole) {
  std::vector<std::thread> callers;
  std::atomic<int> done = 0;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&] {
      omp_set_num_threads(GetParam());
      for (int repeat = 0; repeat < 50; ++repeat) {
        ParallelFor(
            8, 1, [&](int64_t, int64_t) { ParallelFor(8, 1, [&](int64_t, int64_t) { ++done; }); });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(done, 3 * 50 * 8 * 8);
}

// As on a machine that gives the other threads no time: in a forked process there are none.
TEST_P(ParallelTest, ALoopEndsWithoutThreadsThatDoNotCome) {
  const auto sum_of_loop = [] {
    std::atomic<int64_t> sum = 0;
    ParallelFor(50, 1, [&](int64_t i, int64_t) { sum += i; });
    return sum.load();
  };
  EXPECT_EQ(sum_of_loop(), 50 * 49 / 2);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // they sleep, and hold no lock
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);
    _exit(sum_of_loop() == 50 * 49 / 2 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

// By processor time, which other processes do not add to.
TEST_P(ParallelTest, ThreadsThatHaveNothingToDoSleep) {
  const auto processor_seconds = [] {
    rusage usage = {};
    getrusage(RUSAGE_SELF, &usage);
    return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           1e-6 * static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
  };
  ParallelFor(50, 1, [](int64_t, int64_t) {});
  const double before = processor_seconds();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_LT(processor_seconds() - before, 0.02);
}

#ifdef __SSE2__
TEST_P(ParallelTest, OtherThreadsTreatSubnormalNumbersAsTheCallerDoes) {
  const unsigned before = _mm_getcsr();
  for (const bool flush : {true, false}) {
    _MM_SET_FLUSH_ZERO_MODE(flush ? _MM_FLUSH_ZERO_ON : _MM_FLUSH_ZERO_OFF);
    ParallelFor(100, 1, [&](int64_t, int64_t) {
      volatile float small = std::numeric_limits<float>::min();
      small = small * 0.5f;
      EXPECT_EQ(small == 0, flush);
      BeBusyFor(std::chrono::microseconds(10));
    });
  }
  _mm_setcsr(before);
}
#endif

INSTANTIATE_TEST_SUITE_P(Threads, ParallelTest, testing::Values(1, 2, 4, 7),
                         [](const auto& test) { return std::to_string(test.param); });

}  // namespace
}  // namespace terrace
