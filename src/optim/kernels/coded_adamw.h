// The pass of adamw whose two moments are stored in 8 bits by block.
#pragma once

#include "core/tensor.h"
#include "optim/kernels/block_code.h"
#include "optim/kernels/elementwise.h"

namespace terrace::kernels {

// As AdamWUpdate, with a momentum in codes (kSigned) and a second moment in codes (kUnsigned). The
// shape does not matter: blocks are of consecutive elements, and scales have one entry a block. The
// weight moves by the moments before they are rounded. `begin` is a multiple of kStripe.
void CodedAdamWUpdate(TensorView weight, TensorView gradient, const Stored& momentum,
                      const Stored& second, const AdamWStep& step, int64_t begin, int64_t end,
                      uint64_t rounding_key);

}  // namespace terrace::kernels
