#include "cli/stop_signals.h"

#include <pthread.h>

#include <ctime>

namespace terrace {
namespace {

constexpr timespec kPatience = {.tv_sec = 0, .tv_nsec = 100'000'000};

}  // namespace

StopSignals::StopSignals() {
  sigemptyset(&signals_);
  sigaddset(&signals_, SIGINT);
  sigaddset(&signals_, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals_, &mask_before_);
  thread_ = std::thread([this] { Wait(); });
}

StopSignals::~StopSignals() {
  done_ = true;
  thread_.join();
  pthread_sigmask(SIG_SETMASK, &mask_before_, nullptr);
}

void StopSignals::Wait() {
  while (!done_) {
    const int taken = sigtimedwait(&signals_, nullptr, &kPatience);
    if (taken < 0) continue;
    if (signal_ == 0) {
      signal_ = taken;
      continue;
    }
    std::signal(taken, SIG_DFL);
    pthread_sigmask(SIG_UNBLOCK, &signals_, nullptr);
    raise(taken);
  }
}

}  // namespace terrace
