// Progress on standard error.
#pragma once

#include <chrono>

#include "data/progress.h"

namespace terrace {

// On a terminal, one line that is rewritten some times a second and removed at the end; elsewhere
// a line every ten seconds, so that logs stay short.
class ProgressLine {
 public:
  ProgressLine();
  ~ProgressLine();
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  void Show(const ProgressReport& report);

 private:
  using Clock = std::chrono::steady_clock;
  bool terminal_;
  Clock::time_point start_;
  Clock::time_point shown_;
};

}  // namespace terrace
