#include <cmath>
#include <numeric>

#include "support/kernel_fixture.h"

namespace terrace {
namespace {

class RowsTest : public KernelTest {};
INSTANTIATE_KERNEL_TEST(RowsTest);

TEST_P(RowsTest, GatherMovesRowsUnchanged) {
  for (const DType dtype : kFloatTypes) {
    for (const int64_t width : kWidths) {
      for (const int64_t rows : {0, 1, 300}) {
        const TensorView x = Normals(dtype, {50, width});
        const TensorView from = Indices(DType::kI64, {rows}, 50);
        const TensorView y = New(dtype, {rows, width}, "y"), expected = New(dtype, y.shape);
        cpu_.GatherRows(x, from, y);
        reference_.GatherRows(x, from, expected);
        EXPECT_TRUE(SameBytes(y, expected));
      }
    }
  }
}

TEST_P(RowsTest, AddGatheredMatchesTheReference) {
  for (const DType dtype : kFloatTypes) {
    for (const int64_t width : kWidths) {
      for (const int64_t choices : {1, 2, 8}) {
        for (const int64_t tokens : {0, 1, 150}) {
          const TensorView x = Normals(dtype, {tokens * choices, width});
          const TensorView rows =
              Indices(DType::kI64, {tokens, choices}, std::max<int64_t>(1, tokens * choices));
          const TensorView y = Normals(DType::kF32, {tokens, width}, "y"), expected = CopyOf(y);
          cpu_.AddGatheredRows(x, rows, y);
          reference_.AddGatheredRows(x, rows, expected);
          EXPECT_TRUE(Near(y, expected, RoundingOf(DType::kF32, 4, choices)));
        }
      }
    }
  }
}

TEST_P(RowsTest, EmbeddingMatchesTheReference) {
  for (const DType table : kFloatTypes) {
    for (const DType positions : kFloatTypes) {
      for (const int64_t width : kWidths) {
        for (const bool with_positions : {false, true}) {
          const TensorView tokens_table = Normals(table, {37, width});
          const TensorView positions_table =
              with_positions ? Normals(positions, {30, width}) : TensorView();
          const TensorView ids = Indices(DType::kI32, {60}, 37);
          const TensorView y = New(DType::kF32, {60, width}, "y"), expected = CopyOf(y);
          cpu_.Embedding(ids, tokens_table, positions_table, 20, 10, y);
          reference_.Embedding(ids, tokens_table, positions_table, 20, 10, expected);
          EXPECT_TRUE(SameBytes(y, expected));
        }
      }
    }
  }
}

TEST_P(RowsTest, EmbeddingBackwardMatchesTheReference) {
  for (const DType dtype : kFloatTypes) {
    for (const bool add : {false, true}) {
      for (const int64_t width : kWidths) {
        for (const int64_t vocabulary : {1, 37, 501}) {
          for (const int64_t tokens : {0, 1, 200}) {
            const TensorView dy = Normals(DType::kF32, {tokens, width});
            const TensorView ids = Indices(DType::kI32, {tokens}, vocabulary);
            const TensorView dtable = Normals(dtype, {vocabulary, width}, "dtable");
            const TensorView expected = CopyOf(dtable);
            cpu_.EmbeddingBackward(dy, ids, dtable, add);
            reference_.EmbeddingBackward(dy, ids, expected, add);
            EXPECT_TRUE(
                Near(dtable, expected, RoundingOf(dtype, MaxAbs(expected) + MaxAbs(dy), tokens)));
          }
        }
      }
    }
  }
}

// An odd vocabulary above 65,535, its first and last ids among those that occur.
TEST_P(RowsTest, EmbeddingOfALargeOddVocabulary) {
  constexpr int64_t kVocabulary = 70001;
  const TensorView table = Normals(DType::kBF16, {kVocabulary, 3});
  const TensorView ids = Indices(DType::kI32, {100}, kVocabulary);
  ids.as<int32_t>()[0] = kVocabulary - 1;
  ids.as<int32_t>()[1] = 0;
  ids.as<int32_t>()[99] = kVocabulary - 1;
  const TensorView y = New(DType::kF32, {100, 3}), y_expected = New(DType::kF32, {100, 3});
  cpu_.Embedding(ids, table, TensorView(), 100, 0, y);
  reference_.Embedding(ids, table, TensorView(), 100, 0, y_expected);
  EXPECT_TRUE(SameBytes(y, y_expected));
  const TensorView dtable = CopyOf(table), dtable_expected = CopyOf(table);
  cpu_.EmbeddingBackward(y, ids, dtable, false);
  reference_.EmbeddingBackward(y, ids, dtable_expected, false);
  EXPECT_TRUE(Near(dtable, dtable_expected, RoundingOf(DType::kBF16, 2 * MaxAbs(y))));
}

// Each contribution is far below half a step of the sum: adding them one by one in bfloat16
// would stand still at 0.25.
TEST_P(RowsTest, RepeatedIdsAreSummedBeforeRounding) {
  const TensorView dy = New(DType::kF32, {1024, 5});
  std::fill_n(dy.as<float>(), dy.size(), 0x1p-10f);
  const TensorView ids = New(DType::kI32, {1024});
  std::fill_n(ids.as<int32_t>(), 1024, 2);
  const TensorView dtable = New(DType::kBF16, {4, 5});
  cpu_.EmbeddingBackward(dy, ids, dtable, false);
  for (int64_t i = 0; i < dtable.size(); ++i) {
    EXPECT_EQ(ElementAt(dtable, i), i / 5 == 2 ? 1.0 : 0.0) << i;
  }
}

TEST_P(RowsTest, PositionsBackwardMatchesTheReference) {
  for (const DType dtype : kFloatTypes) {
    for (const bool add : {false, true}) {
      for (const int64_t width : kWidths) {
        for (const auto& [rows, length] :
             {std::pair<int64_t, int64_t>{0, 4}, {5, 5}, {60, 20}, {50, 20}, {3, 20}}) {
          const TensorView dy = Normals(DType::kF32, {rows, width});
          const TensorView dtable = Normals(dtype, {23, width}, "dtable");
          const TensorView expected = CopyOf(dtable);
          cpu_.PositionsBackward(dy, length, dtable, add);
          reference_.PositionsBackward(dy, length, expected, add);
          EXPECT_TRUE(Near(dtable, expected, RoundingOf(dtype, 3 * MaxAbs(dy) + 4, rows)));
        }
      }
    }
  }
}

TEST_P(RowsTest, IndicesOutOfRangeAreRefused) {
  const TensorView x = Normals(DType::kF32, {4, 8});
  for (const int64_t wild : {int64_t{-1}, int64_t{4}, int64_t{1} << 40}) {
    const TensorView rows = Indices(DType::kI64, {3}, 4, "rows");
    rows.as<int64_t>()[2] = wild;
    EXPECT_THROW(cpu_.GatherRows(x, rows, New(DType::kF32, {3, 8})), InternalError);
    EXPECT_THROW(cpu_.AddGatheredRows(x, rows.Reshaped({3, 1}), Normals(DType::kF32, {3, 8})),
                 InternalError);
  }
  for (const int32_t wild : {-1, 4, INT32_MAX}) {
    const TensorView ids = Indices(DType::kI32, {4}, 4, "ids");
    ids.as<int32_t>()[1] = wild;
    EXPECT_THROW(cpu_.Embedding(ids, x, TensorView(), 4, 0, New(DType::kF32, {4, 8})),
                 InternalError);
    EXPECT_THROW(cpu_.EmbeddingBackward(x, ids, New(DType::kF32, {4, 8}), false), InternalError);
  }
  const TensorView ids = Indices(DType::kI32, {4}, 4);
  EXPECT_THROW(cpu_.Embedding(ids, x, x, 4, 1, New(DType::kF32, {4, 8})), InternalError);
  EXPECT_THROW(cpu_.PositionsBackward(x, 4, New(DType::kF32, {3, 8}), false), InternalError);
}

TEST_P(RowsTest, ResultsDoNotDependOnTheNumberOfThreads) {
  const TensorView dy = Normals(DType::kF32, {3000, 100});
  const TensorView ids = Indices(DType::kI32, {3000}, 700);
  ExpectSameForAnyThreads([&] {
    const TensorView dtable = New(DType::kBF16, {700, 100});
    cpu_.EmbeddingBackward(dy, ids, dtable, false);
    return dtable;
  });
  ExpectSameForAnyThreads([&] {
    const TensorView dtable = New(DType::kF32, {1000, 100});
    cpu_.PositionsBackward(dy, 1000, dtable, false);
    return dtable;
  });
  const TensorView rows = Indices(DType::kI64, {1500, 2}, 3000);
  ExpectSameForAnyThreads([&] {
    const TensorView y = New(DType::kF32, {1500, 100});
    cpu_.Zero(y);
    cpu_.AddGatheredRows(dy, rows, y);
    return y;
  });
}

TEST_P(RowsTest, DryRunsTakeTheSameScratch) {
  ExpectDryTakesTheSame([](CpuBackend& backend) {
    Arena& arena = backend.arena();
    const auto allocate = [&](DType dtype, Shape shape) {
      const TensorView view = arena.Allocate(Memory::kActivations, dtype, shape, "tensor");
      backend.Zero(view);
      return view;
    };
    const TensorView ids = allocate(DType::kI32, {200});
    const TensorView table = allocate(DType::kF32, {50, 40}), y = allocate(DType::kF32, {200, 40});
    backend.Embedding(ids, table, TensorView(), 200, 0, y);
    backend.EmbeddingBackward(y, ids, table, true);
    backend.PositionsBackward(y, 50, table, false);
    const TensorView rows = allocate(DType::kI64, {200, 1});
    backend.AddGatheredRows(y, rows, y);
    backend.GatherRows(y, rows.Reshaped({200}), allocate(DType::kF32, {200, 40}));
  });
}

}  // namespace
}  // namespace terrace
