// Signals as a wish to end in good order.
#pragma once

#include <atomic>
#include <string_view>
#include <thread>

namespace terrace {

// For the start of the process: from here on SIGHUP and SIGUSR1 wait for a StopSignals, where they
// would end the process: what announces a limit should not do what it warns of.
void HoldStopSignals();

// While it lives, SIGINT, SIGTERM, SIGHUP (the terminal is gone) and SIGUSR1 (batch systems
// announce a time limit with it) are taken by a thread of its own instead of by handlers: oneDNN's
// generated code uses the stack pointer as an ordinary register, and the kernel would write a
// handler's frame wherever that points. The first signal asks for an orderly end. Of SIGINT and
// SIGTERM, another one, a second or more after the first of them, ends the process at once
// (wrappers often deliver a signal twice); the other two never do.
//
// Make it before any other thread is made: threads inherit what is blocked.
class StopSignals {
 public:
  // The first signal is answered with `notice` on standard error (a literal).
  explicit StopSignals(std::string_view notice = "");
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  bool requested() const { return signal() != 0; }
  // The first signal; 0 while there was none.
  int signal() const { return signal_.load(); }

 private:
  std::atomic<int> signal_ = 0;
  std::jthread thread_;
};

}  // namespace terrace
