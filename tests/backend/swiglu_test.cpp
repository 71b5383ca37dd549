#include <cmath>

#include "support/kernel_fixture.h"

namespace terrace {
namespace {

class SwiGluTest : public KernelTest {
 protected:
  // Gates from deep saturation on either side to the middle.
  TensorView Gates(DType dtype, Shape shape) {
    const TensorView gate = Normals(dtype, shape, "gate");
    for (int64_t i = 0; i < gate.size(); ++i) SetElement(gate, i, 4 * ElementAt(gate, i));
    constexpr double kExtremes[] = {0.0, 100.0, -100.0, 1e4, -1e4, 88.5, -88.5, 1e-30};
    for (int64_t i = 0; i < gate.size() / 3; ++i) {
      SetElement(gate, 3 * i, kExtremes[i % std::ssize(kExtremes)]);
    }
    return gate;
  }

  TensorView RowScale(bool scaled, int64_t rows) {
    return scaled ? Normals(DType::kF32, {rows}, "row_scale") : TensorView();
  }
};
INSTANTIATE_KERNEL_TEST(SwiGluTest);

constexpr int64_t kRows[] = {0, 1, 5, 70};

TEST_P(SwiGluTest, ForwardMatchesTheReference) {
  for (const bool scaled : {false, true}) {
    for (const DType x : kFloatTypes) {
      for (const DType y : kFloatTypes) {
        for (const int64_t width : kWidths) {
          for (const int64_t rows : kRows) {
            const TensorView gate = Gates(x, {rows, width}), up = Normals(x, {rows, width});
            const TensorView scale = RowScale(scaled, rows);
            const TensorView h = New(y, gate.shape, "h"), expected = New(y, gate.shape);
            cpu_.SwiGlu(gate, up, scale, h);
            reference_.SwiGlu(gate, up, scale, expected);
            // Relative to each element, except where silu is tiny for both.
            EXPECT_TRUE(
                Near(h, expected, {.relative = RoundingOf(y, 0).relative, .absolute = 1e-32}));
          }
        }
      }
    }
  }
}

TEST_P(SwiGluTest, BackwardMatchesTheReference) {
  for (const bool scaled : {false, true}) {
    for (const DType x : kFloatTypes) {
      for (const DType y : kFloatTypes) {
        for (const int64_t width : kWidths) {
          for (const int64_t rows : kRows) {
            const TensorView gate = Gates(x, {rows, width}), up = Normals(x, {rows, width});
            const TensorView dh = Normals(y, {rows, width}, "dh");
            const TensorView scale = RowScale(scaled, rows);
            const TensorView dgate = New(x, gate.shape, "dgate"), dgate_expected = CopyOf(dgate);
            const TensorView dup = New(x, gate.shape, "dup"), dup_expected = CopyOf(dup);
            const TensorView dscale = scaled ? New(DType::kF32, {rows}, "dscale") : TensorView();
            const TensorView dscale_expected = scaled ? CopyOf(dscale) : TensorView();
            const TensorView h = CopyOf(dh), h_expected = CopyOf(dh);
            cpu_.SwiGluBackward(h, gate, up, scale, dgate, dup, dscale);
            reference_.SwiGluBackward(h_expected, gate, up, scale, dgate_expected, dup_expected,
                                      dscale_expected);
            EXPECT_TRUE(
                Near(h, h_expected, {.relative = RoundingOf(y, 0).relative, .absolute = 1e-32}));
            const double slope = MaxAbs(dh) * (scaled ? MaxAbs(scale) : 1.0);
            // 1 + g (1 - sigmoid) cancels where g is negative: of the size of g there.
            EXPECT_TRUE(Near(dgate, dgate_expected, RoundingOf(x, slope * MaxAbs(up))));
            EXPECT_TRUE(Near(dup, dup_expected,
                             {.relative = RoundingOf(x, 0).relative, .absolute = 1e-32}));
            if (!scaled) continue;
            for (int64_t row = 0; row < rows; ++row) {
              const double magnitude =
                  MaxAbs(dh.Rows(row, 1)) * MaxAbs(gate.Rows(row, 1)) * MaxAbs(up.Rows(row, 1));
              EXPECT_TRUE(Near(dscale.Rows(row, 1), dscale_expected.Rows(row, 1),
                               RoundingOf(DType::kF32, magnitude, width)));
            }
          }
        }
      }
    }
  }
}

TEST_P(SwiGluTest, GradientsMayTakeThePlaceOfTheirValues) {
  for (const DType dtype : kFloatTypes) {
    const TensorView gate = Gates(dtype, {9, 100}), up = Normals(dtype, {9, 100});
    const TensorView dh = Normals(dtype, {9, 100}), scale = Normals(DType::kF32, {9});
    const TensorView dgate = New(dtype, gate.shape), dup = New(dtype, gate.shape);
    const TensorView dscale = New(DType::kF32, {9}), dscale_in_place = New(DType::kF32, {9});
    cpu_.SwiGluBackward(CopyOf(dh), gate, up, scale, dgate, dup, dscale);
    cpu_.SwiGluBackward(CopyOf(dh), gate, up, scale, gate, up, dscale_in_place);
    EXPECT_TRUE(SameBytes(gate, dgate));
    EXPECT_TRUE(SameBytes(up, dup));
    EXPECT_TRUE(SameBytes(dscale_in_place, dscale));
  }
}

TEST_P(SwiGluTest, NanIsNotHidden) {
  const TensorView gate = Normals(DType::kF32, {1, 20}), up = Normals(DType::kF32, {1, 20});
  const TensorView h = New(DType::kF32, gate.shape);
  gate.as<float>()[3] = std::nanf("");
  up.as<float>()[18] = std::nanf("");
  cpu_.SwiGlu(gate, up, TensorView(), h);
  for (int64_t i = 0; i < 20; ++i) {
    EXPECT_EQ(std::isnan(h.as<float>()[i]), i == 3 || i == 18) << i;
  }
}

TEST_P(SwiGluTest, ResultsDoNotDependOnTheNumberOfThreads) {
  const TensorView gate = Gates(DType::kBF16, {500, 200}), up = Normals(DType::kBF16, {500, 200});
  const TensorView dh = Normals(DType::kBF16, gate.shape), scale = Normals(DType::kF32, {500});
  ExpectSameForAnyThreads([&] {
    const TensorView dscale = New(DType::kF32, {500});
    cpu_.SwiGluBackward(CopyOf(dh), gate, up, scale, CopyOf(gate), CopyOf(up), dscale);
    return dscale;
  });
}

TEST_P(SwiGluTest, WrongShapesAndDtypesAreRefused) {
  const TensorView gate = Normals(DType::kF32, {3, 8}), scale = Normals(DType::kF32, {3});
  const TensorView other = Normals(DType::kF32, {4, 8});
  EXPECT_THROW(cpu_.SwiGlu(gate, other, scale, gate), InternalError);
  EXPECT_THROW(cpu_.SwiGlu(gate, New(DType::kBF16, {3, 8}), scale, gate), InternalError);
  EXPECT_THROW(cpu_.SwiGlu(gate, gate, Normals(DType::kF32, {4}), gate), InternalError);
  EXPECT_THROW(cpu_.SwiGluBackward(gate, gate, gate, scale, gate, gate, TensorView()),
               InternalError);
}

}  // namespace
}  // namespace terrace
