#include "backend/cpu/matmul.h"

#include <omp.h>

#include <cstring>
#include <list>
#include <mutex>
#include <oneapi/dnnl/dnnl.hpp>
#include <unordered_map>

#include "backend/cpu/amx_products.h"
#include "core/error.h"
#include "core/rng.h"

namespace terrace {
namespace {

// About 85 KiB of machine code each.
constexpr size_t kMaxPrimitives = 1024;

// All that oneDNN is told of a product. Sizes and strides of products of any size are unknown.
struct Key {
  int64_t m, n, k;
  int64_t a_stride, b_stride, c_stride;
  bool a_transposed, b_transposed, add;
  DType inputs, output;

  bool operator==(const Key&) const = default;
};

struct KeyHash {
  size_t operator()(const Key& key) const {
    const uint64_t flags = key.a_transposed | key.b_transposed << 1 | key.add << 2 |
                           static_cast<uint64_t>(key.inputs) << 8 |
                           static_cast<uint64_t>(key.output) << 16;
    return MixKeys(key.m, key.n, key.k, key.a_stride, key.b_stride, key.c_stride, flags);
  }
};

struct Primitive {
  dnnl::memory::desc scratchpad;
  dnnl::matmul matmul;
};

// With what a call knows in any case: for kThisSize that is the primitive's key.
Key CallOf(const Product& product) {
  return {.m = product.m,
          .n = product.n,
          .k = product.k,
          .a_stride = product.a.stride,
          .b_stride = product.b.stride,
          .c_stride = product.c.stride,
          .a_transposed = product.a.transposed,
          .b_transposed = product.b.transposed,
          .add = product.add,
          .inputs = product.a.dtype,
          .output = product.c.dtype};
}

Key KeyOf(const Product& product, bool sized_kernels) {
  TERRACE_CHECK(product.a.dtype == product.b.dtype, "inputs are {} and {}", NameOf(product.a.dtype),
                NameOf(product.b.dtype));
  Key key = CallOf(product);
  if (product.kernel == Kernel::kThisSize && sized_kernels) return key;
  TERRACE_CHECK(product.c.dtype == DType::kF32, "{}: no kernel for any size", TextOf(product));
  key.m = key.n = key.k = DNNL_RUNTIME_DIM_VAL;
  key.a_stride = key.b_stride = key.c_stride = DNNL_RUNTIME_DIM_VAL;
  return key;
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

// While it lives, the calling thread is all that OpenMP would use: oneDNN plans a product for as
// many threads as there are when it is asked, and some of its kernels ask again when they run.
class OneThread {
 public:
  OneThread() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~OneThread() { omp_set_num_threads(before_); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int before_;
};

bool IsAmxProduct(const Product& product) {
  return product.kernel == Kernel::kAnySize && product.a.dtype == DType::kBF16;
}

bool MayUse(dnnl::cpu_isa isa) {
  const int wanted = static_cast<int>(isa);
  return (static_cast<int>(dnnl::get_effective_cpu_isa()) & wanted) == wanted;
}

std::string TextOf(int64_t rows, int64_t columns, bool transposed) {
  return transposed ? fmt::format("[{}, {}]^T", columns, rows)
                    : fmt::format("[{}, {}]", rows, columns);
}

}  // namespace

std::string TextOf(const Product& product) {
  return fmt::format("{} {} * {} to {}{}", NameOf(product.a.dtype),
                     TextOf(product.m, product.k, product.a.transposed),
                     TextOf(product.k, product.n, product.b.transposed), NameOf(product.c.dtype),
                     product.add ? ", added" : "");
}

struct Matmul::Cache {
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  std::mutex mutex;
  std::list<std::pair<Key, std::shared_ptr<const Primitive>>> newest_first;
  std::unordered_map<Key, decltype(newest_first)::iterator, KeyHash> index;
  std::unordered_map<Key, int64_t, KeyHash> scratch_bytes;

  dnnl::matmul::primitive_desc Describe(const Key& key) {
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    if (key.add) {
      dnnl::post_ops add;
      add.append_sum(1.0f);
      attributes.set_post_ops(add);
    }
    const Descriptors tensors = DescriptorsOf(key);
    return {dnnl::matmul::desc(tensors.a, tensors.b, tensors.c), attributes, engine};
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
    const dnnl::matmul::primitive_desc description = Describe(key);
    auto primitive = std::make_shared<const Primitive>(
        Primitive{description.scratchpad_desc(), dnnl::matmul(description)});
    newest_first.emplace_front(key, primitive);
    index.emplace(key, newest_first.begin());
    return primitive;
  }
};

bool Matmul::HasSizedKernels() { return MayUse(dnnl::cpu_isa::avx512_core); }

Matmul::Matmul(bool sized_kernels)
    : cache_(std::make_unique<Cache>()),
      sized_kernels_(sized_kernels),
      has_bf16_(sized_kernels && MayUse(dnnl::cpu_isa::avx512_core_bf16)),
      uses_amx_(has_bf16_ && HasAmx()) {
  dnnl::set_primitive_cache_capacity(0);  // ours keeps them, without making a description first
}

Matmul::~Matmul() = default;

int64_t Matmul::ScratchBytes(const Product& product) {
  if (uses_amx_ && IsAmxProduct(product)) return AmxScratchBytes(product);
  if (product.m == 0 || product.n == 0 || product.k == 0) return 0;
  const Key key = KeyOf(product, sized_kernels_);
  const std::lock_guard lock(cache_->mutex);
  // A plan of many experts asks thousands of times for few products.
  if (const auto found = cache_->scratch_bytes.find(key); found != cache_->scratch_bytes.end()) {
    return found->second;
  }
  const OneThread one_thread;
  const auto bytes = static_cast<int64_t>(cache_->Describe(key).scratchpad_desc().get_size());
  cache_->scratch_bytes.emplace(key, bytes);
  return bytes;
}

void Matmul::Run(const Product& product, std::span<std::byte> scratch) {
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
  if (uses_amx_ && IsAmxProduct(product)) {
    RunAmx(product, scratch.data(), static_cast<int64_t>(scratch.size()));
    return;
  }
  const OneThread one_thread;
  const std::shared_ptr<const Primitive> primitive = cache_->Get(KeyOf(product, sized_kernels_));
  TERRACE_CHECK(primitive->scratchpad.get_size() <= scratch.size(),
                "{} takes {} bytes of scratch, not {}", TextOf(product),
                primitive->scratchpad.get_size(), scratch.size());
  const Descriptors tensors = DescriptorsOf(CallOf(product));
  dnnl::stream stream(cache_->engine);
  primitive->matmul.execute(
      stream,
      {{DNNL_ARG_SRC, dnnl::memory(tensors.a, cache_->engine, product.a.data)},
       {DNNL_ARG_WEIGHTS, dnnl::memory(tensors.b, cache_->engine, product.b.data)},
       {DNNL_ARG_DST, dnnl::memory(tensors.c, cache_->engine, product.c.data)},
       {DNNL_ARG_SCRATCHPAD, dnnl::memory(primitive->scratchpad, cache_->engine, scratch.data())}});
}

}  // namespace terrace
