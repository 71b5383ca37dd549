// Products of a layer at every row count, with every kind of kernel: exact on small integers, the
// same bits from any number of threads, and with the scratch that was planned.
#include <gtest/gtest.h>
#include <omp.h>

#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/matmul.h"
#include "core/rng.h"
#include "support/compare.h"
#include "support/reference_backend.h"

namespace terrace {
namespace {

constexpr int64_t kMostRows = 256;
constexpr int64_t kIn = 77;  // neither 64 nor a vector's length divides the widths
constexpr int64_t kOut = 130;
constexpr DType kF32 = DType::kF32;
constexpr DType kBF16 = DType::kBF16;

class ThreadsForNow {
 public:
  explicit ThreadsForNow(int threads) : before_(omp_get_max_threads()) {
    omp_set_num_threads(threads);
  }
  ~ThreadsForNow() { omp_set_num_threads(before_); }

 private:
  int before_;
};

// Counts what is taken of scratch.
class ScratchCounter final : public ArenaWatcher {
 public:
  void Allocated(const Arena&, Memory category, int64_t, int64_t held_bytes, const char*) override {
    if (category == Memory::kScratch) bytes_ += held_bytes;
  }
  void Released(int64_t, int64_t) override {}
  int64_t Take() { return std::exchange(bytes_, 0); }

 private:
  int64_t bytes_ = 0;
};

// The parameter tells whether oneDNN's kernels for one size are used where they have a use. Where
// the processor has bfloat16 products they are of that kind; everywhere else bfloat16 is converted.
class TilesTest : public testing::TestWithParam<bool> {
 protected:
  TilesTest() {
    arena_.Watch(&real_);
    dry_arena_.Watch(&planned_);
  }

  // Small integers, so that every float32 sum is exact.
  TensorView Integers(DType dtype, Shape shape, uint64_t key) {
    const TensorView view = arena_.Allocate(Memory::kActivations, dtype, shape, "integers");
    for (int64_t i = 0; i < view.size(); ++i) {
      const uint64_t bits = RandomBits(key, i);
      SetElement(view, i, bits & 1 ? static_cast<double>(bits >> 1 & 3) - 1.0 : 0.0);
    }
    return view;
  }
  TensorView Normals(DType dtype, Shape shape, uint64_t key) {
    const TensorView view = arena_.Allocate(Memory::kActivations, dtype, shape, "normals");
    for (int64_t i = 0; i < view.size(); ++i) SetElement(view, i, RandomNormal(key, i));
    return view;
  }
  TensorView Like(TensorView view) {
    return arena_.Allocate(Memory::kActivations, view.dtype, view.shape, view.name);
  }
  static void CopyBytes(TensorView from, TensorView to) {
    std::memcpy(to.data, from.data, from.bytes());
  }
  static TensorView WithoutMemory(TensorView view) {
    view.data = nullptr;
    return view;
  }

  // Runs the operation on `threads` threads and on the dry arena, which must take the same.
  // `operation` gets the backend, and views as they are there.
  template <typename Operation, typename... Views>
  void Run(int threads, const Operation& operation, Views... views) {
    const ThreadsForNow now(threads);
    operation(cpu_, views...);
    operation(dry_, WithoutMemory(views)...);
    EXPECT_EQ(real_.Take(), planned_.Take());
  }

  // `expected` in float32, as the tensor's dtype holds it.
  static testing::AssertionResult Holds(TensorView actual, const std::vector<float>& expected) {
    for (int64_t i = 0; i < actual.size(); ++i) {
      const float value = actual.dtype == kF32 ? expected[i] : ToFloat(ToBF16(expected[i]));
      if (ElementAt(actual, i) != value) {
        return testing::AssertionFailure()
               << "element " << i << " is " << ElementAt(actual, i) << ", not " << value;
      }
    }
    return testing::AssertionSuccess();
  }

  static std::vector<float> ValuesOf(TensorView view) {
    std::vector<float> values(view.size());
    for (int64_t i = 0; i < view.size(); ++i) values[i] = static_cast<float>(ElementAt(view, i));
    return values;
  }

  ScratchCounter real_, planned_;
  Arena arena_{int64_t{128} << 20};
  Arena dry_arena_ = Arena::Dry();
  CpuBackend cpu_{arena_, std::make_unique<Matmul>(GetParam())};
  CpuBackend dry_{dry_arena_, std::make_unique<Matmul>(GetParam())};
};

INSTANTIATE_TEST_SUITE_P(Kernels, TilesTest, testing::Bool(), [](const auto& kernels) {
  return kernels.param ? "ForOneSize" : "ForAnySize";
});

struct Dtypes {
  DType inputs, output;
};
constexpr Dtypes kDtypes[] = {{kF32, kF32}, {kBF16, kF32}, {kBF16, kBF16}};

// c[i, j] of a and b^T, rows of both along the sum.
std::vector<float> ProductOf(const std::vector<float>& a, const std::vector<float>& b, int64_t rows,
                             int64_t columns, int64_t depth) {
  std::vector<float> c(rows * columns);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      float sum = 0;
      for (int64_t k = 0; k < depth; ++k) sum += a[i * depth + k] * b[j * depth + k];
      c[i * columns + j] = sum;
    }
  }
  return c;
}

std::vector<float> Transposed(const std::vector<float>& a, int64_t rows, int64_t columns) {
  std::vector<float> turned(a.size());
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) turned[j * rows + i] = a[i * columns + j];
  }
  return turned;
}

TEST_P(TilesTest, EveryRowCountIsExactOnAnyThreads) {
  for (const Dtypes& t : kDtypes) {
    const Arena::Frame frame(arena_);
    const TensorView x = Integers(t.inputs, {kMostRows, kIn}, 1);
    const TensorView w = Integers(t.inputs, {kOut, kIn}, 2);
    const TensorView dy = Integers(t.inputs, {kMostRows, kOut}, 3);
    const TensorView y = Integers(t.output, {kMostRows, kOut}, 4);
    const TensorView dx = Integers(t.output, {kMostRows, kIn}, 5);
    const TensorView dw = Integers(t.output, {kOut, kIn}, 6);
    const std::vector<float> x_values = ValuesOf(x), w_values = ValuesOf(w);
    const std::vector<float> dy_values = ValuesOf(dy);
    const std::vector<float> all_y = ProductOf(x_values, w_values, kMostRows, kOut, kIn);
    const std::vector<float> all_dx =
        ProductOf(dy_values, Transposed(w_values, kOut, kIn), kMostRows, kIn, kOut);
    std::vector<float> dw_sum(kOut * kIn);
    for (int64_t n = 1; n <= kMostRows; ++n) {
      SCOPED_TRACE(fmt::format("{} {} rows {}", NameOf(t.inputs), NameOf(t.output), n));
      for (int64_t o = 0; o < kOut; ++o) {
        for (int64_t i = 0; i < kIn; ++i) {
          dw_sum[o * kIn + i] += dy_values[(n - 1) * kOut + o] * x_values[(n - 1) * kIn + i];
        }
      }
      const bool add = n % 2;
      // What an added product has to give, of what is there and the product.
      const auto sum = [&](TensorView there, const std::vector<float>& product) {
        std::vector<float> expected(there.size());
        for (int64_t i = 0; i < there.size(); ++i) {
          expected[i] = product[i] + (add ? static_cast<float>(ElementAt(there, i)) : 0);
        }
        return expected;
      };
      for (const int threads : {1, 4}) {
        // Rows that belong to nobody stay as they are.
        const Arena::Frame result_frame(arena_);
        const TensorView y_result = Like(y), dx_result = Like(dx), dw_result = Like(dw);
        CopyBytes(y, y_result);
        CopyBytes(dx, dx_result);
        CopyBytes(dw, dw_result);
        Run(
            threads,
            [&](CpuBackend& cpu, TensorView a, TensorView b, TensorView c) {
              cpu.Linear(a, b, c, add);
            },
            x.Rows(0, n), w, y_result.Rows(0, n));
        ASSERT_TRUE(Holds(y_result.Rows(0, n), sum(y.Rows(0, n), all_y)));
        Run(
            threads,
            [&](CpuBackend& cpu, TensorView a, TensorView b, TensorView c) {
              cpu.LinearBackwardInput(a, b, c, add);
            },
            dy.Rows(0, n), w, dx_result.Rows(0, n));
        ASSERT_TRUE(Holds(dx_result.Rows(0, n), sum(dx.Rows(0, n), all_dx)));
        Run(
            threads,
            [&](CpuBackend& cpu, TensorView a, TensorView b, TensorView c) {
              cpu.LinearBackwardWeight(a, b, c, add);
            },
            dy.Rows(0, n), x.Rows(0, n), dw_result);
        ASSERT_TRUE(Holds(dw_result, sum(dw, dw_sum)));
        for (const auto& [before, after] : {std::pair(y, y_result), {dx, dx_result}}) {
          if (n == kMostRows) continue;
          ASSERT_TRUE(SameBytes(after.Rows(n, kMostRows - n), before.Rows(n, kMostRows - n)));
        }
      }
    }
  }
}

TEST_P(TilesTest, EveryShareOfAnExpertIsExactOnAnyThreads) {
  constexpr int64_t kExperts = 5;
  for (const Dtypes& t : kDtypes) {
    const Arena::Frame frame(arena_);
    std::vector<TensorView> weights;
    for (int64_t e = 0; e < kExperts; ++e) {
      weights.push_back(Integers(t.inputs, {kOut, kIn}, 10 + e));
    }
    const TensorView x = Integers(t.inputs, {kMostRows, kIn}, 1);
    const TensorView dy = Integers(t.inputs, {kMostRows, kOut}, 2);
    std::vector<std::vector<float>> all_y, all_dx;  // as if all rows were the expert's
    for (const TensorView& w : weights) {
      all_y.push_back(ProductOf(ValuesOf(x), ValuesOf(w), kMostRows, kOut, kIn));
      all_dx.push_back(
          ProductOf(ValuesOf(dy), Transposed(ValuesOf(w), kOut, kIn), kMostRows, kIn, kOut));
    }
    const TensorView offsets =
        arena_.Allocate(Memory::kActivations, DType::kI64, {kExperts + 1}, "offsets");
    // Shares that add up to the same number of rows, so that what is planned has to serve them all.
    for (int64_t first = 0; first <= kMostRows; ++first) {
      SCOPED_TRACE(fmt::format("{} {} first {}", NameOf(t.inputs), NameOf(t.output), first));
      const int64_t rest = kMostRows - first;
      const std::array<int64_t, kExperts + 1> ends = {0,
                                                      first,
                                                      first,
                                                      first + std::min<int64_t>(3, rest),
                                                      first + (3 + rest) / 2 * (rest > 3),
                                                      kMostRows};
      for (int64_t e = 0; e <= kExperts; ++e) {
        offsets.as<int64_t>()[e] = e == 0 ? 0 : std::max(ends[e], offsets.as<int64_t>()[e - 1]);
      }
      const Arena::Frame result_frame(arena_);
      const bool add = first % 2;
      const int threads = first % 4 < 2 ? 1 : 3;
      for (const bool backward : {false, true}) {
        const int64_t width = backward ? kIn : kOut;
        const TensorView result = Integers(t.output, {kMostRows, width}, 4);
        std::vector<float> expected = ValuesOf(result);
        for (int64_t e = 0; e < kExperts; ++e) {
          const auto [begin, end] =
              std::pair(offsets.as<int64_t>()[e], offsets.as<int64_t>()[e + 1]);
          for (int64_t i = begin * width; i < end * width; ++i) {
            expected[i] = (add ? expected[i] : 0) + (backward ? all_dx : all_y)[e][i];
          }
        }
        Run(
            threads,
            [&](CpuBackend& cpu, TensorView in, TensorView out) {
              if (backward) {
                cpu.GroupedLinearBackwardInput(in, offsets, weights, out, add);
              } else {
                cpu.GroupedLinear(in, offsets, weights, out, add);
              }
            },
            backward ? dy : x, result);
        ASSERT_TRUE(Holds(result, expected)) << (backward ? "backward" : "forward");
      }
    }
  }
}

// Sums that rounding makes depend on their order, of several tiles in all directions.
TEST_P(TilesTest, BitsRepeatOnAnyThreads) {
  for (const Dtypes& t : kDtypes) {
    for (const auto& [n, in, out] :
         {std::array<int64_t, 3>{111, 77, 130}, {300, 530, 270}, {530, 270, 600}, {3, 600, 1030}}) {
      const Arena::Frame frame(arena_);
      SCOPED_TRACE(
          fmt::format("{} {} N {} I {} O {}", NameOf(t.inputs), NameOf(t.output), n, in, out));
      const TensorView x = Normals(t.inputs, {n, in}, 1), w = Normals(t.inputs, {out, in}, 2);
      const TensorView dy = Normals(t.inputs, {n, out}, 3);
      const TensorView first_y = Normals(t.output, {n, out}, 4);
      const TensorView first_dx = Normals(t.output, {n, in}, 5);
      const TensorView first_dw = Normals(t.output, {out, in}, 6);
      const auto results = [&](int threads) {
        const TensorView y = Like(first_y), dx = Like(first_dx), dw = Like(first_dw);
        CopyBytes(first_y, y);
        CopyBytes(first_dx, dx);
        CopyBytes(first_dw, dw);
        Run(
            threads,
            [](CpuBackend& cpu, TensorView a, TensorView b, TensorView c) {
              cpu.Linear(a, b, c, true);
            },
            x, w, y);
        Run(
            threads,
            [](CpuBackend& cpu, TensorView a, TensorView b, TensorView c) {
              cpu.LinearBackwardInput(a, b, c, true);
            },
            dy, w, dx);
        Run(
            threads,
            [](CpuBackend& cpu, TensorView a, TensorView b, TensorView c) {
              cpu.LinearBackwardWeight(a, b, c, true);
            },
            dy, x, dw);
        return std::array{y, dx, dw};
      };
      const auto expected = results(1);
      for (const int threads : {1, 2, 4, 4}) {
        const auto actual = results(threads);
        for (size_t i = 0; i < actual.size(); ++i) {
          EXPECT_TRUE(SameBytes(actual[i], expected[i])) << i << " on " << threads << " threads";
        }
      }
    }
  }
}

// A layer's gradient on one thread, where a tile is as wide as the layer.
TEST_P(TilesTest, OneThreadTakesWidthsOfAnyRemainder) {
  for (const int64_t out : {1, 65, 100, 257, 1027}) {
    for (const Dtypes& t : kDtypes) {
      const Arena::Frame frame(arena_);
      const TensorView dy = Integers(t.inputs, {9, out}, 1), x = Integers(t.inputs, {9, kIn}, 2);
      const TensorView dw = Integers(t.output, {out, kIn}, 3);
      Run(
          1,
          [](CpuBackend& cpu, TensorView a, TensorView b, TensorView c) {
            cpu.LinearBackwardWeight(a, b, c, false);
          },
          dy, x, dw);
      EXPECT_TRUE(Holds(dw, ProductOf(Transposed(ValuesOf(dy), 9, out),
                                      Transposed(ValuesOf(x), 9, kIn), out, kIn, 9)))
          << out;
    }
  }
}

TEST_P(TilesTest, NoTokensLeaveNoGradient) {
  for (const Dtypes& t : kDtypes) {
    const Arena::Frame frame(arena_);
    const TensorView dy = Integers(t.inputs, {0, kOut}, 1), x = Integers(t.inputs, {0, kIn}, 2);
    const TensorView dw = Integers(t.output, {kOut, kIn}, 3);
    const std::vector<float> before = ValuesOf(dw);
    cpu_.LinearBackwardWeight(dy, x, dw, true);
    EXPECT_TRUE(Holds(dw, before));
    cpu_.LinearBackwardWeight(dy, x, dw, false);
    EXPECT_TRUE(Holds(dw, std::vector<float>(kOut * kIn)));
  }
}

// --- Single products ---

struct Case {
  DType inputs, output;
  bool a_transposed, b_transposed, add;
  Kernel kernel;
};

// Every thread runs every size at once, each in another order and with exactly the scratch that
// the product asks for.
TEST(MatmulTest, EverySizeInItsOwnScratchOnSeveralThreadsAtOnce) {
  constexpr int64_t kColumns = 128, kDepth = 77, kStride = 260;
  constexpr int kThreads = 3;
  constexpr std::byte kCanary{0xa5};
  for (const bool sized : {false, true}) {
    Matmul matmul(sized);
    std::vector<Case> cases;
    for (const bool add : {false, true}) {
      for (const auto& [a, b] : {std::pair(false, false), {false, true}, {true, false}}) {
        const Kernel kernel = sized ? Kernel::kThisSize : Kernel::kAnySize;
        cases.push_back({kF32, kF32, a, b, add, kernel});
        if (!matmul.HasBF16()) continue;
        cases.push_back({kBF16, kF32, a, b, add, Kernel::kAnySize});
        if (matmul.UsesAmx()) cases.push_back({kBF16, kBF16, a, b, add, Kernel::kAnySize});
        cases.push_back({kBF16, kF32, a, b, add, Kernel::kThisSize});
        cases.push_back({kBF16, kBF16, a, b, add, Kernel::kThisSize});
      }
    }
    for (const Case& c : cases) {
      // a is [m, k] or [k, m], all of ones but for one column in three; b of twos.
      std::vector<float> wide_a(kStride * kStride), wide_b(kStride * kStride, 2);
      for (size_t i = 0; i < wide_a.size(); ++i) wide_a[i] = static_cast<float>(i % 3) - 1;
      std::vector<BF16> narrow_a, narrow_b;
      for (const float value : wide_a) narrow_a.push_back(ToBF16(value));
      for (const float value : wide_b) narrow_b.push_back(ToBF16(value));
      const bool wide = c.inputs == kF32;
      const auto data = [&](std::vector<float>& floats, std::vector<BF16>& halves) {
        return wide ? reinterpret_cast<std::byte*>(floats.data())
                    : reinterpret_cast<std::byte*>(halves.data());
      };
      std::vector<std::string> errors(kThreads);
#pragma omp parallel num_threads(kThreads)
      {
        const int thread = omp_get_thread_num();
        const int64_t element_bytes = BytesOf(c.output);
        std::vector<std::byte> result(kMostRows * kColumns * element_bytes);
        for (int64_t turn = 0; turn < kMostRows && errors[thread].empty(); ++turn) {
          const int64_t m = 1 + (turn * (2 * thread + 1) + 64 * thread) % kMostRows;
          std::fill(result.begin(), result.end(), std::byte{0});
          const Product product{.m = m,
                                .n = kColumns,
                                .k = kDepth,
                                .a = {data(wide_a, narrow_a), c.inputs, kStride, c.a_transposed},
                                .b = {data(wide_b, narrow_b), c.inputs, kStride, c.b_transposed},
                                .c = {result.data(), c.output, kColumns},
                                .add = c.add,
                                .kernel = c.kernel};
          const int64_t bytes = matmul.ScratchBytes(product);
          std::vector<std::byte> memory(bytes + 128, kCanary);
          std::byte* const scratch =
              memory.data() + (-reinterpret_cast<intptr_t>(memory.data()) & 63);
          std::string& error = errors[thread];
          try {
            matmul.Run(product, {scratch, static_cast<size_t>(bytes)});
            for (std::byte* end = scratch + bytes; end != memory.data() + memory.size(); ++end) {
              if (*end != kCanary) error = "beyond its scratch: " + TextOf(product);
            }
            for (int64_t i = 0; i < m && error.empty(); ++i) {
              float expected = 0;
              for (int64_t k = 0; k < kDepth; ++k) {
                expected += 2 * wide_a[c.a_transposed ? k * kStride + i : i * kStride + k];
              }
              for (int64_t j = 0; j < kColumns; ++j) {
                const std::byte* const at = result.data() + (i * kColumns + j) * element_bytes;
                const float value = c.output == kF32 ? *reinterpret_cast<const float*>(at)
                                                     : ToFloat(*reinterpret_cast<const BF16*>(at));
                if (value != expected) {
                  error = fmt::format("{}: [{}, {}] is {}, not {}", TextOf(product), i, j, value,
                                      expected);
                }
              }
            }
          } catch (const std::exception& thrown) {
            error = TextOf(product) + ": " + thrown.what();
          }
        }
      }
      for (const std::string& error : errors) ASSERT_EQ(error, "");
    }
  }
}

TEST(MatmulTest, ScratchDoesNotDependOnWhoAsks) {
  const Product product{.m = 99,
                        .n = 128,
                        .k = 77,
                        .a = {nullptr, kF32, 77},
                        .b = {nullptr, kF32, 77, true},
                        .c = {nullptr, kF32, 128},
                        .kernel = Kernel::kThisSize};
  std::vector<int64_t> bytes;
  for (const int threads : {1, 2, 16}) {
    const ThreadsForNow now(threads);
    bytes.push_back(Matmul(true).ScratchBytes(product));
#pragma omp parallel num_threads(2)
    {
      Matmul matmul(true);
#pragma omp critical
      bytes.push_back(matmul.ScratchBytes(product));
    }
  }
  for (const int64_t each : bytes) EXPECT_EQ(each, bytes[0]);
}

TEST(MatmulTest, TooLittleScratchNamesTheProduct) {
  Matmul matmul;
  std::vector<float> values(64 * 64);
  std::byte* const data = reinterpret_cast<std::byte*>(values.data());
  const Product product{.m = 50,
                        .n = 60,
                        .k = 30,
                        .a = {data, kF32, 64},
                        .b = {data, kF32, 64, true},
                        .c = {data, kF32, 64},
                        .kernel = Kernel::kThisSize};
  EXPECT_EQ(TextOf(product), "f32 [50, 30] * [60, 30]^T to f32");
  const int64_t bytes = matmul.ScratchBytes(product);
  if (bytes == 0) return;  // kernels without AVX-512 ask for none
  std::vector<std::byte> scratch(bytes);
  try {
    matmul.Run(product, {scratch.data(), static_cast<size_t>(bytes - 1)});
    FAIL() << "ran";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(TextOf(product)), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace terrace
