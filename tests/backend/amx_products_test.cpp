// Products on AMX: their index computations with emulated tiles on any machine, and the same tests
// on the processor's own where it has them.
#include "backend/cpu/amx_products.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "backend/cpu/amx_products-inl.h"
#include "core/rng.h"
#include "support/emulated_amx.h"

namespace terrace {
namespace {

constexpr AmxKind kKinds[] = {AmxKind::kForward, AmxKind::kInputGradient, AmxKind::kWeightGradient};

// Bytes between guards, so far from a multiple of 64 as asked.
class Guarded {
 public:
  Guarded(int64_t bytes, int64_t misalignment) : bytes_(bytes) {
    storage_.assign(static_cast<size_t>(bytes + 3 * kGuard), std::byte{kFill});
    const auto begin = reinterpret_cast<uintptr_t>(storage_.data());
    offset_ = kGuard + (kGuard - static_cast<int64_t>(begin % kGuard)) + misalignment;
  }

  std::byte* data() { return storage_.data() + offset_; }
  bool intact() const {
    for (int64_t i = 0; i < std::ssize(storage_); ++i) {
      const bool inside = i >= offset_ && i < offset_ + bytes_;
      if (!inside && storage_[static_cast<size_t>(i)] != std::byte{kFill}) return false;
    }
    return true;
  }

 private:
  static constexpr int64_t kGuard = 64;
  static constexpr uint8_t kFill = 0xff;  // a NaN in both dtypes

  int64_t bytes_, offset_;
  std::vector<std::byte> storage_;
};

void SetTo(std::byte* at, DType dtype, float value) {
  if (dtype == DType::kBF16) {
    const BF16 rounded = ToBF16(value);
    std::memcpy(at, &rounded, sizeof rounded);
  } else {
    std::memcpy(at, &value, sizeof value);
  }
}

float ValueAt(const std::byte* at, DType dtype) {
  if (dtype == DType::kBF16) {
    BF16 value;
    std::memcpy(&value, at, sizeof value);
    return ToFloat(value);
  }
  float value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

// A matrix as stored: what is between its rows is NaN and must stay.
class Matrix {
 public:
  Matrix(DType dtype, int64_t rows, int64_t columns, int64_t padding, int64_t misalignment)
      : dtype_(dtype),
        rows_(rows),
        columns_(columns),
        stride_(columns + padding),
        memory_(std::max<int64_t>(0, rows * stride_ - (rows > 0 ? padding : 0)) * BytesOf(dtype),
                misalignment * BytesOf(dtype)) {}

  // Small integers, so that every sum is exact in float32; about half of them zero.
  void FillIntegers(uint64_t key) {
    Fill([key](uint64_t i) {
      const uint64_t bits = RandomBits(key, i);
      return bits & 1 ? static_cast<float>(bits >> 1 & 3) - 1.0f : 0.0f;
    });
  }
  void FillNormals(uint64_t key) {
    Fill([key](uint64_t i) { return static_cast<float>(RandomNormal(key, i)); });
  }

  float Get(int64_t row, int64_t column) const {
    return ValueAt(const_cast<Matrix*>(this)->At(row, column), dtype_);
  }
  Operand AsOperand(bool transposed) { return {memory_.data(), dtype_, stride_, transposed}; }

  bool intact() const {
    if (!memory_.intact()) return false;
    for (int64_t row = 0; row + 1 < rows_; ++row) {
      for (int64_t column = columns_; column < stride_; ++column) {
        if (!std::isnan(Get(row, column))) return false;
      }
    }
    return true;
  }
  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }

 private:
  std::byte* At(int64_t row, int64_t column) {
    return memory_.data() + (row * stride_ + column) * BytesOf(dtype_);
  }
  template <class F>
  void Fill(const F& f) {
    for (int64_t row = 0; row < rows_; ++row) {
      for (int64_t column = 0; column < columns_; ++column) {
        SetTo(At(row, column), dtype_, f(static_cast<uint64_t>(row * columns_ + column)));
      }
    }
  }

  DType dtype_;
  int64_t rows_, columns_, stride_;
  Guarded memory_;
};

struct Case {
  AmxKind kind;
  int64_t m, n, k;
  DType output;
  bool add;
  int64_t padding = 0;       // elements after each stored row
  int64_t misalignment = 0;  // elements

  std::string ToString() const {
    return fmt::format("kind {} m {} n {} k {} {} add {} padding {} misalignment {}",
                       static_cast<int>(kind), m, n, k, NameOf(output), add, padding, misalignment);
  }
};

// The operands of a case.
struct Operands {
  Matrix a, b, c;

  explicit Operands(const Case& of)
      : a(of.kind == AmxKind::kWeightGradient
              ? Matrix(DType::kBF16, of.k, of.m, of.padding, of.misalignment)
              : Matrix(DType::kBF16, of.m, of.k, of.padding, of.misalignment)),
        b(of.kind == AmxKind::kForward
              ? Matrix(DType::kBF16, of.n, of.k, of.padding, of.misalignment)
              : Matrix(DType::kBF16, of.k, of.n, of.padding, of.misalignment)),
        c(of.output, of.m, of.n, of.padding, of.misalignment) {}

  Product ProductOf(const Case& of) {
    return {.m = of.m,
            .n = of.n,
            .k = of.k,
            .a = a.AsOperand(of.kind == AmxKind::kWeightGradient),
            .b = b.AsOperand(of.kind == AmxKind::kForward),
            .c = c.AsOperand(false),
            .add = of.add};
  }
};

// What the tests run over: products with emulated tiles, and with the processor's.
struct Emulated {
  static bool Exists() { return true; }
  static void Run(const Product& product, const AmxBlocking& blocking, std::byte* scratch,
                  int64_t /*scratch_bytes*/) {
    AmxRun<EmulatedAmx>(product, blocking, scratch).Run();
  }
};

struct Native {
  static bool Exists() { return HasAmx(); }
  static void Run(const Product& product, const AmxBlocking& blocking, std::byte* scratch,
                  int64_t scratch_bytes) {
    RunAmx(product, blocking, scratch, scratch_bytes);
  }
};

template <class Tiles>
void RunGuarded(const Product& product, const AmxBlocking& blocking) {
  const int64_t bytes = AmxScratchBytes(product, blocking);
  Guarded scratch(bytes, 0);
  std::memset(scratch.data(), 0xff, static_cast<size_t>(bytes));
  Tiles::Run(product, blocking, scratch.data(), bytes);
  ASSERT_TRUE(scratch.intact()) << "wrote beyond its scratch";
}

// Against a plain sum, exactly.
template <class Tiles>
void ExpectExact(const Case& of, const AmxBlocking* blocking = nullptr) {
  SCOPED_TRACE(of.ToString());
  Operands operands(of);
  operands.a.FillIntegers(1);
  operands.b.FillIntegers(2);
  operands.c.FillIntegers(3);
  std::vector<float> expected(static_cast<size_t>(of.m * of.n), 0.0f);
  for (int64_t row = 0; row < of.m; ++row) {
    float* const sums = expected.data() + row * of.n;
    for (int64_t k = 0; k < of.k; ++k) {
      const float left =
          of.kind == AmxKind::kWeightGradient ? operands.a.Get(k, row) : operands.a.Get(row, k);
      if (left == 0) continue;
      for (int64_t column = 0; column < of.n; ++column) {
        sums[column] += left * (of.kind == AmxKind::kForward ? operands.b.Get(column, k)
                                                             : operands.b.Get(k, column));
      }
    }
    for (int64_t column = 0; column < of.n; ++column) {
      if (of.add) sums[column] += operands.c.Get(row, column);
      if (of.output == DType::kBF16) sums[column] = ToFloat(ToBF16(sums[column]));
    }
  }
  const Product product = operands.ProductOf(of);
  RunGuarded<Tiles>(product, blocking ? *blocking : AmxBlockingOf(product));
  ASSERT_TRUE(operands.a.intact() && operands.b.intact() && operands.c.intact());
  for (int64_t row = 0; row < of.m; ++row) {
    for (int64_t column = 0; column < of.n; ++column) {
      ASSERT_EQ(operands.c.Get(row, column), expected[static_cast<size_t>(row * of.n + column)])
          << row << ", " << column;
    }
  }
}

template <class Tiles>
class AmxProductsTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!Tiles::Exists()) GTEST_SKIP() << "this processor has no AMX, or may not use it";
  }
};

using Units = testing::Types<Emulated, Native>;
TYPED_TEST_SUITE(AmxProductsTest, Units);

// Tokens are rows, or k in gradients of weights.
Case CaseOf(AmxKind kind, int64_t tokens, int64_t out, int64_t in, DType output, bool add) {
  switch (kind) {
    case AmxKind::kForward:
      return {kind, tokens, out, in, output, add};
    case AmxKind::kInputGradient:
      return {kind, tokens, in, out, output, add};
    case AmxKind::kWeightGradient:
      return {kind, out, in, tokens, output, add};
  }
  return {};
}

TYPED_TEST(AmxProductsTest, ExactAtEveryNumberOfTokens) {
  for (const AmxKind kind : kKinds) {
    for (int64_t tokens = 1; tokens <= 80; ++tokens) {
      for (const DType output : {DType::kF32, DType::kBF16}) {
        const bool add = (tokens & 1) == (output == DType::kF32);
        ExpectExact<TypeParam>(CaseOf(kind, tokens, 33, 47, output, add));
        if (tokens % 4 < 2) ExpectExact<TypeParam>(CaseOf(kind, tokens, 64, 32, output, !add));
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TYPED_TEST(AmxProductsTest, ExactAtEveryWidth) {
  for (const AmxKind kind : kKinds) {
    for (int64_t width = 1; width <= 70; ++width) {
      for (const DType output : {DType::kF32, DType::kBF16}) {
        const bool add = (width & 1) == (output == DType::kF32);
        Case narrow = CaseOf(kind, 19, width, 71 - width, output, add);
        narrow.padding = width % 3;
        narrow.misalignment = width % 5;
        ExpectExact<TypeParam>(narrow);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

// Every loop over blocks, panels, groups and depths, once and several times, with remainders.
TYPED_TEST(AmxProductsTest, ExactHoweverItIsCut) {
  constexpr std::array<int64_t, 3> kSizes[] = {{64, 96, 64}, {33, 65, 97}, {70, 130, 33}};
  for (const AmxBlocking& blocking :
       {AmxBlocking{32, 32, 32, 32}, AmxBlocking{64, 32, 32, 64}, AmxBlocking{32, 64, 64, 64},
        AmxBlocking{96, 64, 32, 96}, AmxBlocking{64, 96, 64, 128}}) {
    for (const AmxKind kind : kKinds) {
      for (const auto& [m, n, k] : kSizes) {
        for (const DType output : {DType::kF32, DType::kBF16}) {
          for (const bool add : {false, true}) {
            SCOPED_TRACE(fmt::format("block {} depth {} panel {} group {}", blocking.block,
                                     blocking.depth, blocking.panel, blocking.group));
            ExpectExact<TypeParam>({kind, m, n, k, output, add}, &blocking);
            if (testing::Test::HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

// Sizes beyond each limit of the blocking that products really have.
TYPED_TEST(AmxProductsTest, ExactBeyondEveryLimit) {
  for (const DType output : {DType::kF32, DType::kBF16}) {
    for (const bool add : {false, true}) {
      // Beyond a depth, then beyond a block, then beyond a panel and a group.
      ExpectExact<TypeParam>({AmxKind::kForward, 17, 35, 4099, output, add});
      ExpectExact<TypeParam>({AmxKind::kInputGradient, 17, 35, 4099, output, add});
      ExpectExact<TypeParam>({AmxKind::kWeightGradient, 35, 17, 1027, output, add});
      ExpectExact<TypeParam>({AmxKind::kForward, 1040, 33, 33, output, add});
      ExpectExact<TypeParam>({AmxKind::kInputGradient, 1040, 33, 33, output, add});
      ExpectExact<TypeParam>({AmxKind::kWeightGradient, 1040, 33, 33, output, add});
      ExpectExact<TypeParam>({AmxKind::kWeightGradient, 33, 1040, 33, output, add});
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TYPED_TEST(AmxProductsTest, ARowDoesNotDependOnTheOthers) {
  for (const AmxKind kind : kKinds) {
    for (const DType output : {DType::kF32, DType::kBF16}) {
      for (const bool add : {false, true}) {
        const Case whole{kind, 75, 40, 555, output, add};
        SCOPED_TRACE(whole.ToString());
        Operands operands(whole), copy(whole);
        for (Operands* each : {&operands, &copy}) {
          each->a.FillNormals(1);
          each->b.FillNormals(2);
          each->c.FillNormals(3);
        }
        const Product product = operands.ProductOf(whole);
        RunGuarded<TypeParam>(product, AmxBlockingOf(product));
        int64_t first = 0;
        for (const int64_t rows : {1, 7, 16, 31, 20}) {
          Product part = copy.ProductOf(whole);
          part.m = rows;
          part.a.data += first * (part.a.transposed ? 1 : part.a.stride) * BytesOf(part.a.dtype);
          part.c.data += first * part.c.stride * BytesOf(part.c.dtype);
          RunGuarded<TypeParam>(part, AmxBlockingOf(part));
          first += rows;
        }
        ASSERT_EQ(first, whole.m);
        for (int64_t row = 0; row < whole.m; ++row) {
          for (int64_t column = 0; column < whole.n; ++column) {
            ASSERT_EQ(operands.c.Get(row, column), copy.c.Get(row, column)) << row << " " << column;
          }
        }
      }
    }
  }
}

// Order of the sums and rounding: the processor's results are the emulated ones, bit for bit.
TEST(AmxProducts, ProcessorComputesAsEmulated) {
  if (!HasAmx()) GTEST_SKIP() << "this processor has no AMX, or may not use it";
  for (const AmxKind kind : kKinds) {
    for (const DType output : {DType::kF32, DType::kBF16}) {
      for (const bool add : {false, true}) {
        const Case of{kind, 70, 83, 700, output, add};
        SCOPED_TRACE(of.ToString());
        Operands native(of), emulated(of);
        for (Operands* each : {&native, &emulated}) {
          each->a.FillNormals(1);
          each->b.FillNormals(2);
          each->c.FillNormals(3);
        }
        const Product on_native = native.ProductOf(of), on_emulated = emulated.ProductOf(of);
        RunGuarded<Native>(on_native, AmxBlockingOf(on_native));
        RunGuarded<Emulated>(on_emulated, AmxBlockingOf(on_emulated));
        for (int64_t row = 0; row < of.m; ++row) {
          for (int64_t column = 0; column < of.n; ++column) {
            ASSERT_EQ(native.c.Get(row, column), emulated.c.Get(row, column));
          }
        }
      }
    }
  }
}

// Tiles belong to a thread.
TYPED_TEST(AmxProductsTest, ThreadsDoNotDisturbEachOther) {
  std::vector<std::thread> threads;
  for (int64_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([thread] {
      for (int64_t i = 0; i < 8; ++i) {
        const int64_t tokens = 1 + 9 * thread + i;
        for (const AmxKind kind : kKinds) {
          ExpectExact<TypeParam>(CaseOf(kind, tokens, 40, 50, DType::kBF16, i % 2 == 0));
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TYPED_TEST(AmxProductsTest, NothingToSum) {
  for (const AmxKind kind : kKinds) {
    for (const DType output : {DType::kF32, DType::kBF16}) {
      for (const bool add : {false, true}) {
        ExpectExact<TypeParam>({kind, 5, 7, 0, output, add, /*padding=*/3});
        ExpectExact<TypeParam>({kind, 0, 7, 9, output, add});
        ExpectExact<TypeParam>({kind, 5, 0, 9, output, add, /*padding=*/3});
      }
    }
  }
}

TEST(AmxProducts, ScratchDependsOnWidthsOnly) {
  for (const AmxKind kind : kKinds) {
    for (const DType output : {DType::kF32, DType::kBF16}) {
      for (const auto& [out, in] : {std::pair<int64_t, int64_t>{1, 1},
                                    {512, 1024},
                                    {2048, 512},
                                    {33, 9001},
                                    {32'768, 4096},
                                    {512, 32'768}}) {
        const auto bytes = [&, out = out, in = in](int64_t tokens) {
          const Case of = CaseOf(kind, tokens, out, in, output, false);
          const Operand a{nullptr, DType::kBF16, 1, kind == AmxKind::kWeightGradient};
          const Operand b{nullptr, DType::kBF16, 1, kind == AmxKind::kForward};
          const Operand c{nullptr, output, 1};
          return AmxScratchBytes({.m = of.m, .n = of.n, .k = of.k, .a = a, .b = b, .c = c});
        };
        const int64_t expected = bytes(128);
        EXPECT_GT(expected, 0);
        EXPECT_LE(expected, int64_t{3} << 20) << static_cast<int>(kind) << " " << out << " " << in;
        for (const int64_t tokens : {0, 1, 33, 512, 5000, 1 << 20}) {
          EXPECT_EQ(bytes(tokens), expected) << tokens;
        }
      }
    }
  }
}

TEST(AmxProducts, PreferredByTheTable) {
  const auto prefers = [](AmxKind kind, int64_t tokens, DType inputs = DType::kBF16) {
    const Case of = CaseOf(kind, tokens, 512, 512, DType::kBF16, false);
    const Operand a{nullptr, inputs, 512, kind == AmxKind::kWeightGradient};
    const Operand b{nullptr, inputs, 512, kind == AmxKind::kForward};
    return PrefersAmx({of.m, of.n, of.k, a, b, {nullptr, DType::kBF16, 512}});
  };
  for (const AmxKind kind : {AmxKind::kForward, AmxKind::kInputGradient}) {
    EXPECT_TRUE(prefers(kind, 1));
    EXPECT_TRUE(prefers(kind, 128));
    EXPECT_FALSE(prefers(kind, 129));
  }
  EXPECT_TRUE(prefers(AmxKind::kWeightGradient, 1));
  EXPECT_TRUE(prefers(AmxKind::kWeightGradient, 100'000));
  EXPECT_FALSE(prefers(AmxKind::kWeightGradient, 128, DType::kF32));
}

}  // namespace
}  // namespace terrace
