// Rotary positions.
#include <cmath>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/kernel.h"
#include "core/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/rope.cpp"
#include <hwy/foreach_target.h>

#include "backend/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace terrace {
namespace HWY_NAMESPACE {
namespace {

// `cosines` and `sines` are f32 [positions, W / 2]; row n of x uses row n % sequence_length.
template <typename X>
void RopeOf(const TensorView& x, int64_t heads, int64_t sequence_length, const TensorView& cosines,
            const TensorView& sines, int64_t begin, int64_t end) {
  const int64_t half = cosines.columns(), width = x.columns() / heads;
  for (int64_t row = begin; row < end; ++row) {
    const float* c = cosines.as<float>() + row % sequence_length * half;
    const float* s = sines.as<float>() + row % sequence_length * half;
    for (int64_t head = 0; head < heads; ++head) {
      X* lower = x.as<X>() + (row * heads + head + 1) * width - 2 * half;
      X* upper = lower + half;
      ForLanes(half, [=](auto d, int64_t i) HWY_ATTR {
        const auto a = LoadLanes(d, lower + i);
        const auto b = LoadLanes(d, upper + i);
        const auto ci = hn::LoadU(d, c + i);
        const auto si = hn::LoadU(d, s + i);
        StoreLanes(hn::NegMulAdd(b, si, hn::Mul(a, ci)), d, lower + i);
        StoreLanes(hn::MulAdd(a, si, hn::Mul(b, ci)), d, upper + i);
      });
    }
  }
}

void RopeRows(const TensorView& x, int64_t heads, int64_t sequence_length,
              const TensorView& cosines, const TensorView& sines, int64_t begin, int64_t end) {
  (IsBF16(x) ? RopeOf<BF16> : RopeOf<float>)(x, heads, sequence_length, cosines, sines, begin, end);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace terrace
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace terrace {

HWY_EXPORT(RopeRows);

namespace {

// Positions per block. The first of a block has its sine and cosine from the library; the others
// follow by rotation in float64, whose error over so few steps is far below a float32's.
constexpr int64_t kTablePositions = 32;

void FillTable(int64_t first_position, float theta, bool inverse, const TensorView& cosines,
               const TensorView& sines, int64_t begin, int64_t end) {
  const int64_t half = cosines.columns();
  for (int64_t i = 0; i < half; ++i) {
    const double frequency =
        std::pow(static_cast<double>(theta), -static_cast<double>(i) / static_cast<double>(half));
    const double angle = frequency * static_cast<double>(first_position + begin);
    const double direction = inverse ? -1.0 : 1.0;
    double cosine = std::cos(angle);
    double sine = std::sin(angle) * direction;
    const double step_cosine = std::cos(frequency);
    const double step_sine = std::sin(frequency) * direction;
    for (int64_t position = begin; position < end; ++position) {
      cosines.as<float>()[position * half + i] = static_cast<float>(cosine);
      sines.as<float>()[position * half + i] = static_cast<float>(sine);
      const double turned = cosine * step_cosine - sine * step_sine;
      sine = sine * step_cosine + cosine * step_sine;
      cosine = turned;
    }
  }
}

}  // namespace

void CpuBackend::Rope(TensorView x, int64_t heads, int64_t rotated, int64_t sequence_length,
                      int64_t first_position, float theta, bool inverse) {
  CheckMatrix(x);
  CheckFloat(x);
  TERRACE_CHECK(heads > 0 && x.columns() % heads == 0 && rotated > 0 && rotated % 2 == 0 &&
                    rotated <= x.columns() / heads,
                "{}: {} elements of each of {} heads in {}", x.name, rotated, heads,
                x.shape.ToString());
  TERRACE_CHECK(sequence_length > 0, "{}: sequences of {}", x.name, sequence_length);
  const Shape table{std::min(sequence_length, x.rows()), rotated / 2};
  const Arena::Frame frame(arena());
  const TensorView cosines = arena().Allocate(Memory::kScratch, DType::kF32, table, "Rope.cosines");
  const TensorView sines = arena().Allocate(Memory::kScratch, DType::kF32, table, "Rope.sines");
  if (dry()) return;
  ParallelFor(table[0], kTablePositions, [&](int64_t begin, int64_t end) {
    FillTable(first_position, theta, inverse, cosines, sines, begin, end);
  });
  ParallelFor(x.rows(), RowsPerBlock(x.columns()), [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(RopeRows)(x, heads, sequence_length, cosines, sines, begin, end);
  });
}

}  // namespace terrace
#endif  // HWY_ONCE
