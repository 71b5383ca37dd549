#include <cmath>

#include "support/kernel_fixture.h"

namespace terrace {
namespace {

constexpr float kEpsilon = 1e-5f;
constexpr NormKind kKinds[] = {NormKind::kLayerNorm, NormKind::kRmsNorm};
// Backward adds up blocks of 64 rows.
constexpr int64_t kRows[] = {0, 1, 3, 64, 130};

struct Case {
  NormKind kind;
  TensorView x, weight, bias;  // bias may be empty
};

class NormTest : public KernelTest {
 protected:
  Case NewCase(NormKind kind, DType dtype, int64_t rows, int64_t width, bool with_bias) {
    return {kind, Normals(dtype, {rows, width}, "x"), Normals(DType::kF32, {width}, "weight"),
            with_bias ? Normals(DType::kF32, {width}, "bias") : TensorView()};
  }

  TensorView Statistics(const Case& c) {
    const TensorView statistics = New(DType::kF32, {c.x.rows(), 2}, "statistics");
    reference_.Norm(c.kind, c.x, c.weight, c.bias, kEpsilon, New(DType::kF32, c.x.shape),
                    statistics);
    return statistics;
  }

  // x / deviation reaches this: what is rounded before weights multiply it.
  double NormalizedMagnitude(const Case& c, const TensorView& statistics) {
    double largest = 0;
    for (int64_t row = 0; row < c.x.rows(); ++row) {
      largest = std::max(largest, MaxAbs(c.x.Rows(row, 1)) * ElementAt(statistics, 2 * row + 1));
    }
    return largest;
  }

  void CheckForward(const Case& c, DType dtype) {
    SCOPED_TRACE(c.x.shape.ToString());
    const TensorView y = New(dtype, c.x.shape, "y"), y_expected = New(dtype, c.x.shape);
    const TensorView s = New(DType::kF32, {c.x.rows(), 2}, "statistics");
    const TensorView s_expected = New(DType::kF32, s.shape);
    cpu_.Norm(c.kind, c.x, c.weight, c.bias, kEpsilon, y, s);
    reference_.Norm(c.kind, c.x, c.weight, c.bias, kEpsilon, y_expected, s_expected);
    const double magnitude = NormalizedMagnitude(c, s_expected) * MaxAbs(c.weight) +
                             (c.bias.empty() ? 0.0 : MaxAbs(c.bias));
    EXPECT_TRUE(Near(y, y_expected, RoundingOf(dtype, magnitude, c.x.columns())));
    Tolerance tolerance = RoundingOf(DType::kF32, MaxAbs(c.x), c.x.columns());
    tolerance.relative += 0x1p-24 * std::sqrt(static_cast<double>(c.x.columns()));
    // The deviation of nearly equal values feels the rounding of their mean.
    if (c.x.columns() > 2) {
      EXPECT_TRUE(Near(s, s_expected, tolerance));
    }
  }

  void CheckBackward(const Case& c, DType dtype, bool add) {
    SCOPED_TRACE(c.x.shape.ToString());
    const int64_t rows = c.x.rows(), width = c.x.columns();
    const TensorView statistics = Statistics(c);
    const TensorView dy = Normals(dtype, c.x.shape, "dy");
    const TensorView dx = Normals(DType::kF32, c.x.shape, "dx"), dx_expected = CopyOf(dx);
    const TensorView dw = Normals(DType::kF32, {width}, "dweight"), dw_expected = CopyOf(dw);
    TensorView db, db_expected;
    if (!c.bias.empty()) {
      db = Normals(DType::kF32, {width}, "dbias");
      db_expected = CopyOf(db);
    }
    cpu_.NormBackward(c.kind, dy, c.x, c.weight, statistics, dx, dw, add, db, add);
    reference_.NormBackward(c.kind, dy, c.x, c.weight, statistics, dx_expected, dw_expected, add,
                            db_expected, add);
    const double normalized = NormalizedMagnitude(c, statistics);
    double scale = 0;
    for (int64_t row = 0; row < rows; ++row) {
      scale = std::max(scale, ElementAt(statistics, 2 * row + 1));
    }
    const double slope = MaxAbs(dy);
    EXPECT_TRUE(Near(dx, dx_expected,
                     RoundingOf(DType::kF32,
                                MaxAbs(dx_expected) + scale * slope * MaxAbs(c.weight) *
                                                          (1 + normalized * normalized),
                                width)));
    EXPECT_TRUE(Near(dw, dw_expected,
                     RoundingOf(DType::kF32, MaxAbs(dw_expected) + slope * normalized, rows)));
    if (!c.bias.empty()) {
      EXPECT_TRUE(
          Near(db, db_expected, RoundingOf(DType::kF32, MaxAbs(db_expected) + slope, rows)));
    }
  }
};
INSTANTIATE_KERNEL_TEST(NormTest);

TEST_P(NormTest, ForwardMatchesTheReference) {
  for (const NormKind kind : kKinds) {
    for (const bool with_bias : {false, true}) {
      for (const DType x : kFloatTypes) {
        for (const DType y : kFloatTypes) {
          for (const int64_t width : kWidths) {
            CheckForward(NewCase(kind, x, 5, width, with_bias), y);
          }
        }
      }
      for (const int64_t rows : kRows) {
        CheckForward(NewCase(kind, DType::kF32, rows, 33, with_bias), DType::kF32);
      }
    }
  }
}

TEST_P(NormTest, BackwardMatchesTheReference) {
  for (const NormKind kind : kKinds) {
    for (const bool with_bias : {false, true}) {
      for (const DType x : kFloatTypes) {
        for (const DType dy : kFloatTypes) {
          for (const int64_t width : kWidths) {
            CheckBackward(NewCase(kind, x, 5, width, with_bias), dy, width % 2 == 0);
          }
        }
      }
      for (const bool add : {false, true}) {
        for (const int64_t rows : kRows) {
          CheckBackward(NewCase(kind, DType::kF32, rows, 33, with_bias), DType::kF32, add);
        }
      }
    }
  }
}

// A mean far above the deviation: the square of the mean would swallow the variance.
TEST_P(NormTest, LargeMeansDoNotCancel) {
  const Case c = NewCase(NormKind::kLayerNorm, DType::kF32, 4, 1000, false);
  for (int64_t i = 0; i < c.x.size(); ++i) c.x.as<float>()[i] += 10000.0f;
  const TensorView y = New(DType::kF32, c.x.shape, "y"), statistics = New(DType::kF32, {4, 2});
  cpu_.Norm(c.kind, c.x, c.weight, c.bias, kEpsilon, y, statistics);
  for (int64_t row = 0; row < 4; ++row) {
    EXPECT_NEAR(statistics.as<float>()[2 * row + 1], 1.0, 0.1);
  }
  CheckForward(c, DType::kF32);
}

TEST_P(NormTest, RowsOfZerosGiveTheBias) {
  for (const NormKind kind : kKinds) {
    const Case c = NewCase(kind, DType::kF32, 3, 40, true);
    cpu_.Zero(c.x);
    const TensorView y = New(DType::kF32, c.x.shape), statistics = New(DType::kF32, {3, 2});
    cpu_.Norm(kind, c.x, c.weight, c.bias, kEpsilon, y, statistics);
    for (int64_t row = 0; row < 3; ++row) {
      EXPECT_TRUE(SameBytes(y.Rows(row, 1).Reshaped({40}), c.bias));
    }
    CheckBackward(c, DType::kF32, false);
  }
}

TEST_P(NormTest, NanStaysInItsRow) {
  const Case c = NewCase(NormKind::kLayerNorm, DType::kF32, 3, 40, false);
  c.x.as<float>()[40] = std::nanf("");
  const TensorView y = New(DType::kF32, c.x.shape), statistics = New(DType::kF32, {3, 2});
  cpu_.Norm(c.kind, c.x, c.weight, c.bias, kEpsilon, y, statistics);
  for (int64_t i = 0; i < y.size(); ++i) {
    EXPECT_EQ(std::isnan(y.as<float>()[i]), i / 40 == 1) << i;
  }
}

TEST_P(NormTest, ResultsDoNotDependOnTheNumberOfThreads) {
  const Case c = NewCase(NormKind::kLayerNorm, DType::kBF16, 1000, 100, true);
  const TensorView statistics = Statistics(c);
  const TensorView dy = Normals(DType::kBF16, c.x.shape);
  ExpectSameForAnyThreads([&] {
    const TensorView dx = New(DType::kF32, c.x.shape);
    const TensorView gradients = New(DType::kF32, {2, 100});
    cpu_.Zero(dx);
    cpu_.NormBackward(c.kind, dy, c.x, c.weight, statistics, dx,
                      gradients.Rows(0, 1).Reshaped({100}), false,
                      gradients.Rows(1, 1).Reshaped({100}), false);
    return gradients;
  });
}

TEST_P(NormTest, DryRunsTakeTheSameScratch) {
  ExpectDryTakesTheSame([](CpuBackend& backend) {
    Arena& arena = backend.arena();
    const auto allocate = [&](Shape shape) {
      const TensorView view = arena.Allocate(Memory::kActivations, DType::kF32, shape, "tensor");
      backend.Zero(view);
      return view;
    };
    const TensorView x = allocate({130, 40}), w = allocate({40}), statistics = allocate({130, 2});
    backend.Norm(NormKind::kLayerNorm, x, w, w, kEpsilon, x, statistics);
    backend.NormBackward(NormKind::kLayerNorm, x, x, w, statistics, allocate({130, 40}),
                         allocate({40}), false, allocate({40}), false);
  });
}

TEST_P(NormTest, WrongShapesAndDtypesAreRefused) {
  const Case c = NewCase(NormKind::kLayerNorm, DType::kF32, 3, 40, true);
  const TensorView statistics = New(DType::kF32, {3, 2});
  EXPECT_THROW(cpu_.Norm(c.kind, c.x, New(DType::kF32, {39}), c.bias, kEpsilon, c.x, statistics),
               InternalError);
  EXPECT_THROW(cpu_.Norm(c.kind, c.x, New(DType::kBF16, {40}), c.bias, kEpsilon, c.x, statistics),
               InternalError);
  EXPECT_THROW(
      cpu_.Norm(c.kind, c.x, c.weight, c.bias, kEpsilon, New(DType::kF32, {4, 40}), statistics),
      InternalError);
  EXPECT_THROW(cpu_.NormBackward(c.kind, c.x, c.x, c.weight, statistics, New(DType::kBF16, {3, 40}),
                                 New(DType::kF32, {40}), false, TensorView(), false),
               InternalError);
}

// As with a weight of ones.
TEST_P(NormTest, NeedsNoWeight) {
  for (const DType dtype : kFloatTypes) {
    const TensorView x = Normals(DType::kF32, {70, 33}), dy = Normals(dtype, x.shape);
    const TensorView ones = New(DType::kF32, {33});
    std::fill_n(ones.as<float>(), 33, 1.0f);
    const TensorView y = New(dtype, x.shape), y_expected = New(dtype, x.shape);
    const TensorView statistics = New(DType::kF32, {70, 2}),
                     statistics_expected = CopyOf(statistics);
    cpu_.Norm(NormKind::kRmsNorm, x, {}, {}, kEpsilon, y, statistics);
    cpu_.Norm(NormKind::kRmsNorm, x, ones, {}, kEpsilon, y_expected, statistics_expected);
    EXPECT_TRUE(SameBytes(y, y_expected));
    EXPECT_TRUE(SameBytes(statistics, statistics_expected));
    const TensorView dx = Normals(DType::kF32, x.shape), dx_expected = CopyOf(dx);
    cpu_.NormBackward(NormKind::kRmsNorm, dy, x, {}, statistics, dx, {}, false, {}, false);
    cpu_.NormBackward(NormKind::kRmsNorm, dy, x, ones, statistics, dx_expected,
                      New(DType::kF32, {33}), false, {}, false);
    EXPECT_TRUE(SameBytes(dx, dx_expected));
  }
}

}  // namespace
}  // namespace terrace
