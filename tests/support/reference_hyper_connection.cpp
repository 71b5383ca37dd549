#include "core/error.h"
#include "support/reference_backend.h"

namespace terrace {

void ReferenceBackend::HyperWeights(const HyperConnection&, TensorView x, float, TensorView,
                                    TensorView, TensorView, TensorView, TensorView) {
  TERRACE_CHECK(false, "{}", x.name);
}
void ReferenceBackend::HyperWeightsBackward(const HyperConnection&, TensorView x, TensorView,
                                            TensorView, TensorView, TensorView, TensorView,
                                            TensorView, TensorView, TensorView, bool, TensorView,
                                            bool) {
  TERRACE_CHECK(false, "{}", x.name);
}
void ReferenceBackend::HyperRead(const HyperConnection&, TensorView x, TensorView, TensorView) {
  TERRACE_CHECK(false, "{}", x.name);
}
void ReferenceBackend::HyperReadBackward(const HyperConnection&, TensorView, TensorView x,
                                         TensorView, TensorView, TensorView) {
  TERRACE_CHECK(false, "{}", x.name);
}
void ReferenceBackend::HyperWrite(const HyperConnection&, TensorView x, TensorView, TensorView,
                                  TensorView) {
  TERRACE_CHECK(false, "{}", x.name);
}
void ReferenceBackend::HyperWriteBackward(const HyperConnection&, TensorView x, TensorView,
                                          TensorView, TensorView, TensorView, TensorView) {
  TERRACE_CHECK(false, "{}", x.name);
}
void ReferenceBackend::HyperSpread(const HyperConnection&, TensorView, TensorView x) {
  TERRACE_CHECK(false, "{}", x.name);
}
void ReferenceBackend::HyperSpreadBackward(const HyperConnection&, TensorView dx, TensorView) {
  TERRACE_CHECK(false, "{}", dx.name);
}

}  // namespace terrace
