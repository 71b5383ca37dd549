#include "backend/cpu/cpu_backend.h"
#include "core/error.h"

namespace terrace {

void CpuBackend::HyperWeights(const HyperConnection&, TensorView x, float, TensorView, TensorView,
                              TensorView, TensorView, TensorView) {
  TERRACE_CHECK(false, "{}", x.name);
}
void CpuBackend::HyperWeightsBackward(const HyperConnection&, TensorView x, TensorView, TensorView,
                                      TensorView, TensorView, TensorView, TensorView, TensorView,
                                      TensorView, bool, TensorView, bool) {
  TERRACE_CHECK(false, "{}", x.name);
}
void CpuBackend::HyperRead(const HyperConnection&, TensorView x, TensorView, TensorView) {
  TERRACE_CHECK(false, "{}", x.name);
}
void CpuBackend::HyperReadBackward(const HyperConnection&, TensorView, TensorView x, TensorView,
                                   TensorView, TensorView) {
  TERRACE_CHECK(false, "{}", x.name);
}
void CpuBackend::HyperWrite(const HyperConnection&, TensorView x, TensorView, TensorView,
                            TensorView) {
  TERRACE_CHECK(false, "{}", x.name);
}
void CpuBackend::HyperWriteBackward(const HyperConnection&, TensorView x, TensorView, TensorView,
                                    TensorView, TensorView, TensorView) {
  TERRACE_CHECK(false, "{}", x.name);
}
void CpuBackend::HyperSpread(const HyperConnection&, TensorView, TensorView x) {
  TERRACE_CHECK(false, "{}", x.name);
}
void CpuBackend::HyperSpreadBackward(const HyperConnection&, TensorView dx, TensorView) {
  TERRACE_CHECK(false, "{}", dx.name);
}

}  // namespace terrace
