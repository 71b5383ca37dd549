#include <cmath>

#include "support/kernel_fixture.h"

namespace terrace {
namespace {

struct RopeCase {
  int64_t rows, heads, head_width, sequence_length, first_position;
  int64_t rotated = head_width;
};
// Tables are made in blocks of 32 positions.
constexpr RopeCase kCases[] = {
    {0, 2, 8, 4, 0},      {1, 1, 2, 1, 0},        {1, 3, 4, 1, 1000},      {6, 2, 14, 3, 0},
    {10, 1, 16, 10, 5},   {66, 2, 30, 33, 0},     {70, 3, 34, 100, 7},     {256, 4, 64, 128, 0},
    {100, 1, 128, 50, 0}, {40, 2, 66, 40, 70000}, {70, 3, 34, 100, 7, 10}, {12, 2, 96, 12, 0, 32},
    {9, 1, 7, 9, 1, 2}};

class RopeTest : public KernelTest {};
INSTANTIATE_KERNEL_TEST(RopeTest);

TEST_P(RopeTest, MatchesTheReference) {
  for (const RopeCase& c : kCases) {
    for (const DType dtype : kFloatTypes) {
      for (const bool inverse : {false, true}) {
        for (const float theta : {10000.0f, 500000.0f}) {
          const TensorView x = Normals(dtype, {c.rows, c.heads * c.head_width}, "x");
          const TensorView expected = CopyOf(x);
          cpu_.Rope(x, c.heads, c.rotated, c.sequence_length, c.first_position, theta, inverse);
          reference_.Rope(expected, c.heads, c.rotated, c.sequence_length, c.first_position, theta,
                          inverse);
          EXPECT_TRUE(Near(x, expected, RoundingOf(dtype, MaxAbs(expected))))
              << "head width " << c.head_width << ", first position " << c.first_position;
        }
      }
    }
  }
}

TEST_P(RopeTest, InverseRotatesBack) {
  const TensorView x = Normals(DType::kF32, {100, 64}, "x"), before = CopyOf(x);
  cpu_.Rope(x, 2, 32, 100, 3, 10000.0f, false);
  EXPECT_FALSE(Near(x, before, {.absolute = 0.1}));
  cpu_.Rope(x, 2, 32, 100, 3, 10000.0f, true);
  EXPECT_TRUE(Near(x, before, RoundingOf(DType::kF32, MaxAbs(before))));
}

// Scores depend on the distance of positions alone.
TEST_P(RopeTest, DotProductsDependOnDistance) {
  const TensorView q = Normals(DType::kF32, {1, 32}), k = Normals(DType::kF32, {1, 32});
  const auto score = [&](int64_t query_position, int64_t key_position) {
    const TensorView a = CopyOf(q), b = CopyOf(k);
    cpu_.Rope(a, 1, 32, 1, query_position, 10000.0f, false);
    cpu_.Rope(b, 1, 32, 1, key_position, 10000.0f, false);
    double sum = 0;
    for (int64_t i = 0; i < 32; ++i) sum += ElementAt(a, i) * ElementAt(b, i);
    return sum;
  };
  EXPECT_NEAR(score(9, 2), score(1007, 1000), 1e-5);
  EXPECT_GT(std::abs(score(9, 2) - score(9, 5)), 1e-2);
}

TEST_P(RopeTest, ResultsDoNotDependOnTheNumberOfThreads) {
  const TensorView x = Normals(DType::kBF16, {1000, 128});
  ExpectSameForAnyThreads([&] {
    const TensorView y = CopyOf(x);
    cpu_.Rope(y, 2, 64, 250, 0, 10000.0f, false);
    return y;
  });
}

TEST_P(RopeTest, DryRunsTakeTheSameScratch) {
  ExpectDryTakesTheSame([](CpuBackend& backend) {
    const TensorView x =
        backend.arena().Allocate(Memory::kActivations, DType::kF32, {100, 64}, "x");
    backend.Zero(x);
    backend.Rope(x, 2, 32, 50, 0, 10000.0f, false);
    backend.Rope(x, 2, 20, 1000, 0, 10000.0f, false);
  });
}

TEST_P(RopeTest, OtherWidthsAreRefused) {
  const TensorView x = Normals(DType::kF32, {4, 6});
  for (const auto& [heads, rotated] : {std::pair<int64_t, int64_t>{2, 3}, {4, 2}, {2, 4}, {2, 0}}) {
    EXPECT_THROW(cpu_.Rope(x, heads, rotated, 4, 0, 10000.0f, false), InternalError) << rotated;
  }
}

}  // namespace
}  // namespace terrace
