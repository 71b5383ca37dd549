#include "cli/stop_signals.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <thread>
#include <utility>
#include <vector>

namespace terrace {
namespace {

using std::chrono::milliseconds;
using testing::ExitedWithCode;

constexpr milliseconds kAtOnce(20);
constexpr milliseconds kLater(1100);

// Sends signals, each after a pause, to a process that waits for them. Exits with 0 when it is
// still there after the last.
void Take(const std::vector<std::pair<milliseconds, int>>& signals) {
  const StopSignals stop;
  for (const auto& [pause, signal] : signals) {
    std::this_thread::sleep_for(pause);
    kill(getpid(), signal);
  }
  std::this_thread::sleep_for(milliseconds(300));
  _exit(stop.signal() == signals.front().second ? 0 : 1);
}

// In processes of their own, which have one thread.
TEST(StopSignalsTest, AskForAnOrderlyEnd) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1}) {
    EXPECT_EXIT(Take({{kAtOnce, signal}, {kAtOnce, signal}}), ExitedWithCode(0), "") << signal;
  }
}

TEST(StopSignalsTest, OnceMoreEndsAtOnce) {
  EXPECT_EXIT(Take({{kAtOnce, SIGINT}, {kLater, SIGINT}}), ExitedWithCode(128 + SIGINT), "");
  EXPECT_EXIT(Take({{kAtOnce, SIGUSR1}, {kAtOnce, SIGTERM}, {kLater, SIGINT}}),
              ExitedWithCode(128 + SIGINT), "");
}

// Batch systems send SIGTERM when the time that SIGUSR1 announced is up; what is saved then must
// not be given up. A session that ends sends SIGHUP, SIGTERM and SIGHUP again.
TEST(StopSignalsTest, AnAnnouncementDoesNotCountAsTheFirstTime) {
  EXPECT_EXIT(Take({{kAtOnce, SIGUSR1}, {kLater, SIGTERM}}), ExitedWithCode(0), "");
  EXPECT_EXIT(Take({{kAtOnce, SIGHUP}, {kLater, SIGTERM}, {kLater, SIGHUP}}), ExitedWithCode(0),
              "");
}

// What comes before there is a StopSignals is not lost, and does not end the process.
TEST(StopSignalsTest, WhatComesDuringTheStartIsTakenLater) {
  for (const int signal : {SIGHUP, SIGUSR1}) {
    EXPECT_EXIT(
        {
          HoldStopSignals();
          kill(getpid(), signal);
          std::this_thread::sleep_for(kAtOnce);
          const StopSignals stop;
          std::this_thread::sleep_for(milliseconds(300));
          _exit(stop.signal() == signal ? 0 : 1);
        },
        ExitedWithCode(0), "");
  }
  EXPECT_EXIT(
      {
        std::signal(SIGHUP, SIG_IGN);  // nohup
        HoldStopSignals();
        kill(getpid(), SIGHUP);
        const StopSignals stop;
        std::this_thread::sleep_for(milliseconds(200));
        _exit(stop.requested() ? 1 : 0);
      },
      ExitedWithCode(0), "");
}

TEST(StopSignalsTest, WhatIsIgnoredStaysSo) {
  EXPECT_EXIT(
      {
        std::signal(SIGHUP, SIG_IGN);  // nohup
        const StopSignals stop;
        kill(getpid(), SIGHUP);
        std::this_thread::sleep_for(milliseconds(200));
        _exit(stop.requested() ? 1 : 0);
      },
      ExitedWithCode(0), "");
}

}  // namespace
}  // namespace terrace
