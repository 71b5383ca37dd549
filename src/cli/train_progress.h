// What a training run shows: a bar on a terminal, plain lines elsewhere.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>

#include "train/trainer.h"

namespace terrace {

class TrainProgress {
 public:
  TrainProgress();
  ~TrainProgress();
  TrainProgress(const TrainProgress&) = delete;
  TrainProgress& operator=(const TrainProgress&) = delete;

  void Begin(const RunSummary& summary);
  void Step(const StepMetrics& metrics);
  // A line that stays.
  void Note(std::string_view text);

 private:
  using Clock = std::chrono::steady_clock;

  std::string LineOf(const StepMetrics& metrics, size_t width) const;
  std::string Fitted(const StepMetrics& metrics) const;

  bool terminal_;
  RunSummary summary_;
  std::optional<Clock::time_point> start_;  // of the first step
  Clock::time_point shown_;
};

}  // namespace terrace
