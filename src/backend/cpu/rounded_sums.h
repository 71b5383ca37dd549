// Gradients of weights that are left in bfloat16: sums in float32 and one stochastic rounding.
#pragma once

#include "backend/backend.h"

namespace terrace {

// dw[O, I] (+)= dy[N, O]^T * x[N, I] for a dw of bfloat16, by float32 slices of its rows. Takes a
// slice, some columns of dy and what the backend's products take, whatever N is.
void LeaveRounded(Backend& backend, TensorView dy, TensorView x, TensorView dw, Adding add);

}  // namespace terrace
