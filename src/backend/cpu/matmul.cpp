#include "backend/cpu/matmul.h"

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <list>
#include <mutex>
#include <oneapi/dnnl/dnnl.hpp>
#include <unordered_map>

#include "core/arena.h"
#include "core/error.h"
#include "core/parallel.h"
#include "core/rng.h"

namespace terrace {
namespace {

// About 85 KiB of machine code each.
constexpr size_t kMaxPrimitives = 1024;

struct Key {
  int64_t m, n, k;
  int64_t a_stride, b_stride, c_stride;
  bool a_transposed, b_transposed, add, own_scratch;
  DType inputs, output;
  Kernel kernel;

  bool operator==(const Key&) const = default;
};

struct KeyHash {
  size_t operator()(const Key& key) const {
    const uint64_t flags = key.a_transposed | key.b_transposed << 1 | key.add << 2 |
                           key.own_scratch << 3 | static_cast<uint64_t>(key.inputs) << 8 |
                           static_cast<uint64_t>(key.output) << 16 |
                           static_cast<uint64_t>(key.kernel) << 24;
    return MixKeys(key.m, key.n, key.k, key.a_stride, key.b_stride, key.c_stride, flags);
  }
};

struct Primitive {
  dnnl::memory::desc scratchpad;
  dnnl::matmul matmul;
};

Key KeyOf(const Product& product, bool own_scratch) {
  TERRACE_CHECK(product.a.dtype == product.b.dtype, "inputs are {} and {}", NameOf(product.a.dtype),
                NameOf(product.b.dtype));
  return {.m = product.kernel == Kernel::kAnyM ? DNNL_RUNTIME_DIM_VAL : product.m,
          .n = product.n,
          .k = product.kernel == Kernel::kAnyK ? DNNL_RUNTIME_DIM_VAL : product.k,
          .a_stride = product.a.stride,
          .b_stride = product.b.stride,
          .c_stride = product.c.stride,
          .a_transposed = product.a.transposed,
          .b_transposed = product.b.transposed,
          .add = product.add,
          .own_scratch = own_scratch,
          .inputs = product.a.dtype,
          .output = product.c.dtype,
          .kernel = product.kernel};
}

dnnl::memory::data_type TypeOf(DType dtype) {
  TERRACE_CHECK(dtype == DType::kF32 || dtype == DType::kBF16, "no products of {}", NameOf(dtype));
  return dtype == DType::kF32 ? dnnl::memory::data_type::f32 : dnnl::memory::data_type::bf16;
}

struct Descriptors {
  dnnl::memory::desc a, b, c;
};

dnnl::memory::desc DescriptorOf(int64_t rows, int64_t columns, int64_t stride, bool transposed,
                                DType dtype) {
  const dnnl::memory::dims strides =
      transposed ? dnnl::memory::dims{1, stride} : dnnl::memory::dims{stride, 1};
  return {{rows, columns}, TypeOf(dtype), strides};
}

Descriptors DescriptorsOf(const Key& key) {
  return {DescriptorOf(key.m, key.k, key.a_stride, key.a_transposed, key.inputs),
          DescriptorOf(key.k, key.n, key.b_stride, key.b_transposed, key.inputs),
          DescriptorOf(key.m, key.n, key.c_stride, false, key.output)};
}

// oneDNN plans a product for the number of threads that OpenMP would use now, and some of its
// kernels ask again when they run. It is left one: all threads are in core/parallel.h, where those
// that wait do not take processors from others.
class OneThread {
 public:
  OneThread() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~OneThread() { omp_set_num_threads(before_); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int before_;
};

// How all threads share a product: some columns of the result each.
struct ColumnParts {
  explicit ColumnParts(const Product& product) : columns(product.n) {
    constexpr int64_t kLine = 16;  // no cache line belongs to two parts
    const int64_t lines = (columns + kLine - 1) / kLine;
    width = kLine * ((lines + MaxThreads() - 1) / MaxThreads());
    count = (columns + width - 1) / width;
  }

  Product Of(const Product& product, int64_t part) const {
    const int64_t first = part * width;
    Product result = product;
    result.n = std::min(width, columns - first);
    const int64_t b_elements = first * (product.b.transposed ? product.b.stride : 1);
    if (product.b.data != nullptr) result.b.data += b_elements * BytesOf(product.b.dtype);
    if (product.c.data != nullptr) result.c.data += first * BytesOf(product.c.dtype);
    return result;
  }

  // Of all parts, where bytes(product) is what a part needs.
  template <typename Bytes>
  int64_t ScratchBytes(const Product& product, const Bytes& bytes) const {
    if (count == 0) return 0;
    return count *
           Arena::Aligned(std::max<int64_t>(bytes(Of(product, 0)), bytes(Of(product, count - 1))));
  }

  int64_t columns, width, count;
};

}  // namespace

struct Matmul::Cache {
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  std::mutex mutex;
  std::list<std::pair<Key, std::shared_ptr<const Primitive>>> newest_first;
  std::unordered_map<Key, decltype(newest_first)::iterator, KeyHash> index;
  std::unordered_map<Key, int64_t, KeyHash> scratch_bytes;
  std::unordered_map<Key, int64_t, KeyHash> bounds;

  dnnl::matmul::primitive_desc Describe(const Key& key) {
    const OneThread one_thread;
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(key.own_scratch ? dnnl::scratchpad_mode::library
                                                   : dnnl::scratchpad_mode::user);
    if (key.add) {
      dnnl::post_ops add;
      add.append_sum(1.0f);
      attributes.set_post_ops(add);
    }
    return {
        dnnl::matmul::desc(DescriptorOf(key.m, key.k, key.a_stride, key.a_transposed, key.inputs),
                           DescriptorOf(key.k, key.n, key.b_stride, key.b_transposed, key.inputs),
                           DescriptorOf(key.m, key.n, key.c_stride, false, key.output)),
        attributes, engine};
  }

  std::shared_ptr<const Primitive> Get(const Key& key) {
    const std::lock_guard lock(mutex);
    if (const auto found = index.find(key); found != index.end()) {
      newest_first.splice(newest_first.begin(), newest_first, found->second);
      return found->second->second;
    }
    if (index.size() >= kMaxPrimitives) {
      index.erase(newest_first.back().first);
      newest_first.pop_back();
    }
    const OneThread one_thread;
    const dnnl::matmul::primitive_desc description = Describe(key);
    auto primitive = std::make_shared<const Primitive>(
        Primitive{description.scratchpad_desc(), dnnl::matmul(description)});
    newest_first.emplace_front(key, primitive);
    index.emplace(key, newest_first.begin());
    return primitive;
  }
};

Matmul::Matmul() : cache_(std::make_unique<Cache>()) {
  dnnl::set_primitive_cache_capacity(0);  // ours keeps them, without making a description first
  constexpr int kBF16 = static_cast<int>(dnnl::cpu_isa::avx512_core_bf16);
  has_bf16_ = (static_cast<int>(dnnl::get_effective_cpu_isa()) & kBF16) == kBF16;
}

Matmul::~Matmul() = default;

int64_t Matmul::ScratchBytes(const Product& product, bool parallel) {
  if (product.m == 0 || product.n == 0 || product.k == 0) return 0;
  if (parallel) {
    return ColumnParts(product).ScratchBytes(
        product, [&](const Product& part) { return ScratchBytes(part, /*parallel=*/false); });
  }
  const Key key = KeyOf(product, false);
  const std::lock_guard lock(cache_->mutex);
  // A plan of many experts asks thousands of times for few products.
  if (const auto found = cache_->scratch_bytes.find(key); found != cache_->scratch_bytes.end()) {
    return found->second;
  }
  const auto bytes = static_cast<int64_t>(cache_->Describe(key).scratchpad_desc().get_size());
  cache_->scratch_bytes.emplace(key, bytes);
  return bytes;
}

int64_t Matmul::ScratchBound(Product product, Axis axis, int64_t limit, bool parallel) {
  if (parallel) {
    return ColumnParts(product).ScratchBytes(product, [&](const Product& part) {
      return ScratchBound(part, axis, limit, /*parallel=*/false);
    });
  }
  if (product.kernel != Kernel::kBlocked) return ScratchBytes(product, /*parallel=*/false);
  int64_t& size = axis == Axis::kM ? product.m : product.k;
  size = limit;
  const Key family = KeyOf(product, false);
  if (const auto found = cache_->bounds.find(family); found != cache_->bounds.end()) {
    return found->second;
  }
  int64_t bound = 0;
  // Powers of two, one and a half times them, and their neighbours: where blockings change.
  for (int64_t power = 1; power <= limit; power *= 2) {
    for (int64_t sample : {power - 1, power, power + 1, power + power / 2}) {
      size = std::clamp<int64_t>(sample, 1, limit);
      bound = std::max(bound, ScratchBytes(product, /*parallel=*/false));
    }
  }
  size = limit;
  bound = std::max(bound, ScratchBytes(product, /*parallel=*/false));
  cache_->bounds.emplace(family, bound);
  return bound;
}

void Matmul::Run(const Product& product, bool parallel, std::byte* scratch, int64_t scratch_bytes) {
  if (product.m == 0 || product.n == 0) return;
  if (product.k == 0) {
    if (product.add) return;
    const int64_t element_bytes = BytesOf(product.c.dtype);
    for (int64_t row = 0; row < product.m; ++row) {
      std::memset(product.c.data + row * product.c.stride * element_bytes, 0,
                  static_cast<size_t>(product.n * element_bytes));
    }
    return;
  }
  if (parallel) {
    const ColumnParts parts(product);
    const int64_t part_bytes = scratch_bytes / parts.count / Arena::kAlignment * Arena::kAlignment;
    ParallelFor(parts.count, 1, [&](int64_t part, int64_t) {
      Run(parts.Of(product, part), /*parallel=*/false, scratch + part * part_bytes, part_bytes);
    });
    return;
  }
  Key key = KeyOf(product, false);
  std::shared_ptr<const Primitive> primitive = cache_->Get(key);
  const bool fits = static_cast<int64_t>(primitive->scratchpad.get_size()) <= scratch_bytes;
  if (!fits) {
    key.own_scratch = true;
    primitive = cache_->Get(key);
  }
  key.m = product.m;
  key.k = product.k;
  const Descriptors tensors = DescriptorsOf(key);

  dnnl::stream stream(cache_->engine);
  std::unordered_map<int, dnnl::memory> arguments = {
      {DNNL_ARG_SRC, dnnl::memory(tensors.a, cache_->engine, product.a.data)},
      {DNNL_ARG_WEIGHTS, dnnl::memory(tensors.b, cache_->engine, product.b.data)},
      {DNNL_ARG_DST, dnnl::memory(tensors.c, cache_->engine, product.c.data)}};
  if (fits) {
    arguments.emplace(DNNL_ARG_SCRATCHPAD,
                      dnnl::memory(primitive->scratchpad, cache_->engine, scratch));
  }
  const OneThread one_thread;
  primitive->matmul.execute(stream, arguments);
}

}  // namespace terrace
