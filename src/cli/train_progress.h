// What a training run shows: a bar on a terminal, plain lines elsewhere.
#pragma once

#include <chrono>
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

  std::string LineOf(const StepMetrics& metrics) const;
  std::string Fitted(const StepMetrics& metrics, const std::string& line) const;

  bool terminal_;
  RunSummary summary_;
  Clock::time_point start_;
  Clock::time_point shown_;
};

}  // namespace terrace
