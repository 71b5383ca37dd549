// Products of bfloat16 matrices on Intel's AMX, where a tile of 16 x 16 sums takes 16 x 32 products
// in one instruction. Unlike oneDNN's primitives these kernels are made for no size in particular:
// nothing is generated or cached, and a product of another row count costs nothing extra.
//
// Inputs are bfloat16, sums float32, results float32 or bfloat16 (rounded once, to nearest, ties to
// even). Subnormal numbers count as zero, in inputs and in results: the hardware does so. Sums run
// over k in ascending order in steps of 32, so that a result does not depend on how many other rows
// or columns the call has: callers may split a product by rows of c as they like.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "backend/cpu/matmul.h"

namespace terrace {

// Whether this process may run these kernels: the processor and the operating system have AMX with
// bfloat16, the system granted its use (asked for at the first call, for the whole process), and
// CapInstructionSet has not ruled it out. The first call fixes the cap, as a Matmul does.
bool HasAmx();

// The three products of a linear layer y[N, O] = x[N, I] * w[O, I]^T.
enum class AmxKind : uint8_t {
  kForward,         // y[N, O] = x[N, I] * w[O, I]^T: b is transposed
  kInputGradient,   // dx[N, I] = dy[N, O] * w[O, I]: neither is
  kWeightGradient,  // dw[O, I] = dy[N, O]^T * x[N, I]: a is transposed
};

// Throws if a and b are both transposed.
AmxKind AmxKindOf(const Product& product);

// Up to how many rows of tokens (of N) in one call these kernels are taken rather than oneDNN's, by
// kind. oneDNN's kernel for gradients of weights over any number of tokens does not use tiles; its
// kernels for one size do, and win on wide batches. From figures of a prototype of this design on
// Sapphire Rapids; bench_amx_products measures both sides of every limit.
inline constexpr int64_t kAmxMaxRows[] = {
    /*kForward*/ 128,
    /*kInputGradient*/ 128,
    /*kWeightGradient*/ std::numeric_limits<int64_t>::max(),
};

// Whether RunAmx takes the product (its dtypes and transposes) and is the faster one by the table
// above. Looks at no pointers, and not at whether the processor has AMX: see HasAmx.
bool PrefersAmx(const Product& product);

// How a product is cut. One operand, the tokens' (dy in gradients of weights), is packed in blocks
// that stay in the second-level cache; the other is packed a panel at a time and meets all of the
// block. All are multiples of 32.
struct AmxBlocking {
  int64_t block;  // rows or columns of c for which the resident operand is packed at a time
  int64_t depth;  // of k, packed at a time
  int64_t panel;  // columns or rows of c for which the other operand is packed at a time
  // Columns or rows of c over which sums are kept in scratch while k goes on; only where c itself
  // cannot hold them, being bfloat16 or written transposed, and k may exceed `depth`.
  int64_t group;
};

// Depends on the widths of the layer only, never on the number of tokens.
AmxBlocking AmxBlockingOf(const Product& product);

// Bytes of scratch of this product, at most about 3 MiB for widths up to 32,768. Depends on the
// kind, the widths and the dtype of c, never on the number of tokens (m, or k in gradients of
// weights), nor on pointers and `add`.
int64_t AmxScratchBytes(const Product& product, const AmxBlocking& blocking);
inline int64_t AmxScratchBytes(const Product& product) {
  return AmxScratchBytes(product, AmxBlockingOf(product));
}

// Runs the product on the calling thread; `kernel` is ignored. Any sizes from 0 on, any strides and
// alignment. `scratch` is aligned to 64 bytes, and of this call alone: with that, thread-safe. Does
// nothing for m or n of 0; k of 0 zeroes c unless `add`. c must not overlap a, b or scratch. Only
// where HasAmx().
//
// Where c is float32 and not kForward, an added product starts its sums from c; otherwise c is
// added to the finished sum.
void RunAmx(const Product& product, const AmxBlocking& blocking, std::byte* scratch,
            int64_t scratch_bytes);
inline void RunAmx(const Product& product, std::byte* scratch, int64_t scratch_bytes) {
  RunAmx(product, AmxBlockingOf(product), scratch, scratch_bytes);
}

}  // namespace terrace
