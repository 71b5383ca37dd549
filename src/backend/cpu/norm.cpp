// LayerNorm and RMSNorm.
#include <cmath>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/kernel.h"
#include "core/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/norm.cpp"
#include <hwy/foreach_target.h>

#include "backend/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace terrace {
namespace HWY_NAMESPACE {
namespace {

template <typename X, typename Y>
void NormOf(NormKind kind, const TensorView& x, const TensorView& weight, const TensorView& bias,
            float epsilon, const TensorView& y, const TensorView& statistics, int64_t begin,
            int64_t end) {
  const int64_t columns = x.columns();
  const float* w = weight.empty() ? nullptr : weight.as<float>();
  const float* b = bias.empty() ? nullptr : bias.as<float>();
  for (int64_t row = begin; row < end; ++row) {
    const X* from = x.as<X>() + row * columns;
    Y* to = y.as<Y>() + row * columns;
    float mean = 0;
    if (kind == NormKind::kLayerNorm) {
      LaneSum sum;
      ForLanes(columns, [&](auto d, int64_t i) HWY_ATTR { sum.Add(d, LoadLanes(d, from + i)); });
      mean = sum.Total() / static_cast<float>(columns);
    }
    // Centred before squaring: mean of squares less square of the mean would cancel.
    LaneSum squares;
    ForLanes(columns, [&](auto d, int64_t i) HWY_ATTR {
      const auto centred = hn::Sub(LoadLanes(d, from + i), hn::Set(d, mean));
      squares.Add(d, hn::Mul(centred, centred));
    });
    const float scale = 1.0f / std::sqrt(squares.Total() / static_cast<float>(columns) + epsilon);
    ForLanes(columns, [=](auto d, int64_t i) HWY_ATTR {
      const auto centred = hn::Sub(LoadLanes(d, from + i), hn::Set(d, mean));
      auto scaled = hn::Mul(centred, hn::Set(d, scale));
      if (w != nullptr) scaled = hn::Mul(scaled, hn::LoadU(d, w + i));
      StoreLanes(b == nullptr ? scaled : hn::Add(scaled, hn::LoadU(d, b + i)), d, to + i);
    });
    statistics.as<float>()[2 * row] = mean;
    statistics.as<float>()[2 * row + 1] = scale;
  }
}

// With xhat = (x - mean) * scale and g = dy * weight:
//   dx += scale * (g - mean(g) - xhat * mean(g * xhat)), without mean(g) for RMSNorm
//   dweight = sum over rows of dy * xhat, dbias = sum over rows of dy
// The sums over the rows of this block are left in dw and db (each null for none).
template <typename DY, typename X>
void NormBackwardOf(NormKind kind, const TensorView& dy, const TensorView& x,
                    const TensorView& weight, const TensorView& statistics, const TensorView& dx,
                    float* HWY_RESTRICT dw, float* HWY_RESTRICT db, int64_t begin, int64_t end) {
  const int64_t columns = x.columns();
  const float* w = weight.empty() ? nullptr : weight.as<float>();
  if (dw != nullptr) std::fill_n(dw, columns, 0.0f);
  if (db != nullptr) std::fill_n(db, columns, 0.0f);
  for (int64_t row = begin; row < end; ++row) {
    const X* xs = x.as<X>() + row * columns;
    const DY* dys = dy.as<DY>() + row * columns;
    float* dxs = dx.as<float>() + row * columns;
    const float mean = statistics.as<float>()[2 * row];
    const float scale = statistics.as<float>()[2 * row + 1];
    LaneSum sum, product;
    ForLanes(columns, [&](auto d, int64_t i) HWY_ATTR {
      const auto xhat = hn::Mul(hn::Sub(LoadLanes(d, xs + i), hn::Set(d, mean)), hn::Set(d, scale));
      const auto dyi = LoadLanes(d, dys + i);
      const auto g = w == nullptr ? dyi : hn::Mul(dyi, hn::LoadU(d, w + i));
      sum.Add(d, g);
      product.Add(d, hn::Mul(g, xhat));
      if (dw != nullptr) hn::StoreU(hn::MulAdd(dyi, xhat, hn::LoadU(d, dw + i)), d, dw + i);
      if (db != nullptr) hn::StoreU(hn::Add(dyi, hn::LoadU(d, db + i)), d, db + i);
    });
    const float inverse = 1.0f / static_cast<float>(columns);
    const float mean_g = kind == NormKind::kLayerNorm ? sum.Total() * inverse : 0.0f;
    const float mean_product = product.Total() * inverse;
    ForLanes(columns, [=](auto d, int64_t i) HWY_ATTR {
      const auto xhat = hn::Mul(hn::Sub(LoadLanes(d, xs + i), hn::Set(d, mean)), hn::Set(d, scale));
      auto g = LoadLanes(d, dys + i);
      if (w != nullptr) g = hn::Mul(g, hn::LoadU(d, w + i));
      const auto inner =
          hn::NegMulAdd(xhat, hn::Set(d, mean_product), hn::Sub(g, hn::Set(d, mean_g)));
      hn::StoreU(hn::MulAdd(inner, hn::Set(d, scale), hn::LoadU(d, dxs + i)), d, dxs + i);
    });
  }
}

void NormRows(NormKind kind, const TensorView& x, const TensorView& weight, const TensorView& bias,
              float epsilon, const TensorView& y, const TensorView& statistics, int64_t begin,
              int64_t end) {
  using Kernel = decltype(&NormOf<float, float>);
  static constexpr Kernel kKernels[2][2] = {{NormOf<float, float>, NormOf<float, BF16>},
                                            {NormOf<BF16, float>, NormOf<BF16, BF16>}};
  kKernels[IsBF16(x)][IsBF16(y)](kind, x, weight, bias, epsilon, y, statistics, begin, end);
}

void NormBackwardRows(NormKind kind, const TensorView& dy, const TensorView& x,
                      const TensorView& weight, const TensorView& statistics, const TensorView& dx,
                      float* dw, float* db, int64_t begin, int64_t end) {
  using Kernel = decltype(&NormBackwardOf<float, float>);
  static constexpr Kernel kKernels[2][2] = {
      {NormBackwardOf<float, float>, NormBackwardOf<float, BF16>},
      {NormBackwardOf<BF16, float>, NormBackwardOf<BF16, BF16>}};
  kKernels[IsBF16(dy)][IsBF16(x)](kind, dy, x, weight, statistics, dx, dw, db, begin, end);
}

// sum[begin, end) (+)= the rows of `partial` [blocks, columns], from the first to the last.
void SumPartialRows(const float* partial, int64_t blocks, int64_t columns, bool add, float* sum,
                    int64_t begin, int64_t end) {
  ForLanes(end - begin, [=](auto d, int64_t i) HWY_ATTR {
    auto total = add ? hn::LoadU(d, sum + begin + i) : hn::Zero(d);
    for (int64_t block = 0; block < blocks; ++block) {
      total = hn::Add(total, hn::LoadU(d, partial + block * columns + begin + i));
    }
    hn::StoreU(total, d, sum + begin + i);
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace terrace
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace terrace {

HWY_EXPORT(NormRows);
HWY_EXPORT(NormBackwardRows);
HWY_EXPORT(SumPartialRows);

namespace {

// Sums over tokens are made per block of this many, then over blocks.
constexpr int64_t kReductionRows = 64;
constexpr int64_t kReductionColumns = 256;

void CheckNorm(const TensorView& x, const TensorView& weight, const TensorView& statistics) {
  CheckMatrix(x);
  CheckFloat(x);
  if (!weight.empty()) {
    CheckShape(weight, {x.columns()});
    CheckDType(weight, DType::kF32);
  }
  CheckShape(statistics, {x.rows(), 2});
  CheckDType(statistics, DType::kF32);
}

}  // namespace

void CpuBackend::Norm(NormKind kind, TensorView x, TensorView weight, TensorView bias,
                      float epsilon, TensorView y, TensorView statistics) {
  CheckNorm(x, weight, statistics);
  if (!bias.empty()) {
    CheckShape(bias, {x.columns()});
    CheckDType(bias, DType::kF32);
  }
  CheckShape(y, x.shape);
  CheckFloat(y);
  if (dry()) return;
  ParallelFor(x.rows(), RowsPerBlock(x.columns()), [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(NormRows)
    (kind, x, weight, bias, epsilon, y, statistics, begin, end);
  });
}

void CpuBackend::NormBackward(NormKind kind, TensorView dy, TensorView x, TensorView weight,
                              TensorView statistics, TensorView dx, TensorView dweight,
                              bool add_dweight, TensorView dbias, bool add_dbias) {
  CheckNorm(x, weight, statistics);
  CheckShape(dy, x.shape);
  CheckFloat(dy);
  CheckShape(dx, x.shape);
  CheckDType(dx, DType::kF32);
  TERRACE_CHECK(weight.empty() == dweight.empty(), "{}: a weight without its gradient", x.name);
  if (!dweight.empty()) {
    CheckShape(dweight, weight.shape);
    CheckDType(dweight, DType::kF32);
  }
  if (!dbias.empty()) {
    CheckShape(dbias, {x.columns()});
    CheckDType(dbias, DType::kF32);
  }
  const int64_t columns = x.columns();
  const int64_t blocks = (x.rows() + kReductionRows - 1) / kReductionRows;
  const Arena::Frame frame(arena());
  TensorView dw, db;
  if (!dweight.empty()) {
    dw = arena().Allocate(Memory::kScratch, DType::kF32, {blocks, columns}, "NormBackward.dweight");
  }
  if (!dbias.empty()) {
    db = arena().Allocate(Memory::kScratch, DType::kF32, {blocks, columns}, "NormBackward.dbias");
  }
  if (dry()) return;

  ParallelFor(x.rows(), kReductionRows, [&](int64_t begin, int64_t end) {
    const int64_t first = begin / kReductionRows * columns;
    HWY_DYNAMIC_DISPATCH(NormBackwardRows)
    (kind, dy, x, weight, statistics, dx, dw.empty() ? nullptr : dw.as<float>() + first,
     db.empty() ? nullptr : db.as<float>() + first, begin, end);
  });
  if (dweight.empty() && dbias.empty()) return;
  ParallelFor(columns, kReductionColumns, [&](int64_t begin, int64_t end) {
    if (!dweight.empty()) {
      HWY_DYNAMIC_DISPATCH(SumPartialRows)
      (dw.as<float>(), blocks, columns, add_dweight, dweight.as<float>(), begin, end);
    }
    if (dbias.empty()) return;
    HWY_DYNAMIC_DISPATCH(SumPartialRows)
    (db.as<float>(), blocks, columns, add_dbias, dbias.as<float>(), begin, end);
  });
}

}  // namespace terrace
#endif  // HWY_ONCE
