#include "backend/cpu/cpu_backend.h"
#include "core/error.h"

namespace terrace {

void CpuBackend::BlockLinear(int64_t, TensorView x, TensorView, TensorView) {
  TERRACE_CHECK(false, "{}", x.name);
}
void CpuBackend::BlockLinearBackwardInput(int64_t, TensorView dy, TensorView, TensorView) {
  TERRACE_CHECK(false, "{}", dy.name);
}
void CpuBackend::BlockLinearBackwardWeight(int64_t, TensorView dy, TensorView, TensorView, Adding) {
  TERRACE_CHECK(false, "{}", dy.name);
}

}  // namespace terrace
