// Tensors of more than 2^31 elements, in little memory: all of the address range but its end maps
// the same few pages, which hold zeros and stay so; the end is memory of its own.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <vector>

#include "backend/cpu/sum_of_squares.h"
#include "optim/clipping.h"
#include "optim/kernels/blocks.h"
#include "optim/rules/rules.h"

namespace terrace {
namespace {

constexpr int64_t kRows = 32769;
constexpr int64_t kColumns = 65537;
constexpr int64_t kSize = kRows * kColumns;
static_assert(kSize > int64_t{1} << 31);

class AliasedTensor {
 public:
  AliasedTensor(DType dtype, Shape shape) {
    const int64_t pattern = int64_t{32} << 20;
    const int64_t patterns = shape.size() * BytesOf(dtype) / pattern;
    bytes_ = (patterns + 1) * pattern;
    const int file = memfd_create("zeros", 0);
    void* base = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (file < 0 || base == MAP_FAILED || ftruncate(file, pattern) != 0) {
      throw std::runtime_error("cannot map memory");
    }
    for (int64_t i = 0; i < patterns; ++i) {
      mmap(static_cast<char*>(base) + i * pattern, pattern, PROT_READ | PROT_WRITE,
           MAP_SHARED | MAP_FIXED, file, 0);
    }
    close(file);
    view_ = {static_cast<std::byte*>(base), dtype, shape, "large"};
  }
  ~AliasedTensor() { munmap(view_.data, bytes_); }
  AliasedTensor(const AliasedTensor&) = delete;
  AliasedTensor& operator=(const AliasedTensor&) = delete;

  TensorView view() const { return view_; }
  // The element that many before the last: the last few million have memory of their own.
  template <typename T = BF16>
  T& FromEnd(int64_t index) const {
    return view_.as<T>()[view_.size() - 1 - index];
  }

 private:
  int64_t bytes_;
  TensorView view_;
};

// A whole step of a rule. Known implementations of 8-bit moments stop at 2^31 elements. Where the
// gradient is 0 nothing changes, so that all states, too, may be
// the same few pages.
struct LargeRule {
  std::string_view rule;
  Settings settings;
};

class LargeRuleTest : public testing::TestWithParam<LargeRule> {};

INSTANTIATE_TEST_SUITE_P(, LargeRuleTest,
                         testing::Values(LargeRule{"adamw", {}}, LargeRule{"adamw8bit", {}},
                                         LargeRule{"lion", {}},
                                         LargeRule{"sgd", {{"momentum", "int8"}}},
                                         LargeRule{"sage", {}}, LargeRule{"adafactor", {}},
                                         LargeRule{"sinkgd", {{"iterations", 1.0}}},
                                         LargeRule{"skewadam", {{"second_moment", "exact"}}}),
                         [](const auto& test) { return std::string(test.param.rule); });

TEST_P(LargeRuleTest, ReachesTheLastElement) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "takes minutes under AddressSanitizer";
#endif
  const Shape shape{kRows, kColumns};
  const AliasedTensor weight(DType::kBF16, shape);
  const AliasedTensor gradient(DType::kBF16, shape);
  gradient.FromEnd(0) = ToBF16(1);
  gradient.FromEnd(2) = ToBF16(-1);
  Parameter parameter;
  parameter.name = "large";
  parameter.population = Population::kExpert;
  parameter.value = weight.view();

  const auto rule = MakeRule(GetParam().rule, GetParam().settings);
  std::deque<AliasedTensor> large;
  std::deque<std::vector<float>> small;
  std::vector<TensorView> state;
  for (const StateSpec& spec : rule->State(parameter)) {
    if (spec.shape.size() == kSize) {
      state.push_back(large.emplace_back(spec.dtype, spec.shape).view());
      continue;
    }
    ASSERT_EQ(spec.dtype, DType::kF32);
    float* values = small.emplace_back(spec.shape.size()).data();
    state.push_back({reinterpret_cast<std::byte*>(values), spec.dtype, spec.shape, "state"});
  }
  rule->Apply(parameter, gradient.view(), state,
              {.learning_rate = 0.5f,
               .weight_decay = 0,
               .gradient_scale = 1,
               .tensor_step = 1,
               .rounding_key = 1});
  EXPECT_LT(ToFloat(weight.FromEnd(0)), 0);
  EXPECT_EQ(ToFloat(weight.FromEnd(1)), 0);
  EXPECT_GT(ToFloat(weight.FromEnd(2)), 0);
  EXPECT_EQ(ToFloat(weight.FromEnd(kColumns)), 0);
  EXPECT_EQ(ToFloat(weight.view().as<BF16>()[0]), 0);
  if (large.empty()) return;
  // The momentum, which is the first state.
  const TensorView momentum = state[0];
  const auto is_zero = [&](int64_t from_end) {
    const int64_t bytes = BytesOf(momentum.dtype);
    const std::byte* element = momentum.data + (momentum.size() - 1 - from_end) * bytes;
    return std::all_of(element, element + bytes, [](std::byte b) { return b == std::byte{0}; });
  };
  EXPECT_FALSE(is_zero(0));
  EXPECT_TRUE(is_zero(1));
  EXPECT_FALSE(is_zero(2));
  EXPECT_TRUE(is_zero(kColumns));
}

TEST(LargeTensorTest, FactoredUpdateReachesTheLastElement) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "takes minutes under AddressSanitizer";
#endif
  const AliasedTensor weight(DType::kBF16, {kRows, kColumns});
  const AliasedTensor gradient(DType::kBF16, {kRows, kColumns});
  gradient.FromEnd(0) = ToBF16(1);
  gradient.FromEnd(2) = ToBF16(-1);
  EXPECT_DOUBLE_EQ(SumOfSquares(gradient.view()), 2);

  Parameter parameter;
  parameter.name = "large";
  parameter.value = weight.view();
  const auto rule = MakeRule("skewadam", {{"momentum", "none"}, {"rms_clip", 0.0}});
  std::vector<float> rows(kRows), columns(kColumns);
  const TensorView state[] = {
      {reinterpret_cast<std::byte*>(rows.data()), DType::kF32, {kRows}, "rows"},
      {reinterpret_cast<std::byte*>(columns.data()), DType::kF32, {kColumns}, "columns"}};
  const UpdateReport report = rule->Apply(parameter, gradient.view(), state,
                                          {.learning_rate = 0.5f,
                                           .weight_decay = 0,
                                           .gradient_scale = 1,
                                           .tensor_step = 1,
                                           .rounding_key = 1});
  EXPECT_EQ(report.entries, kColumns);
  EXPECT_EQ(report.floored, kColumns - 2);
  EXPECT_GT(rows[kRows - 1], 0);
  EXPECT_EQ(rows[kRows - 2], 0);
  EXPECT_GT(columns[kColumns - 1], 0);
  EXPECT_LT(ToFloat(weight.FromEnd(0)), 0);
  EXPECT_EQ(ToFloat(weight.FromEnd(1)), 0);
  EXPECT_GT(ToFloat(weight.FromEnd(2)), 0);
  EXPECT_EQ(ToFloat(weight.FromEnd(kColumns)), 0);
  EXPECT_EQ(ToFloat(weight.view().as<BF16>()[0]), 0);
}

// Kernels on blocks, on the last range of elements.
TEST(LargeTensorTest, BlocksReachTheLastElement) {
  const AliasedTensor weight(DType::kBF16, {kRows, kColumns});
  const AliasedTensor gradient(DType::kBF16, {kRows, kColumns});
  const AliasedTensor momentum(DType::kBF16, {kRows, kColumns});
  gradient.FromEnd(0) = ToBF16(1);
  momentum.FromEnd(2) = ToBF16(-1);
  const int64_t begin = (kSize - 5) / kernels::kStripe * kernels::kStripe;
  EXPECT_EQ(kernels::SumMomentum(momentum.view(), 0.5f, gradient.view(), 2, /*nesterov=*/false, 1,
                                 begin, kSize),
            4.25);
  EXPECT_EQ(ToFloat(momentum.FromEnd(0)), 2);
  EXPECT_EQ(ToFloat(momentum.FromEnd(2)), -0.5f);
  const MatrixBlock of_gradient = RangeOf(gradient.view(), begin);
  kernels::Combine(of_gradient, RangeOf(momentum.view(), begin), 2, of_gradient, -1, 1,
                   kSize - begin);
  EXPECT_EQ(ToFloat(gradient.FromEnd(0)), 3);
  EXPECT_EQ(ToFloat(gradient.FromEnd(2)), -1);
  kernels::Descend(RangeOf(weight.view(), begin), 1, of_gradient, 0.5f, 1, kSize - begin, 1,
                   {begin / kernels::kStripe, 0});
  EXPECT_EQ(ToFloat(weight.FromEnd(0)), -1.5f);
  EXPECT_EQ(ToFloat(weight.FromEnd(1)), 0);
  EXPECT_EQ(ToFloat(weight.FromEnd(2)), 0.5f);
}

}  // namespace
}  // namespace terrace
