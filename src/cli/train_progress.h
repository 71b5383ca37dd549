// What a training run shows: a bar on a terminal, plain lines elsewhere.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "train/trainer.h"

namespace terrace {

// "1:02:03", "2:03"
std::string Duration(double seconds);

class TrainProgress {
 public:
  // What stands before each step's line, if anything.
  using Prefix = std::function<std::string(const StepMetrics&)>;
  explicit TrainProgress(Prefix prefix = {});
  ~TrainProgress();
  TrainProgress(const TrainProgress&) = delete;
  TrainProgress& operator=(const TrainProgress&) = delete;

  // `described`: with lines on model, memory and data.
  void Begin(const RunSummary& summary, bool described = true);
  void Step(const StepMetrics& metrics);
  // A line that stays.
  void Note(std::string_view text);

 private:
  using Clock = std::chrono::steady_clock;

  std::string LineOf(const StepMetrics& metrics, size_t width) const;
  std::string Fitted(const StepMetrics& metrics) const;
  void Describe(const RunSummary& summary);

  bool terminal_;
  Prefix prefix_;
  RunSummary summary_;
  std::optional<Clock::time_point> start_;  // of the first step
  Clock::time_point shown_;
};

}  // namespace terrace
