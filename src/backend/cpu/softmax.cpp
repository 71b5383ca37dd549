#include "backend/cpu/softmax.h"

#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/softmax.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

#include "backend/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace terrace {
namespace HWY_NAMESPACE {

HWY_INLINE float RowMax(const float* row, int64_t count) {
  const FullTag d;
  hn::Vec<FullTag> most = hn::Set(d, row[0]);
  float rest = row[0];
  ForLanes(count, [&](auto tag, int64_t i) HWY_ATTR {
    if constexpr (hn::MaxLanes(decltype(tag)()) == 1) {
      rest = HWY_MAX(rest, row[i]);
    } else {
      most = hn::Max(most, hn::LoadU(tag, row + i));
    }
  });
  return HWY_MAX(rest, hn::GetLane(hn::MaxOfLanes(d, most)));
}

// row[i] = exp(scale * row[i] - shift); returns their sum.
HWY_INLINE float ExpRow(float* row, int64_t count, float scale, float shift) {
  LaneSum sum;
  ForLanes(count, [&](auto d, int64_t i) HWY_ATTR {
    const auto shifted = hn::MulSub(hn::LoadU(d, row + i), hn::Set(d, scale), hn::Set(d, shift));
    const auto value = ExpLanes(d, shifted);
    hn::StoreU(value, d, row + i);
    sum.Add(d, value);
  });
  return sum.Total();
}

template <typename T>
HWY_INLINE void ZeroTail(float* row, int64_t first, int64_t end) {
  T* out = reinterpret_cast<T*>(row);
  for (int64_t i = first; i < end; ++i) out[i] = T{};
}

template <typename T>
void SoftmaxScoresAs(const ScoreBlock& block, float* scores, float* log_sums) {
  for (int64_t r = 0; r < block.heads * block.queries; ++r) {
    float* row = scores + r * block.stride;
    const int64_t visible = block.first_visible + r % block.queries;
    const float shift = RowMax(row, visible) * block.scale;
    const float sum = ExpRow(row, visible, block.scale, shift);
    log_sums[r] = shift + std::log(sum);
    const float inverse = 1.0f / sum;
    T* out = reinterpret_cast<T*>(row);
    ForLanes(visible, [&](auto d, int64_t i) HWY_ATTR {
      StoreLanes(hn::Mul(hn::LoadU(d, row + i), hn::Set(d, inverse)), d, out + i);
    });
    ZeroTail<T>(row, visible, block.width);
  }
}

template <typename T>
void SoftmaxScoresBackwardAs(const ScoreBlock& block, float* scores, float* gradients,
                             const float* log_sums, const float* deltas) {
  for (int64_t r = 0; r < block.heads * block.queries; ++r) {
    float* row = scores + r * block.stride;
    float* drow = gradients + r * block.stride;
    const int64_t visible = block.first_visible + r % block.queries;
    T* out = reinterpret_cast<T*>(row);
    T* dout = reinterpret_cast<T*>(drow);
    ForLanes(visible, [&](auto d, int64_t i) HWY_ATTR {
      const auto scale = hn::Set(d, block.scale);
      const auto p = ExpLanes(d, hn::MulSub(hn::LoadU(d, row + i), scale, hn::Set(d, log_sums[r])));
      const auto dp = hn::Sub(hn::LoadU(d, drow + i), hn::Set(d, deltas[r]));
      StoreLanes(p, d, out + i);
      StoreLanes(hn::Mul(hn::Mul(p, dp), scale), d, dout + i);
    });
    ZeroTail<T>(row, visible, block.width);
    ZeroTail<T>(drow, visible, block.width);
  }
}

template <typename T>
float DotAs(const void* a, const void* b, int64_t count) {
  LaneSum sum;
  ForLanes(count, [&](auto d, int64_t i) HWY_ATTR {
    sum.Add(d, hn::Mul(LoadLanes(d, static_cast<const T*>(a) + i),
                       LoadLanes(d, static_cast<const T*>(b) + i)));
  });
  return sum.Total();
}

inline void Store(float value, float* to) { *to = value; }
inline void Store(float value, BF16* to) { *to = ToBF16(value); }

// From exponentials, with the inverse of their sum.
template <typename T>
void LossGradient(const float* exponentials, int64_t width, int64_t target, float scale,
                  float inverse, T* out) {
  const float at_target = (exponentials[target] * inverse - 1.0f) * scale;
  ForLanes(width, [&](auto d, int64_t i) HWY_ATTR {
    StoreLanes(hn::Mul(hn::LoadU(d, exponentials + i), hn::Set(d, inverse * scale)), d, out + i);
  });
  Store(at_target, out + target);
}

float CrossEntropyRowImpl(float* logits, int64_t width, int64_t target, float scale, void* gradient,
                          DType dtype) {
  const float most = RowMax(logits, width);
  const float at_target = logits[target];
  const float sum = ExpRow(logits, width, 1.0f, most);
  if (gradient != nullptr && dtype == DType::kF32) {
    LossGradient(logits, width, target, scale, 1.0f / sum, static_cast<float*>(gradient));
  } else if (gradient != nullptr) {
    LossGradient(logits, width, target, scale, 1.0f / sum, static_cast<BF16*>(gradient));
  }
  return most - at_target + std::log(sum);
}

void SoftmaxScoresImpl(const ScoreBlock& block, float* scores, float* log_sums) {
  (block.output == DType::kF32 ? SoftmaxScoresAs<float> : SoftmaxScoresAs<BF16>)(block, scores,
                                                                                 log_sums);
}

void SoftmaxScoresBackwardImpl(const ScoreBlock& block, float* scores, float* gradients,
                               const float* log_sums, const float* deltas) {
  (block.output == DType::kF32
       ? SoftmaxScoresBackwardAs<float>
       : SoftmaxScoresBackwardAs<BF16>)(block, scores, gradients, log_sums, deltas);
}

float DotImpl(DType dtype, const void* a, const void* b, int64_t count) {
  return dtype == DType::kF32 ? DotAs<float>(a, b, count) : DotAs<BF16>(a, b, count);
}

}  // namespace HWY_NAMESPACE
}  // namespace terrace
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace terrace {

HWY_EXPORT(SoftmaxScoresImpl);
HWY_EXPORT(SoftmaxScoresBackwardImpl);
HWY_EXPORT(DotImpl);
HWY_EXPORT(CrossEntropyRowImpl);

void SoftmaxScores(const ScoreBlock& block, float* scores, float* log_sums) {
  HWY_DYNAMIC_DISPATCH(SoftmaxScoresImpl)(block, scores, log_sums);
}

void SoftmaxScoresBackward(const ScoreBlock& block, float* scores, float* gradients,
                           const float* log_sums, const float* deltas) {
  HWY_DYNAMIC_DISPATCH(SoftmaxScoresBackwardImpl)(block, scores, gradients, log_sums, deltas);
}

float Dot(DType dtype, const void* a, const void* b, int64_t count) {
  return HWY_DYNAMIC_DISPATCH(DotImpl)(dtype, a, b, count);
}

float CrossEntropyRow(float* logits, int64_t width, int64_t target, float scale, void* gradient,
                      DType dtype) {
  return HWY_DYNAMIC_DISPATCH(CrossEntropyRowImpl)(logits, width, target, scale, gradient, dtype);
}

}  // namespace terrace
#endif  // HWY_ONCE
