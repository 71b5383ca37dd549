#include "train/processor_watch.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>

namespace terrace {

double ReadWaitingSeconds() {
  double nanoseconds = 0;
  std::error_code error;
  for (std::filesystem::directory_iterator task("/proc/self/task", error), end;
       !error && task != end; task.increment(error)) {
    std::ifstream statistics(task->path() / "schedstat");
    double ran = 0, waited = 0;  // on a processor; for one
    if (statistics >> ran >> waited) nanoseconds += waited;
  }
  return nanoseconds * 1e-9;
}

std::optional<std::string> ProcessorWatch::Step(double seconds) {
  if (warned_ || threads_ <= 1) return {};
  if (start_ && seconds - start_->seconds < kWindowSeconds) return {};
  const Sample now{seconds, waiting_()};
  const std::optional<Sample> start = std::exchange(start_, now);
  if (!start) return {};
  const double waiting = (now.waited - start->waited) / (now.seconds - start->seconds);
  if (!(waiting >= kWaitingThreads)) return {};
  warned_ = true;
  const auto too_many = static_cast<int64_t>(std::ceil(waiting));
  return fmt::format(
      "other processes use the processors too: of {} threads {:.1f} wait for one at any time; "
      "training.threads = {} may be faster while they do",
      threads_, waiting, std::max<int64_t>(1, threads_ - too_many));
}

}  // namespace terrace
