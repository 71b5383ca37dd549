// Notices that other processes keep processors from a run.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>

namespace terrace {

// How long, in seconds and summed over the threads of this process, threads were ready to run while
// others ran; 0 where the kernel does not tell. A thread that ends takes its time with it.
double ReadWaitingSeconds();

class ProcessorWatch {
 public:
  // Looks at this much time of training at once: shorter disturbances pass.
  static constexpr double kWindowSeconds = 10;
  // Threads that wait, on average over a window, from which on one is too many. On a quiet machine
  // they are some hundredths; one busy process beside as many threads as there are processors makes
  // a third of a thread at least.
  static constexpr double kWaitingThreads = 0.3;

  explicit ProcessorWatch(int64_t threads, std::function<double()> waiting = ReadWaitingSeconds)
      : threads_(threads), waiting_(std::move(waiting)) {}

  // After every step, with the seconds of the run so far. Once in a run: a warning on one line that
  // names how many threads may be faster.
  std::optional<std::string> Step(double seconds);

 private:
  struct Sample {
    double seconds, waited;
  };

  int64_t threads_;
  std::function<double()> waiting_;
  std::optional<Sample> start_;  // of the window
  bool warned_ = false;
};

}  // namespace terrace
