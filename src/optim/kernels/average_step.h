// An average of updates that takes their place.
#pragma once

#include <cstdint>

namespace terrace::kernels {

struct AverageStep {
  float beta;
  float gain;             // of the update: average = beta * average + gain * update
  float rate;             // weight = keep * weight - rate * average
  uint64_t rounding_key;  // of the average, in bfloat16
};

}  // namespace terrace::kernels
