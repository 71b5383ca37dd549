// The head and the cross-entropy, fused and chunked over tokens: only some rows of logits exist
// at a time. Letters as in backend/backend.h.
#include <algorithm>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/matmul.h"
#include "backend/cpu/softmax.h"
#include "core/parallel.h"

namespace terrace {
namespace {

// A chunk's logits take about this much. Larger chunks add to dw less often, which costs reading
// and writing it; smaller ones stay in cache.
constexpr int64_t kLogitsBytes = int64_t{32} << 20;
constexpr int64_t kMinChunkTokens = 256;
constexpr int64_t kChunkMultiple = 64;
constexpr int64_t kRowsPerTask = 8;

int64_t ChunkTokens(int64_t tokens, int64_t vocabulary) {
  const int64_t fitting = kLogitsBytes / (vocabulary * BytesOf(DType::kF32));
  const int64_t chunk = std::max(kMinChunkTokens, fitting / kChunkMultiple * kChunkMultiple);
  // Chunks of equal size, so that none is left with a handful of tokens.
  const int64_t chunks = (tokens + chunk - 1) / chunk;
  const int64_t equal = (tokens + chunks - 1) / std::max<int64_t>(chunks, 1);
  return std::min(tokens, (equal + kChunkMultiple - 1) / kChunkMultiple * kChunkMultiple);
}

}  // namespace

double CpuBackend::HeadLoss(TensorView x, TensorView w, TensorView targets, float loss_scale,
                            TensorView dx, TensorView dw, Adding add_dw) {
  const int64_t tokens = x.rows();      // N
  const int64_t vocabulary = w.rows();  // V
  const bool gradient = !dx.empty();
  TERRACE_CHECK(x.columns() == w.columns() && targets.size() == tokens && x.dtype == w.dtype &&
                    (!gradient || (dx.shape == x.shape && dw.shape == w.shape)),
                "{} {}, {} {}, {} {}", x.name, x.shape.ToString(), w.name, w.shape.ToString(),
                targets.name, targets.shape.ToString());
  const Arena::Frame frame(arena());
  const int64_t chunk = ChunkTokens(tokens, vocabulary);
  const TensorView logits =
      arena().Allocate(Memory::kScratch, DType::kF32, {chunk, vocabulary}, "head.logits");
  // The gradient of the logits, in the dtype of the products that use it: products that upcast
  // their inputs take it as it is.
  TensorView dlogits = logits;
  if (gradient && x.dtype == DType::kBF16 && matmul_->HasBF16()) {
    dlogits = arena().Allocate(Memory::kScratch, x.dtype, {chunk, vocabulary}, "head.dlogits");
  }
  std::vector<float> losses(dry() ? 0 : static_cast<size_t>(tokens));

  for (int64_t first = 0; first < tokens; first += chunk) {
    const int64_t rows = std::min(chunk, tokens - first);
    const TensorView chunk_logits = logits.Rows(0, rows);
    const TensorView chunk_dlogits = dlogits.Rows(0, rows);
    const TensorView chunk_x = x.Rows(first, rows);
    Linear(chunk_x, w, chunk_logits, /*add=*/false);
    if (!dry()) {
      ParallelFor(rows, kRowsPerTask, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          float* const row_logits = chunk_logits.as<float>() + row * vocabulary;
          const TensorView row_dlogits = gradient ? chunk_dlogits.Rows(row, 1) : TensorView{};
          const int32_t target = targets.as<int32_t>()[first + row];
          if (target == kIgnoredTarget) {
            std::fill_n(row_dlogits.data, gradient ? row_dlogits.bytes() : 0, std::byte{0});
            continue;
          }
          TERRACE_CHECK(target >= 0 && target < vocabulary, "target {} of {} at token {}", target,
                        vocabulary, first + row);
          losses[static_cast<size_t>(first + row)] = CrossEntropyRow(
              row_logits, vocabulary, target, loss_scale, row_dlogits.data, dlogits.dtype);
        }
      });
    }
    if (!gradient) continue;
    LinearBackwardInput(chunk_dlogits, w, dx.Rows(first, rows), /*add=*/false);
    LinearBackwardWeight(chunk_dlogits, chunk_x, dw,
                         {add_dw || first > 0, MixKeys(add_dw.rounding_key, first)});
  }
  double sum = 0;
  for (const float loss : losses) sum += loss;
  return sum;
}

}  // namespace terrace
