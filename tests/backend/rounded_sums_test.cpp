// Sums of gradients in bfloat16: what is added is rounded stochastically, so that long sums go on.
#include <cmath>
#include <functional>

#include "core/stochastic_rounding.h"
#include "support/kernel_fixture.h"

namespace terrace {
namespace {

class RoundedSumsTest : public KernelTest {
 protected:
  TensorView Constant(DType dtype, Shape shape, double value) {
    const TensorView view = New(dtype, shape);
    for (int64_t i = 0; i < view.size(); ++i) SetElement(view, i, value);
    return view;
  }
  TensorView Integers(DType dtype, Shape shape, uint64_t key) {
    const TensorView view = New(dtype, shape);
    for (int64_t i = 0; i < view.size(); ++i) {
      SetElement(view, i, static_cast<double>(RandomBits(key, i) % 7) - 3);
    }
    return view;
  }
  // What stochastic_rounding.h defines for a matrix of `sums`.
  TensorView Rounded(TensorView sums, uint64_t key) {
    const TensorView view = New(DType::kBF16, sums.shape);
    const int64_t width = sums.columns();
    const int64_t stripes = (width + kernels::kStripe - 1) / kernels::kStripe;
    for (int64_t i = 0; i < sums.size(); ++i) {
      const int64_t column = i % width;
      const uint64_t stripe =
          kernels::StripeKey(key, i / width * stripes + column / kernels::kStripe);
      view.as<BF16>()[i] = kernels::RoundStochastically(
          sums.as<float>()[i], kernels::RoundingBits(stripe, column % kernels::kStripe));
    }
    return view;
  }
};
INSTANTIATE_KERNEL_TEST(RoundedSumsTest);

// 1024 additions of 2^-10 to 1, each a quarter of what rounding to nearest would drop.
TEST_P(RoundedSumsTest, SmallAdditionsAddUp) {
  constexpr int64_t kRows = 40, kColumns = 100;
  constexpr int kAdditions = 1024;
  constexpr float kTerm = 0x1p-10f;
  const TensorView ones = Constant(DType::kF32, {1, kRows}, 1);
  const TensorView narrow_ones = Constant(DType::kBF16, {1, kRows}, 1);
  const TensorView term = Constant(DType::kF32, {1, kColumns}, kTerm);
  const TensorView narrow_term = Constant(DType::kBF16, {1, kColumns}, kTerm);
  const TensorView terms = Constant(DType::kF32, {kRows, kColumns}, kTerm);
  const TensorView ids = New(DType::kI32, {kRows});
  for (int32_t i = 0; i < kRows; ++i) ids.as<int32_t>()[i] = i;
  const std::function<void(TensorView, Adding)> kOperations[] = {
      [&](TensorView sum, Adding add) { cpu_.LinearBackwardWeight(ones, term, sum, add); },
      [&](TensorView sum, Adding add) {
        cpu_.LinearBackwardWeight(narrow_ones, narrow_term, sum, add);
      },
      [&](TensorView sum, Adding add) { cpu_.EmbeddingBackward(terms, ids, sum, add); },
      [&](TensorView sum, Adding add) { cpu_.PositionsBackward(terms, kRows, sum, add); }};
  for (const auto& operation : kOperations) {
    const TensorView sum = Constant(DType::kBF16, {kRows, kColumns}, 1);
    Adding add{true, 7};
    for (int i = 0; i < kAdditions; ++i, add = add.Next()) operation(sum, add);
    double total = 0;
    for (int64_t i = 0; i < sum.size(); ++i) total += ElementAt(sum, i);
    // A term is p = 1/8 of the distance of 2^-7 between neighbours from 1 to 2: an addition has
    // the variance p (1 - p) 2^-14.
    const double deviation = std::sqrt(kAdditions * 0.125 * 0.875) * 0x1p-7;
    const double size = static_cast<double>(sum.size());
    EXPECT_NEAR(total / size, 1 + kAdditions * kTerm, 4 * deviation / std::sqrt(size));
  }
}

// In slices, with dy copied by parts, for any number of threads.
TEST_P(RoundedSumsTest, LargeWeightsAreRoundedAsDefined) {
  for (const auto& [n, i, o] : {std::array<int64_t, 3>{600, 1100, 1000},
                                {2, 80, 27'000},  // as one slice and a rest
                                {0, 1100, 1000},
                                {3, 40'000, 30}}) {  // several stripes a row
    for (const DType dtype : kFloatTypes) {
      const TensorView dy = Integers(dtype, {n, o}, 1), x = Integers(dtype, {n, i}, 2);
      const TensorView exact = New(DType::kF32, {o, i}), before = Integers(DType::kBF16, {o, i}, 3);
      cpu_.Copy(before, exact);
      cpu_.LinearBackwardWeight(dy, x, exact, true);
      const TensorView added = Rounded(exact, 11);
      ExpectSameForAnyThreads([&] {
        const TensorView dw = CopyOf(before);
        cpu_.LinearBackwardWeight(dy, x, dw, {true, 11});
        EXPECT_TRUE(SameBytes(dw, added));
        return dw;
      });
      cpu_.LinearBackwardWeight(dy, x, exact, false);
      const TensorView dw = New(DType::kBF16, {o, i});
      cpu_.LinearBackwardWeight(dy, x, dw, {false, 12});
      EXPECT_TRUE(SameBytes(dw, Rounded(exact, 12)));
    }
  }
}

// As the tables of embeddings are summed, in parts of a row.
TEST_P(RoundedSumsTest, TablesAreRoundedAsDefined) {
  for (const int64_t width : {1, 63, 64, 1024, 1500, 20'000}) {
    const TensorView dy = Normals(DType::kF32, {50, width});
    const TensorView ids = Indices(DType::kI32, {50}, 20);
    const TensorView exact = New(DType::kF32, {20, width}), dtable = New(DType::kBF16, exact.shape);
    cpu_.EmbeddingBackward(dy, ids, exact, false);
    cpu_.EmbeddingBackward(dy, ids, dtable, {false, 5});
    EXPECT_TRUE(SameBytes(dtable, Rounded(exact, 5)));
    cpu_.PositionsBackward(dy, 20, exact, false);
    cpu_.PositionsBackward(dy, 20, dtable, {false, 6});
    EXPECT_TRUE(SameBytes(dtable, Rounded(exact, 6)));
  }
}

TEST_P(RoundedSumsTest, ScratchDependsOnTheWidthsOnly) {
  for (const DType dtype : kFloatTypes) {
    for (const auto& [i, o] : {std::array<int64_t, 2>{1100, 1000}, {96, 64}}) {
      int64_t first = 0;
      for (const int64_t n : {0, 1, 77, 600, 5000}) {
        Arena alone = Arena::Dry();
        CpuBackend backend(alone);
        backend.LinearBackwardWeight({nullptr, dtype, {n, o}, "dy"}, {nullptr, dtype, {n, i}, "x"},
                                     {nullptr, DType::kBF16, {o, i}, "dw"}, false);
        if (n == 0) first = alone.ledger().total_peak_bytes;
        EXPECT_EQ(alone.ledger().total_peak_bytes, first) << n;
      }
    }
  }
}

}  // namespace
}  // namespace terrace
