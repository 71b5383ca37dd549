// Spikes of a training loss: the one definition, for all tables.
#pragma once

#include <cstdint>
#include <deque>
#include <string>

namespace terrace {

// Takes the losses of steps in order. A step is in a spike when its loss exceeds the median of the
// kWindow losses before it by more than kDeviations of their standard deviations, and by more than
// kLeast. Steps in spikes less than kApart steps apart are one spike.
//
// Seven deviations are what the spike score of OLMo 2 (arXiv 2501.00656) takes, from a mean over
// 1,000 steps. Runs of 1,000 steps need a shorter window, in which the loss still falls and one
// spike would move a mean: hence the median, and a deviation of the noise alone, from the median
// size of the change between two steps (1.4826 / sqrt(2) times it for normal noise). A loss that
// stays up is the new level after half a window, not a spike without end. Losses that are not
// finite are left out.
class SpikeCounter {
 public:
  static constexpr int64_t kWindow = 50;
  static constexpr int64_t kFewest = 10;  // losses before a step, for it to be judged
  static constexpr double kDeviations = 7;
  static constexpr double kLeast = 0.1;  // nats
  static constexpr int64_t kApart = 10;

  void Add(double loss);
  int64_t spikes() const { return spikes_; }

 private:
  bool Exceeds(double loss) const;

  std::deque<double> window_;
  int64_t step_ = 0;
  int64_t last_ = -kApart;  // step in a spike
  int64_t spikes_ = 0;
};

// The same in words, for readers of the tables.
std::string SpikeDefinition();

}  // namespace terrace
