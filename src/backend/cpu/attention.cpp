// Causal attention. A task is one key/value head of one sequence: the queries of all heads that
// read it are stacked into one matrix, so that each product is wide enough to be worth it.
// Letters as in backend/backend.h; S = H / G query heads share a key/value head.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/matmul.h"
#include "backend/cpu/matrix_block.h"
#include "backend/cpu/softmax.h"
#include "core/parallel.h"

namespace terrace {
namespace {

// Stacked query rows per block: small blocks skip more of the keys that causality hides, large
// ones multiply faster.
constexpr int64_t kBlockRows = 256;
constexpr int64_t kMinQueries = 16;

// Sizes, and where a block of queries lies.
struct Geometry {
  AttentionShape shape;
  DType dtype;

  int64_t sharing() const { return shape.heads / shape.kv_heads; }  // S
  int64_t block_queries() const {
    return std::min(shape.query_length, std::max(kMinQueries, kBlockRows / sharing()));
  }
  int64_t block_rows() const { return sharing() * block_queries(); }
  int64_t blocks() const { return (shape.query_length + block_queries() - 1) / block_queries(); }
  int64_t query_stride() const { return shape.heads * shape.head_width; }
  int64_t key_stride() const { return shape.kv_heads * shape.head_width; }
  // New queries on old keys come with another number of keys each time: a kernel made for one size
  // would be used once. Those for any size write float32.
  bool training() const { return shape.query_length == shape.key_length; }
  Kernel kernel() const { return training() ? Kernel::kThisSize : Kernel::kAnySize; }
  DType output_dtype() const { return training() ? dtype : DType::kF32; }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(shape.head_width)); }
  // Scores are float32 rows; their bfloat16 form lies in the same rows.
  int64_t score_stride() const { return (shape.key_length + 15) / 16 * 16; }
  int64_t result_stride() const {
    return dtype == DType::kF32 ? score_stride() : 2 * score_stride();
  }
};

struct Block {
  int64_t first_query, queries, keys, rows;
};

Block BlockAt(const Geometry& g, int64_t index) {
  const int64_t first = index * g.block_queries();
  const int64_t queries = std::min(g.block_queries(), g.shape.query_length - first);
  return {first, queries, first + queries + g.shape.key_length - g.shape.query_length,
          g.sharing() * queries};
}

ScoreBlock ScoresOf(const Geometry& g, const Block& block) {
  return {.heads = g.sharing(),
          .queries = block.queries,
          .width = block.keys,
          .stride = g.score_stride(),
          .first_visible = block.first_query + 1 + g.shape.key_length - g.shape.query_length,
          .scale = g.scale(),
          .output = g.dtype};
}

// Where task (sequence, kv head)'s data starts in each tensor.
struct Head {
  int64_t query_offset, key_offset, log_sum_offset;  // elements

  Head(const Geometry& g, int64_t task) {
    const int64_t sequence = task / g.shape.kv_heads;
    const int64_t kv_head = task % g.shape.kv_heads;
    query_offset = sequence * g.shape.query_length * g.query_stride() +
                   kv_head * g.sharing() * g.shape.head_width;
    key_offset = sequence * g.shape.key_length * g.key_stride() + kv_head * g.shape.head_width;
    log_sum_offset = (sequence * g.shape.heads + kv_head * g.sharing()) * g.shape.query_length;
  }
};

// Calls visit(packed row, element offset from the head's query_offset) for each stacked row.
template <typename Visit>
void ForRows(const Geometry& g, const Block& block, const Visit& visit) {
  int64_t row = 0;
  for (int64_t head = 0; head < g.sharing(); ++head) {
    for (int64_t query = 0; query < block.queries; ++query, ++row) {
      visit(row, (block.first_query + query) * g.query_stride() + head * g.shape.head_width);
    }
  }
}

void Pack(const Geometry& g, const Block& block, const std::byte* from, std::byte* packed) {
  const int64_t bytes = BytesOf(g.dtype);
  const int64_t row_bytes = g.shape.head_width * bytes;
  ForRows(g, block, [&](int64_t row, int64_t offset) {
    std::memcpy(packed + row * row_bytes, from + offset * bytes, static_cast<size_t>(row_bytes));
  });
}

void Unpack(const Geometry& g, const Block& block, const MatrixBlock& packed, std::byte* to) {
  const MatrixBlock heads{to, g.dtype, 0};
  ForRows(g, block, [&](int64_t row, int64_t offset) {
    CopyBlock(packed.At(row, 0), 1, g.shape.head_width, heads.At(0, offset));
  });
}

// log_sums are [H, Tq] per sequence; a stacked block's are [S, queries].
template <typename Visit>
void ForLogSums(const Geometry& g, const Block& block, const Visit& visit) {
  for (int64_t head = 0; head < g.sharing(); ++head) {
    visit(head * block.queries, head * g.shape.query_length + block.first_query);
  }
}

// One thread's buffers.
struct Buffers {
  std::byte* queries;     // [rows, C]
  std::byte* outputs;     // [rows, C]
  std::byte* scores;      // f32 [rows, score_stride]
  std::byte* gradients;   // f32 [rows, score_stride]
  std::byte* log_sums;    // f32 [rows]
  std::byte* deltas;      // f32 [rows]
  std::byte* key_sums;    // f32 [Tk, C]
  std::byte* value_sums;  // f32 [Tk, C]
  std::span<std::byte> pad;
};

// The products of a block. f: forward, also used by backward.
struct Products {
  Product scores;        // [rows, keys] = queries * K^T
  Product outputs;       // [rows, C] = P * V
  Product dprobability;  // [rows, keys] = dout * V^T
  Product dqueries;      // [rows, C] = dS * K
  Product dkeys;         // f32 [keys, C] += dS^T * queries
  Product dvalues;       // f32 [keys, C] += P^T * dout
};

Products ProductsOf(const Geometry& g, const Block& block, const Buffers& b, std::byte* k,
                    std::byte* v) {
  const int64_t c = g.shape.head_width;
  const Operand queries{b.queries, g.dtype, c};
  const Operand outputs{b.outputs, g.output_dtype(), c};
  const Operand probabilities{b.scores, g.dtype, g.result_stride()};
  const Operand dscores{b.gradients, g.dtype, g.result_stride()};
  const auto transposed = [](Operand operand) {
    operand.transposed = true;
    return operand;
  };
  const Operand keys{k, g.dtype, g.key_stride()};
  const Operand values{v, g.dtype, g.key_stride()};
  const auto product = [&](int64_t m, int64_t n, int64_t depth, const Operand& left,
                           const Operand& right, const Operand& result) {
    return Product{m, n, depth, left, right, result, /*add=*/false, g.kernel()};
  };
  const auto sum = [&](const Operand& left, const Operand& right, std::byte* result) {
    Product added =
        product(block.keys, c, block.rows, transposed(left), right, {result, DType::kF32, c});
    added.add = true;
    return added;
  };
  return {.scores = product(block.rows, block.keys, c, queries, transposed(keys),
                            {b.scores, DType::kF32, g.score_stride()}),
          .outputs = product(block.rows, c, block.keys, probabilities, values, outputs),
          .dprobability = product(block.rows, block.keys, c, outputs, transposed(values),
                                  {b.gradients, DType::kF32, g.score_stride()}),
          // Written over dout, which no later product of the block reads.
          .dqueries = product(block.rows, c, block.keys, dscores, keys, outputs),
          .dkeys = sum(dscores, queries, b.key_sums),
          .dvalues = sum(probabilities, outputs, b.value_sums)};
}

// Allocates every thread's buffers; `backward` adds what only backward needs.
std::vector<Buffers> AllocateBuffers(const Geometry& g, bool backward, Arena& arena,
                                     Matmul& matmul) {
  int64_t pad_bytes = 0;
  for (int64_t index = 0; index < g.blocks(); ++index) {
    const Products products = ProductsOf(g, BlockAt(g, index), {}, nullptr, nullptr);
    for (const Product* product : {&products.scores, &products.outputs}) {
      pad_bytes = std::max(pad_bytes, matmul.ScratchBytes(*product));
    }
    if (!backward) continue;
    for (const Product* product :
         {&products.dprobability, &products.dqueries, &products.dkeys, &products.dvalues}) {
      pad_bytes = std::max(pad_bytes, matmul.ScratchBytes(*product));
    }
  }
  const auto allocate = [&](DType dtype, Shape shape, const char* name) {
    return arena.Allocate(Memory::kScratch, dtype, shape, name).data;
  };
  const int64_t rows = g.block_rows();
  const int64_t c = g.shape.head_width;
  const int64_t keys = g.shape.key_length;
  std::vector<Buffers> all;
  for (int64_t thread = 0; thread < MaxThreads(); ++thread) {
    Buffers b{};
    b.queries = allocate(g.dtype, {rows, c}, "attention.queries");
    b.outputs = allocate(g.output_dtype(), {rows, c}, "attention.outputs");
    b.scores = allocate(DType::kF32, {rows, g.score_stride()}, "attention.scores");
    b.log_sums = allocate(DType::kF32, {rows}, "attention.log_sums");
    b.pad = {allocate(DType::kU8, {pad_bytes}, "attention.scratchpad"),
             static_cast<size_t>(pad_bytes)};
    if (backward) {
      b.gradients = allocate(DType::kF32, {rows, g.score_stride()}, "attention.dscores");
      b.deltas = allocate(DType::kF32, {rows}, "attention.deltas");
      b.key_sums = allocate(DType::kF32, {keys, c}, "attention.dkeys");
      b.value_sums = allocate(DType::kF32, {keys, c}, "attention.dvalues");
    }
    all.push_back(b);
  }
  return all;
}

std::byte* At(TensorView view, int64_t element) {
  return view.data + element * BytesOf(view.dtype);
}

// Rows of float32 sums [keys, C] into their place in a strided tensor.
void StoreSums(const Geometry& g, const float* sums, std::byte* to) {
  for (int64_t key = 0; key < g.shape.key_length; ++key) {
    const float* row = sums + key * g.shape.head_width;
    if (g.dtype == DType::kF32) {
      std::memcpy(reinterpret_cast<float*>(to) + key * g.key_stride(), row,
                  static_cast<size_t>(g.shape.head_width) * sizeof(float));
    } else {
      BF16* out = reinterpret_cast<BF16*>(to) + key * g.key_stride();
      for (int64_t c = 0; c < g.shape.head_width; ++c) out[c] = ToBF16(row[c]);
    }
  }
}

void CheckAttention(const AttentionShape& s, TensorView q, TensorView k, TensorView v) {
  const Shape queries{s.batch * s.query_length, s.heads * s.head_width};
  const Shape keys{s.batch * s.key_length, s.kv_heads * s.head_width};
  TERRACE_CHECK(s.heads % s.kv_heads == 0 && s.key_length >= s.query_length && q.shape == queries &&
                    k.shape == keys && v.shape == keys && q.dtype == k.dtype && q.dtype == v.dtype,
                "{} {}, {} {}, {} {}", q.name, q.shape.ToString(), k.name, k.shape.ToString(),
                v.name, v.shape.ToString());
}

}  // namespace

void CpuBackend::Attention(const AttentionShape& shape, TensorView q, TensorView k, TensorView v,
                           TensorView out, TensorView log_sums) {
  CheckAttention(shape, q, k, v);
  const Arena::Frame frame(arena());
  if (q.dtype == DType::kBF16 && !matmul_->HasBF16()) {
    const auto upcast = [&](TensorView view) {
      return arena().Allocate(Memory::kScratch, DType::kF32, view.shape, view.name);
    };
    const TensorView wide[] = {upcast(q), upcast(k), upcast(v), upcast(out)};
    Copy(q, wide[0]);
    Copy(k, wide[1]);
    Copy(v, wide[2]);
    Attention(shape, wide[0], wide[1], wide[2], wide[3], log_sums);
    Copy(wide[3], out);
    return;
  }

  const Geometry g{shape, q.dtype};
  const std::vector<Buffers> buffers = AllocateBuffers(g, /*backward=*/false, arena(), *matmul_);
  if (dry()) return;
  float* const sums = log_sums.as<float>();
  ParallelFor(shape.batch * shape.kv_heads, 1, [&](int64_t task, int64_t) {
    const Buffers& b = buffers[static_cast<size_t>(ThreadNumber())];
    const Head head(g, task);
    float* const block_sums = reinterpret_cast<float*>(b.log_sums);
    for (int64_t index = 0; index < g.blocks(); ++index) {
      const Block block = BlockAt(g, index);
      const Products products =
          ProductsOf(g, block, b, At(k, head.key_offset), At(v, head.key_offset));
      Pack(g, block, At(q, head.query_offset), b.queries);
      matmul_->Run(products.scores, b.pad);
      SoftmaxScores(ScoresOf(g, block), reinterpret_cast<float*>(b.scores), block_sums);
      matmul_->Run(products.outputs, b.pad);
      Unpack(g, block, {b.outputs, g.output_dtype(), shape.head_width}, At(out, head.query_offset));
      ForLogSums(g, block, [&](int64_t stacked, int64_t offset) {
        std::copy_n(block_sums + stacked, block.queries, sums + head.log_sum_offset + offset);
      });
    }
  });
}

void CpuBackend::AttentionBackward(const AttentionShape& shape, TensorView q, TensorView k,
                                   TensorView v, TensorView out, TensorView log_sums,
                                   TensorView dout, TensorView dq, TensorView dk, TensorView dv) {
  CheckAttention(shape, q, k, v);
  TERRACE_CHECK(shape.query_length == shape.key_length, "{} queries of {} keys", shape.query_length,
                shape.key_length);
  const Arena::Frame frame(arena());
  if (q.dtype == DType::kBF16 && !matmul_->HasBF16()) {
    const auto upcast = [&](TensorView view) {
      return arena().Allocate(Memory::kScratch, DType::kF32, view.shape, view.name);
    };
    const TensorView narrow[] = {q, k, v, out, dout};
    TensorView wide[5];
    for (int i = 0; i < 5; ++i) {
      wide[i] = upcast(narrow[i]);
      Copy(narrow[i], wide[i]);
    }
    const TensorView upcast_dq = upcast(dq), upcast_dk = upcast(dk), upcast_dv = upcast(dv);
    AttentionBackward(shape, wide[0], wide[1], wide[2], wide[3], log_sums, wide[4], upcast_dq,
                      upcast_dk, dk.data == dv.data ? upcast_dk : upcast_dv);
    Copy(upcast_dq, dq);
    Copy(upcast_dk, dk);
    if (dk.data != dv.data) Copy(upcast_dv, dv);
    return;
  }

  const Geometry g{shape, q.dtype};
  const std::vector<Buffers> buffers = AllocateBuffers(g, /*backward=*/true, arena(), *matmul_);
  if (dry()) return;
  const float* const sums = log_sums.as<float>();
  const size_t sums_bytes =
      static_cast<size_t>(shape.key_length * shape.head_width) * sizeof(float);
  ParallelFor(shape.batch * shape.kv_heads, 1, [&](int64_t task, int64_t) {
    const Buffers& b = buffers[static_cast<size_t>(ThreadNumber())];
    const Head head(g, task);
    float* const block_sums = reinterpret_cast<float*>(b.log_sums);
    float* const deltas = reinterpret_cast<float*>(b.deltas);
    std::memset(b.key_sums, 0, sums_bytes);
    std::memset(b.value_sums, 0, sums_bytes);
    for (int64_t index = 0; index < g.blocks(); ++index) {
      const Block block = BlockAt(g, index);
      const Products products =
          ProductsOf(g, block, b, At(k, head.key_offset), At(v, head.key_offset));
      Pack(g, block, At(q, head.query_offset), b.queries);
      Pack(g, block, At(dout, head.query_offset), b.outputs);
      ForRows(g, block, [&](int64_t row, int64_t offset) {
        deltas[row] = Dot(g.dtype, At(out, head.query_offset + offset),
                          At(dout, head.query_offset + offset), shape.head_width);
      });
      ForLogSums(g, block, [&](int64_t stacked, int64_t offset) {
        std::copy_n(sums + head.log_sum_offset + offset, block.queries, block_sums + stacked);
      });
      matmul_->Run(products.scores, b.pad);
      matmul_->Run(products.dprobability, b.pad);
      SoftmaxScoresBackward(ScoresOf(g, block), reinterpret_cast<float*>(b.scores),
                            reinterpret_cast<float*>(b.gradients), block_sums, deltas);
      matmul_->Run(products.dvalues, b.pad);
      matmul_->Run(products.dkeys, b.pad);
      matmul_->Run(products.dqueries, b.pad);
      Unpack(g, block, {b.outputs, g.dtype, shape.head_width}, At(dq, head.query_offset));
    }
    float* const key_sums = reinterpret_cast<float*>(b.key_sums);
    const float* const value_sums = reinterpret_cast<float*>(b.value_sums);
    if (dk.data == dv.data) {
      const int64_t count = shape.key_length * shape.head_width;
      std::transform(key_sums, key_sums + count, value_sums, key_sums, std::plus<>());
    } else {
      StoreSums(g, value_sums, At(dv, head.key_offset));
    }
    StoreSums(g, key_sums, At(dk, head.key_offset));
  });
}

}  // namespace terrace
