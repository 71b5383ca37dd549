#include "cli/interruptible.h"

#include <cstdlib>

#include "cli/progress_line.h"
#include "cli/stop_signals.h"

namespace terrace {
namespace {

struct Interruption {
  int signal;
};

}  // namespace

void RunInterruptibly(const std::function<void(const ProgressCallback&)>& work) {
  try {
    const StopSignals signals;
    ProgressLine line;
    work([&](const ProgressReport& report) {
      if (signals.requested()) throw Interruption{signals.signal()};
      line.Show(report);
    });
  } catch (const Interruption& interruption) {
    std::exit(128 + interruption.signal);
  }
}

}  // namespace terrace
