#include "support/kernel_fixture.h"

namespace terrace {
namespace {

struct BlockCase {
  int64_t tokens, blocks, in, out;
};
constexpr BlockCase kCases[] = {{0, 2, 8, 4},   {1, 1, 1, 1},     {3, 2, 5, 7},
                                {64, 3, 24, 6}, {200, 2, 96, 80}, {33, 4, 130, 300}};

class BlockLinearTest : public KernelTest {};
INSTANTIATE_KERNEL_TEST(BlockLinearTest);

TEST_P(BlockLinearTest, MatchesTheReference) {
  for (const BlockCase& c : kCases) {
    for (const DType dtype : kFloatTypes) {
      const TensorView x = Normals(dtype, {c.tokens, c.blocks * c.in}, "x");
      const TensorView w = Normals(dtype, {c.blocks * c.out, c.in}, "w");
      const TensorView dy = Normals(dtype, {c.tokens, c.blocks * c.out}, "dy");
      const auto compare = [&](DType result, Shape shape, int64_t terms, const auto& run) {
        const TensorView actual = Normals(result, shape, "result"), expected = CopyOf(actual);
        run(cpu_, actual);
        run(reference_, expected);
        EXPECT_TRUE(Near(actual, expected, RoundingOf(result, MaxAbs(expected), terms)))
            << c.tokens << " tokens, " << c.blocks << " blocks " << c.in << " to " << c.out;
      };
      for (const DType result : kFloatTypes) {
        compare(result, dy.shape, c.in,
                [&](Backend& backend, TensorView y) { backend.BlockLinear(c.blocks, x, w, y); });
        compare(result, x.shape, c.out, [&](Backend& backend, TensorView dx) {
          backend.BlockLinearBackwardInput(c.blocks, dy, w, dx);
        });
        for (const bool add : {false, true}) {
          compare(result, w.shape, c.tokens + 1, [&](Backend& backend, TensorView dw) {
            backend.BlockLinearBackwardWeight(c.blocks, dy, x, dw, {add, 7});
          });
        }
      }
    }
  }
}

TEST_P(BlockLinearTest, ResultsDoNotDependOnTheNumberOfThreads) {
  const TensorView x = Normals(DType::kF32, {300, 200}), w = Normals(DType::kF32, {160, 100});
  ExpectSameForAnyThreads([&] {
    const TensorView y = New(DType::kF32, {300, 160});
    cpu_.BlockLinear(2, x, w, y);
    return y;
  });
  const TensorView dy = Normals(DType::kF32, {300, 160});
  ExpectSameForAnyThreads([&] {
    const TensorView dw = New(DType::kBF16, w.shape);
    cpu_.BlockLinearBackwardWeight(2, dy, x, dw, {false, 3});
    return dw;
  });
}

TEST_P(BlockLinearTest, DryRunsTakeTheSameScratch) {
  ExpectDryTakesTheSame([](CpuBackend& backend) {
    const auto allocate = [&](DType dtype, Shape shape) {
      const TensorView view = backend.arena().Allocate(Memory::kActivations, dtype, shape, "x");
      backend.Zero(view);
      return view;
    };
    for (const DType dtype : kFloatTypes) {
      const TensorView x = allocate(dtype, {70, 60});
      const TensorView y = allocate(dtype, {70, 42}), wide = allocate(dtype, {42, 20});
      backend.BlockLinear(3, x, wide, y);
      backend.BlockLinearBackwardInput(3, y, wide, x);
      backend.BlockLinearBackwardWeight(3, y, x, wide, {true, 1});
    }
  });
}

TEST_P(BlockLinearTest, WrongShapesAreRefused) {
  const TensorView x = Normals(DType::kF32, {4, 6}), y = Normals(DType::kF32, {4, 4});
  EXPECT_THROW(cpu_.BlockLinear(2, x, Normals(DType::kF32, {4, 2}), y), InternalError);
  EXPECT_THROW(cpu_.BlockLinear(2, x, Normals(DType::kF32, {3, 3}), y), InternalError);
  EXPECT_THROW(cpu_.BlockLinear(3, x, Normals(DType::kF32, {4, 3}), y), InternalError);
}

}  // namespace
}  // namespace terrace
