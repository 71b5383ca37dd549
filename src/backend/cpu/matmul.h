// Matrix products through oneDNN: a cache of primitives, since making one costs a tenth of a
// millisecond, and scratchpads that the caller provides from the arena.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/dtype.h"

namespace terrace {

// A row-major matrix in memory; `transposed` means that the product uses its transpose.
struct Operand {
  std::byte* data;
  DType dtype;
  int64_t stride;  // elements from one stored row to the next
  bool transposed = false;
};

// oneDNN's kernels. kBlocked is made for one size, at the cost of a tenth of a millisecond;
// kAnyM and kAnyK are made once for all products that differ in that size only. Which is faster
// was measured: kBlocked for x * w^T and for bfloat16 results, the others for sums into float32.
enum class Kernel : uint8_t { kBlocked, kAnyM, kAnyK };

// c[m, n] (+)= a[m, k] * b[k, n], where a and b have one dtype.
struct Product {
  int64_t m, n, k;
  Operand a, b, c;
  bool add = false;
  Kernel kernel = Kernel::kBlocked;
};

class Matmul {
 public:
  Matmul();
  ~Matmul();

  // bfloat16 products need AVX-512 with BF16; elsewhere callers upcast to float32 first.
  bool HasBF16() const { return has_bf16_; }

  // Scratchpad bytes of this product when run by one thread (`parallel` false) or by all.
  // Pointers are not looked at.
  int64_t ScratchBytes(const Product& product, bool parallel);
  // The most that any product of this family needs whose size along one axis is at most `limit`:
  // `Axis` tells which member varies. Memory must not depend on data, and an expert's share of
  // the tokens does. Sampled; a size that needs more gets a scratchpad of oneDNN's own.
  enum class Axis : uint8_t { kM, kK };
  int64_t ScratchBound(Product product, Axis axis, int64_t limit, bool parallel);

  // Thread-safe when `parallel` is false: each caller brings its own scratch. Does nothing for
  // m or n of 0; k of 0 zeroes c unless `add`.
  void Run(const Product& product, bool parallel, std::byte* scratch, int64_t scratch_bytes);

 private:
  struct Cache;
  std::unique_ptr<Cache> cache_;
  bool has_bf16_;
};

}  // namespace terrace
