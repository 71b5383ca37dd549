#include "core/error.h"
#include "support/reference_backend.h"

namespace terrace {

void ReferenceBackend::BlockLinear(int64_t, TensorView x, TensorView, TensorView) {
  TERRACE_CHECK(false, "{}", x.name);
}
void ReferenceBackend::BlockLinearBackwardInput(int64_t, TensorView dy, TensorView, TensorView) {
  TERRACE_CHECK(false, "{}", dy.name);
}
void ReferenceBackend::BlockLinearBackwardWeight(int64_t, TensorView dy, TensorView, TensorView,
                                                 Adding) {
  TERRACE_CHECK(false, "{}", dy.name);
}

}  // namespace terrace
