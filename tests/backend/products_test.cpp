// Matrix products, attention and the fused head of the CPU backend, against the reference.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "core/rng.h"
#include "support/reference_backend.h"

namespace terrace {
namespace {

constexpr int64_t kArenaBytes = int64_t{256} << 20;

// Two backends, each with an arena of its own; tensors of one share values with the other's.
class ProductsTest : public testing::Test {
 protected:
  // Small integers, so that every float32 sum is exact; about half of them zero.
  TensorView Integers(DType dtype, Shape shape, uint64_t key) {
    const TensorView view = arena_.Allocate(Memory::kActivations, dtype, shape, "integers");
    for (int64_t i = 0; i < view.size(); ++i) {
      const uint64_t bits = RandomBits(key, static_cast<uint64_t>(i));
      SetElement(view, i, bits & 1 ? static_cast<double>(bits >> 1 & 3) - 1.0 : 0.0);
    }
    return view;
  }

  TensorView Normals(DType dtype, Shape shape, uint64_t key) {
    const TensorView view = arena_.Allocate(Memory::kActivations, dtype, shape, "normals");
    for (int64_t i = 0; i < view.size(); ++i) {
      SetElement(view, i, RandomNormal(key, static_cast<uint64_t>(i)));
    }
    return view;
  }

  TensorView CopyOf(TensorView view) {
    const TensorView copy =
        arena_.Allocate(Memory::kActivations, view.dtype, view.shape, view.name);
    std::copy_n(view.data, view.bytes(), copy.data);
    return copy;
  }

  static void ExpectSame(TensorView actual, TensorView expected, const std::string& what) {
    for (int64_t i = 0; i < actual.size(); ++i) {
      ASSERT_EQ(ElementAt(actual, i), ElementAt(expected, i)) << what << " at " << i;
    }
  }

  // Within `tolerance` of the largest expected magnitude; NaN never passes.
  static void ExpectNear(TensorView actual, TensorView expected, double tolerance,
                         const std::string& what) {
    double largest = 0;
    for (int64_t i = 0; i < expected.size(); ++i) {
      largest = std::max(largest, std::abs(ElementAt(expected, i)));
    }
    for (int64_t i = 0; i < actual.size(); ++i) {
      const double error = std::abs(ElementAt(actual, i) - ElementAt(expected, i));
      ASSERT_TRUE(error <= tolerance * largest)
          << what << " at " << i << ": " << ElementAt(actual, i) << ", not "
          << ElementAt(expected, i);
    }
  }

  Arena arena_{kArenaBytes};
  CpuBackend cpu_{arena_};
  ReferenceBackend reference_{arena_};
};

struct Dtypes {
  DType x, w, y;
};
constexpr Dtypes kDtypes[] = {{DType::kF32, DType::kF32, DType::kF32},
                              {DType::kBF16, DType::kBF16, DType::kBF16},
                              {DType::kBF16, DType::kBF16, DType::kF32},
                              {DType::kBF16, DType::kF32, DType::kF32},
                              {DType::kF32, DType::kBF16, DType::kBF16}};

TEST_F(ProductsTest, LinearIsExactOnSmallIntegers) {
  for (const auto& [n, i, o] : {std::array<int64_t, 3>{1, 1, 1},
                                {0, 8, 8},
                                {3, 17, 5},
                                {33, 31, 70},
                                {130, 64, 48},
                                {300, 24, 129},
                                {513, 40, 16},
                                {2, 80, 27'000}}) {  // more than is upcast at a time
    for (const Dtypes& t : kDtypes) {
      for (const bool add : {false, true}) {
        const Arena::Frame frame(arena_);
        const std::string what = fmt::format("N {} I {} O {} {} {} {} add {}", n, i, o, NameOf(t.x),
                                             NameOf(t.w), NameOf(t.y), add);
        const TensorView x = Integers(t.x, {n, i}, 1);
        const TensorView w = Integers(t.w, {o, i}, 2);
        const TensorView y = Integers(t.y, {n, o}, 3);
        const TensorView expected_y = CopyOf(y);
        cpu_.Linear(x, w, y, add);
        reference_.Linear(x, w, expected_y, add);
        ExpectSame(y, expected_y, "Linear " + what);

        const TensorView dy = Integers(t.x, {n, o}, 4);
        const TensorView dx = Integers(t.y, {n, i}, 5);
        const TensorView expected_dx = CopyOf(dx);
        cpu_.LinearBackwardInput(dy, w, dx, add);
        reference_.LinearBackwardInput(dy, w, expected_dx, add);
        ExpectSame(dx, expected_dx, "LinearBackwardInput " + what);

        const TensorView other_x = Integers(t.w, {n, i}, 6);
        const TensorView dw = Integers(t.y, {o, i}, 7);
        const TensorView expected_dw = CopyOf(dw);
        cpu_.LinearBackwardWeight(dy, other_x, dw, add);
        reference_.LinearBackwardWeight(dy, other_x, expected_dw, add);
        ExpectSame(dw, expected_dw, "LinearBackwardWeight " + what);
      }
    }
  }
}

TEST_F(ProductsTest, GroupedLinearIsExactWithAnyExpertIdle) {
  const int64_t in = 24, out = 40;
  for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{5, 0, 70, 200},
                                            {0, 3, 3, 1},
                                            {9, 9, 9, 0},
                                            {0, 0, 0, 700},
                                            {0, 1, 0, 0}}) {
    for (const Dtypes& t : kDtypes) {
      const Arena::Frame frame(arena_);
      const TensorView offsets = arena_.Allocate(Memory::kActivations, DType::kI64, {5}, "offsets");
      offsets.as<int64_t>()[0] = 0;
      std::vector<TensorView> weights;
      for (size_t e = 0; e < sizes.size(); ++e) {
        offsets.as<int64_t>()[e + 1] = offsets.as<int64_t>()[e] + sizes[e];
        weights.push_back(Integers(t.w, {out, in}, 10 + e));
      }
      const int64_t rows = offsets.as<int64_t>()[4];
      const TensorView x = Integers(t.x, {rows, in}, 1);
      const TensorView y = Integers(t.y, {rows, out}, 2);
      const TensorView expected_y = CopyOf(y);
      cpu_.GroupedLinear(x, offsets, weights, y, false);
      reference_.GroupedLinear(x, offsets, weights, expected_y, false);
      ExpectSame(y, expected_y, "GroupedLinear");

      const TensorView dy = Integers(t.x, {rows, out}, 3);
      const TensorView dx = Integers(t.y, {rows, in}, 4);
      const TensorView expected_dx = CopyOf(dx);
      cpu_.GroupedLinearBackwardInput(dy, offsets, weights, dx, true);
      reference_.GroupedLinearBackwardInput(dy, offsets, weights, expected_dx, true);
      ExpectSame(dx, expected_dx, "GroupedLinearBackwardInput");
    }
  }
}

TEST_F(ProductsTest, ScratchOfExpertsDoesNotDependOnTheirTokens) {
  Arena dry_arena = Arena::Dry();
  CpuBackend dry(dry_arena);
  const auto peak = [&](int64_t tokens) {
    const Arena::Frame frame(dry_arena);
    const int64_t before = dry_arena.ledger().total_bytes;
    const TensorView dy{nullptr, DType::kBF16, {tokens, 96}, "dy"};
    const TensorView x{nullptr, DType::kBF16, {tokens, 64}, "x"};
    const TensorView dw{nullptr, DType::kF32, {96, 64}, "dw"};
    dry.LinearBackwardWeight(dy, x, dw, false);
    return dry_arena.ledger().total_peak_bytes - before;
  };
  const int64_t of_one = peak(1);
  EXPECT_EQ(peak(37), of_one);
  EXPECT_EQ(peak(4096), of_one);
}

TEST_F(ProductsTest, AttentionAndItsGradient) {
  for (const AttentionShape& s : {AttentionShape{1, 1, 1, 1, 1, 8},
                                  {2, 7, 7, 4, 2, 8},
                                  {1, 130, 130, 4, 1, 16},
                                  {2, 70, 70, 6, 6, 24},
                                  {1, 300, 300, 2, 2, 64}}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const Arena::Frame frame(arena_);
      const int64_t tokens = s.batch * s.query_length;
      const Shape queries{tokens, s.heads * s.head_width};
      const Shape keys{tokens, s.kv_heads * s.head_width};
      const TensorView q = Normals(dtype, queries, 1), k = Normals(dtype, keys, 2),
                       v = Normals(dtype, keys, 3), dout = Normals(dtype, queries, 4);
      const TensorView out = Normals(dtype, queries, 5), expected_out = Normals(dtype, queries, 6);
      const TensorView sums = Normals(DType::kF32, {s.batch * s.heads * s.query_length}, 7);
      const TensorView expected_sums = CopyOf(sums);
      cpu_.Attention(s, q, k, v, out, sums);
      reference_.Attention(s, q, k, v, expected_out, expected_sums);
      // Probabilities are rounded to the products' dtype: 2^-8 for bfloat16, a few ulp else.
      const double tolerance = dtype == DType::kF32 ? 1e-5 : 0x1p-7;
      const std::string what = fmt::format("T {} H {} G {} C {} {}", s.query_length, s.heads,
                                           s.kv_heads, s.head_width, NameOf(dtype));
      ExpectNear(out, expected_out, tolerance, "out " + what);
      ExpectNear(sums, expected_sums, 1e-5, "log_sums " + what);

      const TensorView dq = Normals(dtype, queries, 8), dk = Normals(dtype, keys, 9),
                       dv = Normals(dtype, keys, 10);
      const TensorView expected_dq = CopyOf(dq), expected_dk = CopyOf(dk), expected_dv = CopyOf(dv);
      cpu_.AttentionBackward(s, q, k, v, out, sums, dout, dq, dk, dv);
      reference_.AttentionBackward(s, q, k, v, out, sums, dout, expected_dq, expected_dk,
                                   expected_dv);
      ExpectNear(dq, expected_dq, 2 * tolerance, "dq " + what);
      ExpectNear(dk, expected_dk, 2 * tolerance, "dk " + what);
      ExpectNear(dv, expected_dv, 2 * tolerance, "dv " + what);
    }
  }
}

TEST_F(ProductsTest, AttentionOfNewQueriesOnOldKeys) {
  const AttentionShape s{1, 3, 20, 4, 2, 8};
  const TensorView q = Normals(DType::kF32, {3, 32}, 1), k = Normals(DType::kF32, {20, 16}, 2),
                   v = Normals(DType::kF32, {20, 16}, 3), out = Normals(DType::kF32, {3, 32}, 4),
                   sums = Normals(DType::kF32, {12}, 5);
  const TensorView expected_out = CopyOf(out), expected_sums = CopyOf(sums);
  cpu_.Attention(s, q, k, v, out, sums);
  reference_.Attention(s, q, k, v, expected_out, expected_sums);
  ExpectNear(out, expected_out, 1e-5, "out");
  ExpectNear(sums, expected_sums, 1e-5, "log_sums");
}

TEST_F(ProductsTest, HeadLossAndItsGradientWithIgnoredTargets) {
  // 700 tokens of 13,001 words make two chunks.
  for (const auto& [tokens, width, vocabulary] :
       {std::array<int64_t, 3>{5, 16, 11}, {700, 8, 13001}, {64, 32, 512}}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const Arena::Frame frame(arena_);
      const TensorView x = Normals(dtype, {tokens, width}, 1);
      const TensorView w = Normals(dtype, {vocabulary, width}, 2);
      const TensorView targets =
          arena_.Allocate(Memory::kActivations, DType::kI32, {tokens}, "targets");
      for (int64_t n = 0; n < tokens; ++n) {
        targets.as<int32_t>()[n] =
            n % 5 == 3 ? kIgnoredTarget
                       : static_cast<int32_t>(RandomBits(3, static_cast<uint64_t>(n)) %
                                              static_cast<uint64_t>(vocabulary));
      }
      const TensorView dx = Normals(dtype, x.shape, 4), dw = Normals(DType::kF32, w.shape, 5);
      const TensorView expected_dx = CopyOf(dx), expected_dw = CopyOf(dw);
      const float scale = 1.0f / static_cast<float>(tokens);
      const double expected =
          reference_.HeadLoss(x, w, targets, scale, expected_dx, expected_dw, false);
      EXPECT_NEAR(cpu_.HeadLoss(x, w, targets, scale, {}, {}, false), expected, 1e-5 * expected);
      EXPECT_NEAR(cpu_.HeadLoss(x, w, targets, scale, dx, dw, false), expected, 1e-5 * expected);
      const double tolerance = dtype == DType::kF32 ? 1e-5 : 0x1p-7;
      ExpectNear(dx, expected_dx, tolerance, fmt::format("dx V {}", vocabulary));
      ExpectNear(dw, expected_dw, tolerance, fmt::format("dw V {}", vocabulary));
    }
  }
}

}  // namespace
}  // namespace terrace
