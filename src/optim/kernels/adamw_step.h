// The constants of an update with Adam's two moments.
#pragma once

namespace terrace::kernels {

struct AdamWStep {
  float gradient_scale;
  double beta1;
  double beta2;
  float keep;                // of the weight: 1 - lr * decay
  float rate;                // lr / (1 - beta1^s)
  float inverse_correction;  // 1 / sqrt(1 - beta2^s)
  float eps;
};

}  // namespace terrace::kernels
