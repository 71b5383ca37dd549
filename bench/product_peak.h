// The yardstick of matrix products: what oneDNN reaches on this machine.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/matmul.h"
#include "bench_support.h"
#include "core/arena.h"

namespace terrace {

// Operations per second of a product of two 2048 x 2048 matrices on all threads; of float32 where
// the machine has no bfloat16 products, since training takes those there too.
class ProductPeak {
 public:
  explicit ProductPeak(DType dtype) : arena_(int64_t{64} << 20) {
    const auto allocate = [&](DType of) {
      const TensorView view = arena_.Allocate(Memory::kScratch, of, {kSize, kSize}, "peak");
      CpuBackend(arena_).Zero(view);
      return Operand{view.data, of, kSize};
    };
    if (!matmul_.HasBF16()) dtype = DType::kF32;
    product_ = {.m = kSize,
                .n = kSize,
                .k = kSize,
                .a = allocate(dtype),
                .b = allocate(dtype),
                .c = allocate(dtype)};
    pad_ = arena_.Allocate(Memory::kScratch, DType::kF32,
                           {matmul_.ScratchBytes(product_, true) / 4 + 1}, "peak.scratchpad");
  }

  DType dtype() const { return product_.a.dtype; }

  double FlopsPerSecond() {
    double best = 0;
    for (int repeat = 0; repeat < 8; ++repeat) {
      const double seconds =
          SecondsOf([&] { matmul_.Run(product_, true, pad_.data, pad_.bytes()); });
      best = std::max(best, 2.0 * kSize * kSize * kSize / seconds);
    }
    return best;
  }

 private:
  static constexpr int64_t kSize = 2048;
  Arena arena_;
  Matmul matmul_;
  Product product_;
  TensorView pad_;
};

}  // namespace terrace
