// SwiGLU: silu(gate) * up, optionally scaled per row.
#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/kernel.h"
#include "core/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/swiglu.cpp"
#include <hwy/foreach_target.h>

#include "backend/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace terrace {
namespace HWY_NAMESPACE {
namespace {

// exp(-x), within exp(-87) and exp(87): beyond, the sigmoid of x is below 1e-37 or rounds to 1.
template <class D>
HWY_INLINE hn::Vec<D> ExpOfNegative(D d, hn::Vec<D> x) {
  return ExpInRange(d, hn::Clamp(hn::Neg(x), hn::Set(d, -87.0f), hn::Set(d, 87.0f)));
}

// 1 / (1 + x): of exp(-g) the sigmoid of g. One step of Newton's method refines the machine's
// guess: a division would take as long as all the rest.
template <class D>
HWY_INLINE hn::Vec<D> ReciprocalOfOneMore(D d, hn::Vec<D> x) {
  const auto divisor = hn::Add(x, hn::Set(d, 1.0f));
  const auto guess = hn::ApproximateReciprocal(divisor);
  return hn::Mul(guess, hn::NegMulAdd(divisor, guess, hn::Set(d, 2.0f)));
}

template <typename X, typename H>
void SwiGluOf(const TensorView& gate, const TensorView& up, const TensorView& row_scale,
              const TensorView& h, int64_t begin, int64_t end) {
  const int64_t columns = gate.columns();
  for (int64_t row = begin; row < end; ++row) {
    const X* g = gate.as<X>() + row * columns;
    const X* u = up.as<X>() + row * columns;
    H* to = h.as<H>() + row * columns;
    const float scale = row_scale.empty() ? 1.0f : row_scale.as<float>()[row];
    ForLanes(columns, [=](auto d, int64_t i) HWY_ATTR {
      const auto gi = LoadLanes(d, g + i);
      const auto silu = hn::Mul(gi, ReciprocalOfOneMore(d, ExpOfNegative(d, gi)));
      StoreLanes(hn::Mul(hn::Mul(silu, LoadLanes(d, u + i)), hn::Set(d, scale)), d, to + i);
    });
  }
}

// silu'(g) = sigmoid(g) * (1 + g * (1 - sigmoid(g))), where 1 - sigmoid(g) is taken as
// exp(-g) * sigmoid(g), which does not cancel. An element is read before it is written:
// the gradients may take the place of their values.
template <typename DH, typename X>
void SwiGluBackwardOf(const TensorView& dh, const TensorView& gate, const TensorView& up,
                      const TensorView& row_scale, const TensorView& dgate, const TensorView& dup,
                      const TensorView& drow_scale, int64_t begin, int64_t end) {
  const int64_t columns = gate.columns();
  for (int64_t row = begin; row < end; ++row) {
    DH* dhs = dh.as<DH>() + row * columns;
    const X* g = gate.as<X>() + row * columns;
    const X* u = up.as<X>() + row * columns;
    X* dg = dgate.as<X>() + row * columns;
    X* du = dup.as<X>() + row * columns;
    const float scale = row_scale.empty() ? 1.0f : row_scale.as<float>()[row];
    LaneSum dscale;
    ForLanes(columns, [&](auto d, int64_t i) HWY_ATTR {
      const auto one = hn::Set(d, 1.0f);
      const auto gi = LoadLanes(d, g + i);
      const auto ui = LoadLanes(d, u + i);
      const auto dhi = LoadLanes(d, dhs + i);
      const auto power = ExpOfNegative(d, gi);
      const auto sigmoid = ReciprocalOfOneMore(d, power);
      const auto silu = hn::Mul(gi, sigmoid);
      const auto slope = hn::Mul(sigmoid, hn::MulAdd(gi, hn::Mul(power, sigmoid), one));
      const auto scaled = hn::Mul(dhi, hn::Set(d, scale));
      const auto unscaled = hn::Mul(silu, ui);
      dscale.Add(d, hn::Mul(dhi, unscaled));
      StoreLanes(hn::Mul(unscaled, hn::Set(d, scale)), d, dhs + i);
      StoreLanes(hn::Mul(hn::Mul(scaled, ui), slope), d, dg + i);
      StoreLanes(hn::Mul(scaled, silu), d, du + i);
    });
    if (!drow_scale.empty()) drow_scale.as<float>()[row] = dscale.Total();
  }
}

void SwiGluRows(const TensorView& gate, const TensorView& up, const TensorView& row_scale,
                const TensorView& h, int64_t begin, int64_t end) {
  using Kernel = decltype(&SwiGluOf<float, float>);
  static constexpr Kernel kKernels[2][2] = {{SwiGluOf<float, float>, SwiGluOf<float, BF16>},
                                            {SwiGluOf<BF16, float>, SwiGluOf<BF16, BF16>}};
  kKernels[IsBF16(gate)][IsBF16(h)](gate, up, row_scale, h, begin, end);
}

void SwiGluBackwardRows(const TensorView& dh, const TensorView& gate, const TensorView& up,
                        const TensorView& row_scale, const TensorView& dgate, const TensorView& dup,
                        const TensorView& drow_scale, int64_t begin, int64_t end) {
  using Kernel = decltype(&SwiGluBackwardOf<float, float>);
  static constexpr Kernel kKernels[2][2] = {
      {SwiGluBackwardOf<float, float>, SwiGluBackwardOf<float, BF16>},
      {SwiGluBackwardOf<BF16, float>, SwiGluBackwardOf<BF16, BF16>}};
  kKernels[IsBF16(dh)][IsBF16(gate)](dh, gate, up, row_scale, dgate, dup, drow_scale, begin, end);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace terrace
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace terrace {

HWY_EXPORT(SwiGluRows);
HWY_EXPORT(SwiGluBackwardRows);

namespace {

void CheckGateAndUp(const TensorView& gate, const TensorView& up, const TensorView& row_scale) {
  CheckMatrix(gate);
  CheckFloat(gate);
  CheckShape(up, gate.shape);
  CheckDType(up, gate.dtype);
  if (row_scale.empty()) return;
  CheckShape(row_scale, {gate.rows()});
  CheckDType(row_scale, DType::kF32);
}

}  // namespace

void CpuBackend::SwiGlu(TensorView gate, TensorView up, TensorView row_scale, TensorView h) {
  CheckGateAndUp(gate, up, row_scale);
  CheckShape(h, gate.shape);
  CheckFloat(h);
  if (dry()) return;
  ParallelFor(gate.rows(), RowsPerBlock(gate.columns()), [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(SwiGluRows)(gate, up, row_scale, h, begin, end);
  });
}

void CpuBackend::SwiGluBackward(TensorView dh, TensorView gate, TensorView up, TensorView row_scale,
                                TensorView dgate, TensorView dup, TensorView drow_scale) {
  CheckGateAndUp(gate, up, row_scale);
  CheckShape(dh, gate.shape);
  CheckFloat(dh);
  for (const TensorView& gradient : {dgate, dup}) {
    CheckShape(gradient, gate.shape);
    CheckDType(gradient, gate.dtype);
  }
  TERRACE_CHECK(drow_scale.empty() == row_scale.empty(), "{}: gradient of a missing scale",
                drow_scale.name);
  if (!drow_scale.empty()) {
    CheckShape(drow_scale, row_scale.shape);
    CheckDType(drow_scale, DType::kF32);
  }
  if (dry()) return;
  ParallelFor(gate.rows(), RowsPerBlock(gate.columns()), [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(SwiGluBackwardRows)
    (dh, gate, up, row_scale, dgate, dup, drow_scale, begin, end);
  });
}

}  // namespace terrace
#endif  // HWY_ONCE
