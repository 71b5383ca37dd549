#pragma once

#include <cstdint>

#include "model/parameter.h"

namespace terrace {

// Fills parameter.value, straight into place, with N(0, init_std^2) keyed by (seed, id,
// element), or with init_constant. Independent of threads; bfloat16 is rounded to nearest.
void InitializeParameter(const Parameter& parameter, uint64_t seed);

}  // namespace terrace
