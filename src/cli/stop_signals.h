// SIGINT and SIGTERM as something to ask for.
#pragma once

#include <atomic>
#include <csignal>
#include <thread>

namespace terrace {

// While it lives, the two signals no longer end the process, but are noted; the second one ends it
// at once. No handler runs: the signals are blocked, and a thread waits for them. Make it before
// any other thread, which would receive them otherwise.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  bool requested() const { return signal() != 0; }
  int signal() const { return signal_.load(); }  // the first one; 0: none so far

 private:
  void Wait();

  sigset_t signals_;
  sigset_t mask_before_;
  std::atomic<int> signal_ = 0;
  std::atomic<bool> done_ = false;
  std::thread thread_;
};

}  // namespace terrace
