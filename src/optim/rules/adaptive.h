// Updates that divide by the root of a second moment and are bounded by their root mean square, as
// skewadam and adafactor make them; g is the scaled gradient:
//   second moment, factored (matrices): R, C the row and column means of g^2 + added
//     vr <- beta2 vr + (1 - beta2) R,   vc <- beta2 vc + (1 - beta2) C
//     denominator_ij = sqrt(max(vr_i / max(mean(vr), smallest_mean), row_floor))
//                      * sqrt(max(vc_j, floor))
//   exact: v <- beta2 v + (1 - beta2) (g^2 + added),   denominator = sqrt(max(v, floor))
//   x = g, or the momentum m <- beta1 m + (1 - beta1) g
//   u = correction * x / denominator,   u <- u / max(1, RMS(u) / rms_clip)
//   w <- w (1 - lr * decay) - lr * u, or of an average a <- beta1 a + (1 - beta1) u in place of u
#pragma once

#include <vector>

#include "core/tensor.h"
#include "optim/kernels/block_quantization.h"
#include "optim/rule.h"

namespace terrace {

// What remains positive where all gradients are zero; its root and its inverse are normal floats.
inline constexpr double kSmallestMoment = 1e-30;

struct AdaptiveStep {
  kernels::Stored momentum = TensorView{};  // of gradients; empty: none
  kernels::Stored average = TensorView{};   // of updates; empty: none
  double beta1 = 0;                         // of whichever of the two there is
  double beta2 = 0;
  double added = 0;
  double correction = 1;
  double rms_clip = 0;  // 0: none
  double smallest_mean = 0;
  double row_floor = 0;
  // The floor of vc and v: max(floor, relative_floor * their mean).
  double floor = 0;
  double relative_floor = 0;
};

// The state that the updates below move: row and column moments of a matrix, or one an element.
void AddSecondMoment(const Shape& shape, bool factored, std::vector<StateSpec>& state);

// What MeasureFactored leaves of a gradient [rows, columns].
int64_t MeasuredFloatsOfFactored(const Shape& shape, const AdaptiveStep& step);
// The sum of squares of a gradient that no momentum takes in. Leaves for UpdateFactored the sums
// over rows and columns and, where there is a bound, those over columns weighted by the rows'
// moments as they will be if the gradient's scale is 1.
double MeasureFactored(TensorView gradient, TensorView row_moments, const AdaptiveStep& step,
                       float* measured);

// Two passes over a matrix, one where the gradient was measured. Where the scale turned out not to
// be 1, the bound takes a pass of its own: weights of rows do not follow from those of another
// scale. Reports columns whose second moment is floored.
UpdateReport UpdateFactored(TensorView weight, TensorView gradient, TensorView row_moments,
                            TensorView column_moments, const AdaptiveStep& step,
                            const StepContext& context);

// Three passes over a tensor of any shape. Reports elements whose second moment is floored.
UpdateReport UpdateExact(TensorView weight, TensorView gradient, TensorView second_moments,
                         const AdaptiveStep& step, const StepContext& context);

}  // namespace terrace
