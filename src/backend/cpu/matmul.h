// Matrix products of one thread, through oneDNN (a cache of primitives, since making one costs as
// much as a small product) or our own kernels, with scratch that the caller provides.
//
// A product is planned and run for one thread, always: whoever has more cuts the work into several
// products. What it takes and what it gives then depend on the product and the processor alone,
// never on the number of threads or on who runs it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "core/dtype.h"

namespace terrace {

// A row-major matrix in memory; `transposed` means that the product uses its transpose.
struct Operand {
  std::byte* data;
  DType dtype;
  int64_t stride;  // elements from one stored row to the next
  bool transposed = false;
};

// One kernel for any size serves all products of the same dtypes and transposes; with AVX-512 a
// oneDNN kernel made for one size is faster for some, at the cost of a primitive for each. Those of
// bfloat16 for any size are our own where the processor has AMX, which oneDNN's do not use.
enum class Kernel : uint8_t { kAnySize, kThisSize };

// c[m, n] (+)= a[m, k] * b[k, n], where a and b have one dtype, float32 or bfloat16. c is float32
// or, for bfloat16 products of kThisSize or on AMX, bfloat16: oneDNN's kernels for any size keep
// their sums in c.
struct Product {
  int64_t m, n, k;
  Operand a, b, c;
  bool add = false;
  Kernel kernel = Kernel::kAnySize;
};

// "bf16 [128, 77] * [77, 64]^T to f32", for errors.
std::string TextOf(const Product& product);

class Matmul {
 public:
  // Whether oneDNN has kernels for one size here. Elsewhere it would run the same code for both,
  // and the second would only cost primitives.
  static bool HasSizedKernels();

  // Without `sized_kernels`, kThisSize is the same as kAnySize.
  explicit Matmul(bool sized_kernels = HasSizedKernels());
  ~Matmul();

  bool sized_kernels() const { return sized_kernels_; }
  // bfloat16 products need AVX-512 with BF16, and kernels for one size; elsewhere callers make
  // float32 copies first.
  bool HasBF16() const { return has_bf16_; }
  // Whether bfloat16 products of kAnySize use AMX.
  bool UsesAmx() const { return uses_amx_; }

  // Exactly what Run of this product takes. Pointers are not looked at. Thread-safe.
  int64_t ScratchBytes(const Product& product);

  // Throws if `scratch` is smaller than ScratchBytes of the product. Thread-safe: each caller
  // brings its own scratch. Does nothing for m or n of 0; k of 0 zeroes c unless `add`.
  void Run(const Product& product, std::span<std::byte> scratch);

 private:
  struct Cache;
  std::unique_ptr<Cache> cache_;
  bool sized_kernels_;
  bool has_bf16_;
  bool uses_amx_;
};

}  // namespace terrace
