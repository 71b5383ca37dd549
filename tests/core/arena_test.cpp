#include "core/arena.h"

#include <gtest/gtest.h>

#include "core/parallel.h"

namespace terrace {
namespace {

void Exercise(Arena& arena) {
  arena.Allocate(Memory::kWeights, DType::kBF16, {3, 5}, "w");
  {
    Arena::Frame activations(arena);
    arena.Allocate(Memory::kActivations, DType::kF32, {7, 9}, "x");
    {
      Arena::Frame scratch(arena);
      arena.Allocate(Memory::kScratch, DType::kF32, {1000}, "s");
    }
    arena.Allocate(Memory::kActivations, DType::kI64, {11}, "rows");
  }
  arena.Allocate(Memory::kOptimizer, DType::kF32, {4}, "m");
}

TEST(ArenaTest, DryPeakIsTheCapacityThatTheRealRunNeeds) {
  Arena dry = Arena::Dry();
  Exercise(dry);
  Arena real(dry.ledger().total_peak_bytes);
  Exercise(real);
  EXPECT_EQ(real.ledger().total_peak_bytes, dry.ledger().total_peak_bytes);
  EXPECT_EQ(real.ledger().at_peak_bytes, dry.ledger().at_peak_bytes);
  EXPECT_EQ(real.ledger().total_bytes, dry.ledger().total_bytes);

  Arena short_by_one_line(dry.ledger().total_peak_bytes - Arena::kAlignment);
  EXPECT_THROW(Exercise(short_by_one_line), InternalError);
}

TEST(ArenaTest, TensorsAreAlignedAndDoNotOverlap) {
  Arena arena(1 << 16);
  const TensorView a = arena.Allocate(Memory::kWeights, DType::kBF16, {3}, "a");
  const TensorView b = arena.Allocate(Memory::kWeights, DType::kF32, {3}, "b");
  const TensorView s = arena.Allocate(Memory::kScratch, DType::kF32, {3}, "s");
  for (const TensorView& view : {a, b, s}) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(view.data) % Arena::kAlignment, 0u);
  }
  EXPECT_GE(b.data - a.data, a.bytes());
  EXPECT_GE(s.data - b.data, b.bytes());
}

TEST(ArenaTest, FramesReturnWhatWasTakenInThem) {
  Arena arena(1 << 16);
  const int64_t before = arena.ledger().total_bytes;
  std::byte* first = nullptr;
  for (int repeat = 0; repeat < 3; ++repeat) {
    Arena::Frame frame(arena);
    const TensorView view = arena.Allocate(Memory::kActivations, DType::kF32, {100}, "x");
    if (repeat == 0) first = view.data;
    EXPECT_EQ(view.data, first);
  }
  EXPECT_EQ(arena.ledger().total_bytes, before);
  EXPECT_GT(arena.ledger().total_peak_bytes, before);
}

TEST(ArenaTest, ErrorNamesTheTensor) {
  Arena arena(128);
  try {
    arena.Allocate(Memory::kWeights, DType::kF32, {1000}, "layers.0.w");
    FAIL();
  } catch (const InternalError& error) {
    EXPECT_NE(std::string(error.what()).find("layers.0.w"), std::string::npos) << error.what();
  }
}

TEST(ParallelForTest, BrokenContractsReachTheCaller) {
  const auto run = [](const auto& body) { ParallelFor(100, 1, body); };
  EXPECT_THROW(run([](int64_t i, int64_t) { TERRACE_CHECK(i != 50, "block {}", i); }),
               InternalError);
  EXPECT_THROW(run([](int64_t i, int64_t) {
                 if (i == 50) Fail("block {}", i);
               }),
               Error);
}

TEST(TensorTest, RowsAndReshape) {
  Arena arena(1 << 16);
  const TensorView x = arena.Allocate(Memory::kWeights, DType::kF32, {4, 6}, "x");
  EXPECT_EQ(x.Rows(1, 2).data - x.data, 6 * 4);
  EXPECT_EQ(x.Rows(1, 2).shape, (Shape{2, 6}));
  EXPECT_EQ(x.Reshaped({24}).size(), 24);
  EXPECT_THROW(x.Rows(3, 2), InternalError);
  EXPECT_THROW(x.Reshaped({5}), InternalError);
  EXPECT_THROW(x.as<BF16>(), InternalError);
}

TEST(BF16Test, RoundsToNearestEvenAndKeepsNan) {
  EXPECT_EQ(ToFloat(ToBF16(1.0f)), 1.0f);
  EXPECT_EQ(ToFloat(ToBF16(-2.5f)), -2.5f);
  EXPECT_EQ(ToBF16(std::bit_cast<float>(0x3f808000u)).bits, 0x3f80);  // tie to even, down
  EXPECT_EQ(ToBF16(std::bit_cast<float>(0x3f818000u)).bits, 0x3f82);  // tie to even, up
  EXPECT_EQ(ToBF16(std::bit_cast<float>(0x3f808001u)).bits, 0x3f81);
  EXPECT_TRUE(ToFloat(ToBF16(std::bit_cast<float>(0x7f800001u))) !=
              ToFloat(ToBF16(std::bit_cast<float>(0x7f800001u))));
}

}  // namespace
}  // namespace terrace
