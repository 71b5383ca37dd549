#include "backend/cpu/cpu_backend.h"

#include <hwy/targets.h>

#include <oneapi/dnnl/dnnl.hpp>

#include "backend/cpu/matmul.h"

namespace terrace {

CpuBackend::CpuBackend(Arena& arena) : Backend(arena), matmul_(std::make_unique<Matmul>()) {}

CpuBackend::~CpuBackend() = default;

void CapInstructionSet(std::string_view name) {
  if (name == "avx2") {
    dnnl::set_max_cpu_isa(dnnl::cpu_isa::avx2);
    hwy::DisableTargets(HWY_AVX3 | HWY_AVX3_DL);
  } else if (name == "avx512") {
    dnnl::set_max_cpu_isa(dnnl::cpu_isa::avx512_core);
  } else {
    Fail("instruction set {}: known are avx2 and avx512", name);
  }
}

}  // namespace terrace
