// Long work of a command that may be interrupted.
#pragma once

#include <functional>

#include "data/progress.h"

namespace terrace {

// Runs `work`, shows the progress that it reports, and ends it at the next report after SIGINT or
// SIGTERM: an exception removes what it has begun, and the process exits with 128 + signal. Call
// it before the first parallel loop (StopSignals).
void RunInterruptibly(const std::function<void(const ProgressCallback&)>& work);

}  // namespace terrace
