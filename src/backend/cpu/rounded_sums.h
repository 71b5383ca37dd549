// Gradients of weights that are left in bfloat16: sums in float32 and one stochastic rounding.
#pragma once

#include "backend/backend.h"

namespace terrace {

// dw[O, I] (+)= dy[N, O]^T * x[N, I] for a dw of bfloat16, by float32 slices of its rows. Takes a
// slice, some columns of dy and what the backend's products take, whatever N is.
void LeaveRounded(Backend& backend, TensorView dy, TensorView x, TensorView dw, Adding add);

// Of a gradient whose rows have `columns` elements: how many are summed at a time in float32.
int64_t SliceRows(int64_t columns);
// Rows [first_row, first_row + sums.rows()) of dw (+)= sums f32, rounded.
void RoundSums(TensorView sums, int64_t first_row, TensorView dw, Adding add);

}  // namespace terrace
