#include <hwy/base.h>

#include <bit>
#include <limits>

#include "support/kernel_fixture.h"

namespace terrace {
namespace {

// The last spans several blocks of work and ends in the middle of one.
constexpr int64_t kSizes[] = {0, 1, 7, 8, 15, 16, 17, 33, 1000, 100003};

class ElementwiseTest : public KernelTest {};
INSTANTIATE_KERNEL_TEST(ElementwiseTest);

TEST_P(ElementwiseTest, ZeroClearsEveryDtypeAndNothingElse) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kI32, DType::kI64}) {
    for (const int64_t size : kSizes) {
      const TensorView all = New(dtype, {size + 2});
      std::fill_n(all.data, all.bytes(), std::byte{0x5a});
      cpu_.Zero(all.Rows(1, size));
      const int64_t step = BytesOf(dtype);
      EXPECT_EQ(std::count(all.data + step, all.data + step * (size + 1), std::byte{0}),
                step * size);
      EXPECT_EQ(std::count(all.data, all.data + all.bytes(), std::byte{0x5a}), 2 * step);
    }
  }
}

TEST_P(ElementwiseTest, CopyConvertsAsTheScalarConversionDoes) {
  for (const int64_t size : kSizes) {
    for (const DType from : kFloatTypes) {
      for (const DType to : kFloatTypes) {
        const TensorView x = Normals(from, {size});
        const TensorView y = New(to, {size}), expected = New(to, {size});
        cpu_.Copy(x, y);
        reference_.Copy(x, expected);
        EXPECT_TRUE(SameBytes(y, expected)) << NameOf(from) << " to " << NameOf(to);
      }
    }
    const TensorView ids = Indices(DType::kI64, {size}, 1000);
    const TensorView copy = New(DType::kI64, {size});
    cpu_.Copy(ids, copy);
    EXPECT_TRUE(SameBytes(copy, ids));
  }
}

// Every upper half of a float32, with lower halves on, beside and far from the rounding tie:
// zeros, denormals, infinities, NaNs and the overflow to infinity are all among them.
TEST_P(ElementwiseTest, EveryFloatRoundsToTheNearestBF16) {
  constexpr uint32_t kLowerHalves[] = {0x0000, 0x0001, 0x7fff, 0x8000, 0x8001, 0xffff};
  const TensorView x = New(DType::kF32, {65536 * std::ssize(kLowerHalves)});
  int64_t i = 0;
  for (uint32_t upper = 0; upper < 65536; ++upper) {
    for (const uint32_t lower : kLowerHalves) {
      x.as<float>()[i++] = std::bit_cast<float>(upper << 16 | lower);
    }
  }
  const TensorView y = New(DType::kBF16, x.shape), back = New(DType::kF32, x.shape);
  cpu_.Copy(x, y);
  cpu_.Copy(y, back);
  int64_t wrong = 0;
  for (int64_t j = 0; j < x.size(); ++j) {
    const BF16 expected = ToBF16(x.as<float>()[j]);
    wrong += y.as<BF16>()[j].bits != expected.bits;
    wrong += std::bit_cast<uint32_t>(back.as<float>()[j]) != uint32_t{expected.bits} << 16;
  }
  EXPECT_EQ(wrong, 0);
}

TEST_P(ElementwiseTest, SumOfSquaresMatchesTheReference) {
  for (const int64_t size : kSizes) {
    for (const DType dtype : kFloatTypes) {
      const TensorView x = Normals(dtype, {size});
      const double expected = reference_.SumOfSquares(x);
      EXPECT_NEAR(cpu_.SumOfSquares(x), expected, 1e-12 * expected);
    }
  }
}

TEST_P(ElementwiseTest, SumOfSquaresNeitherOverflowsNorHidesNan) {
  const TensorView x = New(DType::kF32, {100});
  std::fill_n(x.as<float>(), 100, 1e30f);
  const double square = static_cast<double>(1e30f) * static_cast<double>(1e30f);
  EXPECT_NEAR(cpu_.SumOfSquares(x), 100 * square, 1e-12 * 100 * square);
  for (const int64_t at : {0, 50, 99}) {
    const TensorView y = CopyOf(x);
    y.as<float>()[at] = std::numeric_limits<float>::quiet_NaN();
    EXPECT_TRUE(std::isnan(cpu_.SumOfSquares(y))) << at;
  }
}

TEST_P(ElementwiseTest, ResultsDoNotDependOnTheNumberOfThreads) {
  const TensorView x = Normals(DType::kF32, {100003});
  ExpectSameForAnyThreads([&] {
    const TensorView sum = New(DType::kI64, {1});
    sum.as<int64_t>()[0] = std::bit_cast<int64_t>(cpu_.SumOfSquares(x));
    return sum;
  });
}

#if HWY_ARCH_X86
// By every thread: they would cost a hundred times as much as other numbers.
TEST_P(ElementwiseTest, SubnormalNumbersAreZero) {
  const TensorView x = New(DType::kF32, {1'000'003});
  std::fill_n(x.as<float>(), x.size(), 1e-40f);
  EXPECT_EQ(cpu_.SumOfSquares(x), 0.0);  // in float64 the square of 1e-40 would be a normal number
}
#endif

TEST_P(ElementwiseTest, DryRunsTakeTheSameScratch) {
  ExpectDryTakesTheSame([](CpuBackend& backend) {
    Arena& arena = backend.arena();
    const TensorView x = arena.Allocate(Memory::kActivations, DType::kF32, {100003}, "x");
    const TensorView y = arena.Allocate(Memory::kActivations, DType::kBF16, {100003}, "y");
    backend.Zero(x);
    backend.Copy(x, y);
    EXPECT_EQ(backend.SumOfSquares(x), 0.0);
  });
}

TEST_P(ElementwiseTest, WrongSizesAndDtypesAreRefused) {
  const TensorView x = Normals(DType::kF32, {4});
  EXPECT_THROW(cpu_.Copy(x, New(DType::kF32, {5})), InternalError);
  EXPECT_THROW(cpu_.Copy(x, New(DType::kI32, {4})), InternalError);
  EXPECT_THROW(cpu_.SumOfSquares(New(DType::kI64, {4})), InternalError);
}

}  // namespace
}  // namespace terrace
