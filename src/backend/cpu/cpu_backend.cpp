#include "backend/cpu/cpu_backend.h"

#include <hwy/targets.h>

#if HWY_ARCH_X86
#include <immintrin.h>
#endif

#include <oneapi/dnnl/dnnl.hpp>

#include "backend/cpu/matmul.h"

namespace terrace {

namespace {

// Saturated softmax scores and the momentum of rows without gradients decay into numbers below the
// smallest normal one, where x86 computes a hundred times slower: a diverged run took five times as
// long as a healthy one. Other processors do not slow down there. Loops hand the mode on to their
// threads.
void FlushSubnormals() {
#if HWY_ARCH_X86
  _MM_SET_FLUSH_ZERO_MODE(_MM_FLUSH_ZERO_ON);
  _MM_SET_DENORMALS_ZERO_MODE(_MM_DENORMALS_ZERO_ON);
#endif
}

}  // namespace

CpuBackend::CpuBackend(Arena& arena) : CpuBackend(arena, std::make_unique<Matmul>()) {}

CpuBackend::CpuBackend(Arena& arena, std::unique_ptr<Matmul> matmul)
    : Backend(arena), matmul_(std::move(matmul)) {
  if (!dry()) FlushSubnormals();
}

CpuBackend::~CpuBackend() = default;

void CapInstructionSet(std::string_view name) {
  if (name == "avx2") {
    dnnl::set_max_cpu_isa(dnnl::cpu_isa::avx2);
    hwy::DisableTargets(HWY_AVX3 | HWY_AVX3_DL);
  } else if (name == "avx512") {
    dnnl::set_max_cpu_isa(dnnl::cpu_isa::avx512_core);
  } else if (name == "avx512_bf16") {
    dnnl::set_max_cpu_isa(dnnl::cpu_isa::avx512_core_bf16);
  } else {
    Fail("instruction set {}: known are avx2, avx512 and avx512_bf16", name);
  }
}

}  // namespace terrace
