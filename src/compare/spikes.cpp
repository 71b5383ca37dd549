#include "compare/spikes.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

namespace terrace {
namespace {

double MedianOf(std::vector<double> values) {
  const auto middle = values.begin() + std::ssize(values) / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

void SpikeCounter::Add(double loss) {
  ++step_;
  if (!std::isfinite(loss)) return;
  if (std::ssize(window_) >= kFewest && Exceeds(loss)) {
    if (step_ - last_ >= kApart) ++spikes_;
    last_ = step_;
  }
  window_.push_back(loss);
  if (std::ssize(window_) > kWindow) window_.pop_front();
}

bool SpikeCounter::Exceeds(double loss) const {
  constexpr double kDeviationOfMedian = 1.4826;  // of normal noise, over its median size
  const double excess = loss - MedianOf({window_.begin(), window_.end()});
  if (excess <= kLeast) return false;
  std::vector<double> changes;
  for (size_t i = 1; i < window_.size(); ++i) {
    changes.push_back(std::abs(window_[i] - window_[i - 1]));
  }
  const double deviation = kDeviationOfMedian / std::numbers::sqrt2 * MedianOf(std::move(changes));
  return excess > kDeviations * deviation;
}

std::string SpikeDefinition() {
  return fmt::format(
      "steps whose training loss exceeds the median of the {} before by more than {} standard "
      "deviations of its noise and {} nats, those less than {} steps apart as one",
      SpikeCounter::kWindow, SpikeCounter::kDeviations, SpikeCounter::kLeast, SpikeCounter::kApart);
}

}  // namespace terrace
