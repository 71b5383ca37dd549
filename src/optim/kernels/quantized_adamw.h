// The pass of adamw whose two moments are stored in 8 bits by block.
#pragma once

#include "core/tensor.h"
#include "optim/kernels/adamw_step.h"
#include "optim/kernels/block_quantization.h"

namespace terrace::kernels {

// The update of adamw (rules/adamw.cpp), with a quantized momentum (kSigned) and a second moment in
// codes (kUnsigned). The shape does not matter: blocks are of consecutive elements, and scales have
// one entry a block. The weight moves by the moments before they are rounded. `begin` is a multiple
// of kStripe.
void QuantizedAdamWUpdate(TensorView weight, TensorView gradient, const Stored& momentum,
                          const Stored& second, const AdamWStep& step, int64_t begin, int64_t end,
                          uint64_t rounding_key);

}  // namespace terrace::kernels
