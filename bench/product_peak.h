// The yardstick of matrix products: what oneDNN reaches on this machine.
#pragma once

#include <algorithm>
#include <cstdint>
#include <oneapi/dnnl/dnnl.hpp>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/matmul.h"
#include "bench_support.h"
#include "core/arena.h"

namespace terrace {

// Operations per second of a product of two 2048 x 2048 matrices, as oneDNN itself runs it on all
// threads; of float32 where the machine has no bfloat16 products, since training takes those there
// too.
class ProductPeak {
 public:
  explicit ProductPeak(DType dtype)
      : dtype_(Matmul().HasBF16() ? dtype : DType::kF32),
        description_(dnnl::matmul::desc(Matrix(), Matrix(), Matrix()), engine_),
        product_(description_) {}

  DType dtype() const { return dtype_; }

  double FlopsPerSecond() {
    double best = 0;
    for (int repeat = 0; repeat < 8; ++repeat) {
      const double seconds = SecondsOf([&] {
        product_.execute(stream_, {{DNNL_ARG_SRC, a_}, {DNNL_ARG_WEIGHTS, b_}, {DNNL_ARG_DST, c_}});
        stream_.wait();
      });
      best = std::max(best, 2.0 * kSize * kSize * kSize / seconds);
    }
    return best;
  }

 private:
  static constexpr int64_t kSize = 2048;

  dnnl::memory::desc Matrix() const {
    const auto type =
        dtype_ == DType::kBF16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
    return {{kSize, kSize}, type, dnnl::memory::format_tag::ab};
  }
  // Of zeros.
  dnnl::memory Allocate() {
    const TensorView view = arena_.Allocate(Memory::kScratch, dtype_, {kSize, kSize}, "peak");
    CpuBackend(arena_).Zero(view);
    return {Matrix(), engine_, view.data};
  }

  DType dtype_;
  Arena arena_{int64_t{64} << 20};
  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream_{engine_};
  dnnl::matmul::primitive_desc description_;
  dnnl::matmul product_;
  dnnl::memory a_ = Allocate();
  dnnl::memory b_ = Allocate();
  dnnl::memory c_ = Allocate();
};

}  // namespace terrace
