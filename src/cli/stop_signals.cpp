#include "cli/stop_signals.h"

#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <ctime>
#include <initializer_list>
#include <optional>

namespace terrace {
namespace {

// Without signals that the process was told to ignore, as background jobs of scripts are.
sigset_t NotIgnored(std::initializer_list<int> signals) {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : signals) {
    struct sigaction action = {};
    sigaction(signal, nullptr, &action);
    if (action.sa_handler != SIG_IGN) sigaddset(&set, signal);
  }
  return set;
}

sigset_t StopSet() { return NotIgnored({SIGINT, SIGTERM, SIGHUP, SIGUSR1}); }

}  // namespace

void HoldStopSignals() {
  const sigset_t set = NotIgnored({SIGHUP, SIGUSR1});
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

StopSignals::StopSignals(std::string_view notice) {
  const sigset_t set = StopSet();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  thread_ = std::jthread([this, set, notice](const std::stop_token& ended) {
    using Clock = std::chrono::steady_clock;
    constexpr timespec kPatience{.tv_sec = 0, .tv_nsec = 100'000'000};
    std::optional<Clock::time_point> insisted;  // first of SIGINT and SIGTERM
    while (!ended.stop_requested()) {
      const int signal = sigtimedwait(&set, nullptr, &kPatience);
      if (signal <= 0) continue;
      if (signal_ == 0) {
        signal_ = signal;
        std::fwrite(notice.data(), 1, notice.size(), stderr);
      }
      if (signal != SIGINT && signal != SIGTERM) continue;
      if (!insisted) insisted = Clock::now();
      if (Clock::now() - *insisted >= std::chrono::seconds(1)) _exit(128 + signal);
    }
  });
}

StopSignals::~StopSignals() {
  thread_.request_stop();
  thread_.join();
  const sigset_t set = StopSet();
  // What the thread has not taken any more would end the process when it is let in.
  constexpr timespec kNow{};
  while (sigtimedwait(&set, nullptr, &kNow) > 0) {
  }
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
}

}  // namespace terrace
