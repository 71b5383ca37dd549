// What every rule has to hold, whatever its formula: each rule by its default settings, and some
// more ways to store its state, on float32 and bfloat16 weights and gradients.
#include <gtest/gtest.h>
#include <hwy/detect_targets.h>
#include <hwy/targets.h>
#include <omp.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "optim/rule_testing.h"

namespace terrace {
namespace {

struct Variant {
  std::string rule;
  Settings settings;
};

void PrintTo(const Variant& variant, std::ostream* out) {
  *out << variant.rule << " " << TextOf(variant.settings);
}

std::vector<Variant> Variants() {
  std::vector<Variant> variants;
  for (std::string_view name : RuleNames()) variants.push_back({std::string(name), {}});
  for (const char* momentum : {"none", "bf16", "int8"}) {
    for (const char* second : {"factored", "exact"}) {
      variants.push_back({"skewadam", {{"momentum", momentum}, {"second_moment", second}}});
    }
  }
  // Off the eps floor.
  for (const char* momentum : {"none", "f32", "bf16", "int8"}) {
    variants.push_back({"skewadam", {{"momentum", momentum}, {"eps_mode", "relative"}}});
  }
  for (const char* momentum : {"f32", "bf16", "int8"}) {
    variants.push_back({"adafactor", {{"momentum", momentum}}});
    variants.push_back({"sgd", {{"momentum", momentum}, {"nesterov", true}}});
    variants.push_back({"sinkgd", {{"momentum", momentum}}});
  }
  variants.push_back({"sinkgd", {{"momentum", "int8"}, {"direction", "sign"}}});
  variants.push_back({"sinkgd", {{"momentum", "int8"}, {"multiplier", "neuron"}}});
  for (const char* momentum : {"bf16", "int8"}) {
    for (const char* rule : {"lion", "sage", "muon"}) {
      variants.push_back({rule, {{"momentum", momentum}}});
    }
  }
  for (const char* rule : {"sgd", "muon"}) variants.push_back({rule, {{"momentum", "none"}}});
  variants.push_back({"muon", {{"momentum", "int8"}, {"nesterov", false}}});
  variants.push_back({"muon", {{"momentum", "hidden_f32"}}});
  variants.push_back({"sinkgd", {{"momentum", "hidden_f32"}}});
  return variants;
}

std::string NameOfVariant(const testing::TestParamInfo<Variant>& info) {
  std::string name = info.param.rule;
  for (const auto& [key, value] : info.param.settings) {
    const std::string* text = std::get_if<std::string>(&value);
    name += "_" + (text != nullptr ? *text : key);
  }
  return name;
}

// Remainders of units, of blocks of codes and of rows in parallel; vectors; one element.
const std::vector<Shape>& Shapes() {
  static const std::vector<Shape> shapes = {{1, 1},   {3, 63},   {5, 64}, {64, 65}, {70, 257},
                                            {257, 1}, {130, 20}, {1},     {63},     {257}};
  return shapes;
}

struct Types {
  DType weights;
  DType gradients;
};

class EveryRuleTest : public testing::TestWithParam<Variant> {
 protected:
  static constexpr float kDecay = 0.05f;

  // Null for a tensor that the rule refuses: matrices only, for instance.
  static std::unique_ptr<RuleBench> Bench(const Shape& shape, const Types& types) {
    try {
      return std::make_unique<RuleBench>(GetParam().rule, GetParam().settings, kDecay, shape,
                                         types.weights, types.gradients);
    } catch (const Error&) {
      return nullptr;
    }
  }

  // Calls body(types) for all of them.
  template <typename Body>
  static void ForTypes(const Body& body) {
    for (const DType weights : {DType::kF32, DType::kBF16}) {
      for (const DType gradients : {DType::kF32, DType::kBF16}) {
        SCOPED_TRACE(fmt::format("{} weights, {} gradients", NameOf(weights), NameOf(gradients)));
        body(Types{weights, gradients});
      }
    }
  }

  static void Start(RuleBench& bench, const std::vector<float>& weights) {
    Fill(bench.weight(), weights);
    bench.context().gradient_scale = 0.37f;
  }

  // Some steps with gradients that bfloat16 holds.
  static void Train(RuleBench& bench, int steps) {
    const int64_t size = bench.weight().size();
    Start(bench, RandomValues(size, 0.5, 1));
    for (int step = 0; step < steps; ++step) {
      bench.SetGradient(RandomValues(size, 0.01, 2 + step));
      bench.Step();
    }
  }

  static std::vector<std::byte> BytesOf(RuleBench& bench) {
    std::vector<std::byte> bytes(bench.weight().data, bench.weight().data + bench.weight().bytes());
    for (const TensorView& view : bench.state()) {
      bytes.insert(bytes.end(), view.data, view.data + view.bytes());
    }
    return bytes;
  }
};

TEST_P(EveryRuleTest, MovesAllWeightsAndKeepsThemFinite) {
  int served = 0;
  ForTypes([&](const Types& types) {
    for (const Shape& shape : Shapes()) {
      const auto bench = Bench(shape, types);
      if (bench == nullptr) continue;
      ++served;
      SCOPED_TRACE(shape.ToString());
      bench->context().learning_rate = 0.1f;
      Train(*bench, 3);
      const std::vector<float> initial = RandomValues(shape.size(), 0.5, 1);
      const std::vector<float> weights = ValuesOf(bench->weight());
      int64_t moved = 0;
      for (size_t i = 0; i < weights.size(); ++i) {
        ASSERT_TRUE(std::isfinite(weights[i])) << "element " << i;
        moved += weights[i] != initial[i];
      }
      // The decay alone moves float32 weights, and bfloat16 ones by chance.
      EXPECT_GE(moved, types.weights == DType::kF32 ? shape.size() * 9 / 10 : shape.size() / 20);
    }
  });
  EXPECT_GT(served, 0);
}

// Galore multiplies float32 gradients where they lie and a copy of others: oneDNN may add up the
// two in different orders, by a few of float32's 2^-24 of steps of 0.01.
TEST_P(EveryRuleTest, GradientsOfBothTypesGiveTheSame) {
  const bool exact = GetParam().rule != "galore";
  for (const DType weights : {DType::kF32, DType::kBF16}) {
    if (!exact && weights == DType::kBF16) continue;  // a last bit may round to a neighbour
    for (const Shape& shape : Shapes()) {
      const auto wide = Bench(shape, {weights, DType::kF32});
      const auto narrow = Bench(shape, {weights, DType::kBF16});
      if (wide == nullptr) continue;
      SCOPED_TRACE(shape.ToString());
      for (RuleBench* bench : {wide.get(), narrow.get()}) Train(*bench, 3);
      if (exact) {
        EXPECT_TRUE(BytesOf(*wide) == BytesOf(*narrow));
        continue;
      }
      const std::vector<float> a = ValuesOf(wide->weight()), b = ValuesOf(narrow->weight());
      for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 1e-6) << "element " << i;
    }
  }
}

TEST_P(EveryRuleTest, ThreadsDoNotMatter) {
  const int threads = omp_get_max_threads();
  ForTypes([&](const Types& types) {
    for (const Shape& shape : {Shape{261, 70}, Shape{131101}}) {
      std::vector<std::byte> one;
      for (const int count : {1, 2, 3, 4}) {
        const auto bench = Bench(shape, types);
        if (bench == nullptr) continue;
        omp_set_num_threads(count);
        Train(*bench, 2);
        omp_set_num_threads(threads);
        if (count == 1) one = BytesOf(*bench);
        EXPECT_TRUE(one == BytesOf(*bench)) << shape.ToString() << ", " << count << " threads";
      }
    }
  });
}

TEST_P(EveryRuleTest, TheVectorWidthDoesNotMatter) {
  if ((hwy::SupportedTargets() & HWY_AVX3) == 0) GTEST_SKIP() << "needs AVX-512";
  const auto cap = [](int64_t targets) {
    hwy::SetSupportedTargetsForTest(targets);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  };
  ForTypes([&](const Types& types) {
    for (const Shape& shape : {Shape{70, 257}, Shape{20001}}) {
      const auto widest = Bench(shape, types);
      const auto narrow = Bench(shape, types);
      if (widest == nullptr) continue;
      Train(*widest, 3);
      cap(HWY_AVX2);
      Train(*narrow, 3);
      cap(0);
      EXPECT_TRUE(BytesOf(*widest) == BytesOf(*narrow)) << shape.ToString();
    }
  });
}

TEST_P(EveryRuleTest, AZeroGradientOnlyDecays) {
  ForTypes([](const Types& types) {
    for (const Shape& shape : Shapes()) {
      const auto bench = Bench(shape, types);
      if (bench == nullptr) continue;
      Start(*bench, std::vector<float>(shape.size(), 1));
      // bfloat16 holds 1 - 2^-8 exactly: nothing is left to chance.
      bench->context().learning_rate = 0x1p-4f;
      bench->context().weight_decay = 0x1p-4f;
      bench->SetGradient(std::vector<float>(shape.size(), 0));
      bench->Step();
      for (const float w : ValuesOf(bench->weight())) ASSERT_EQ(w, 1 - 0x1p-8f) << shape.ToString();
    }
  });
}

// bfloat16 weights after a step are those of float32 on average, to 3 standard errors.
TEST_P(EveryRuleTest, RoundingOfWeightsIsUnbiased) {
  const Shape shape{256, 512};
  const auto narrow = Bench(shape, {DType::kBF16, DType::kF32});
  const auto wide = Bench(shape, {DType::kF32, DType::kF32});
  for (RuleBench* bench : {narrow.get(), wide.get()}) Train(*bench, 1);
  const std::vector<float> rounded = ValuesOf(narrow->weight()), exact = ValuesOf(wide->weight());
  double sum = 0, squares = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    const double error = double{rounded[i]} - exact[i];
    sum += error;
    squares += error * error;
    // To one of the neighbours, 2^-7 of the value apart at most.
    ASSERT_LE(std::abs(error), 0x1p-7 * std::abs(exact[i])) << "element " << i;
  }
  ASSERT_GT(squares, 0) << "nothing was rounded: the case tests nothing";
  EXPECT_LT(std::abs(sum), 3 * std::sqrt(squares));
}

// Far below the half ulp (2^-9) that rounding to nearest would drop.
TEST_P(EveryRuleTest, ASmallDecayShrinksWeights) {
  constexpr int kSteps = 1000;
  const Shape shape{64, 128};
  for (const DType weights : {DType::kF32, DType::kBF16}) {
    const auto bench = Bench(shape, {weights, DType::kF32});
    Start(*bench, std::vector<float>(shape.size(), 1));
    bench->context().learning_rate = 3e-4f;
    bench->SetGradient(std::vector<float>(shape.size(), 0));
    for (int step = 0; step < kSteps; ++step) bench->Step();
    const double size = static_cast<double>(shape.size());
    double sum = 0, squares = 0;
    for (const float w : ValuesOf(bench->weight())) {
      sum += w;
      squares += double{w} * w;
    }
    const double mean = sum / size;
    const double error = std::sqrt(std::max(0.0, squares / size - mean * mean) / size);
    // float32 rounds by up to 2^-25 a step, the factor of a step likewise.
    EXPECT_NEAR(mean, std::pow(1 - 1.5e-5, kSteps), 3 * error + kSteps * 0x1p-24);
    EXPECT_LT(mean, 1 - 10 * error);
  }
}

// In the weight, or in the state of a rule that steps by signs.
TEST_P(EveryRuleTest, NanStaysVisible) {
  ForTypes([](const Types& types) {
    for (const Shape& shape : {Shape{5, 65}, Shape{70}}) {
      const auto bench = Bench(shape, types);
      if (bench == nullptr) continue;
      Start(*bench, std::vector<float>(shape.size(), 1));
      std::vector<float> gradient = RandomValues(shape.size(), 0.01, 2);
      gradient[shape.size() - 3] = std::numeric_limits<float>::quiet_NaN();
      bench->SetGradient(gradient);
      bench->Step();
      bool visible = std::isnan(ValuesOf(bench->weight())[shape.size() - 3]);
      for (const TensorView& view : bench->state()) {
        if (view.dtype == DType::kU8) continue;
        for (const float x : ValuesOf(view)) visible |= std::isnan(x);
      }
      EXPECT_TRUE(visible) << shape.ToString();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All, EveryRuleTest, testing::ValuesIn(Variants()), NameOfVariant);

// Whoever reads a gradient for its norm may leave what spares the update a pass. With a scale of 1
// all bits are those of an update that was not spared; with another, a bound on the update is
// summed up in another order.
TEST_P(EveryRuleTest, MeasuredGradientsGiveTheSameUpdate) {
  ForTypes([&](const Types& types) {
    for (const Shape& shape : Shapes()) {
      for (const float scale : {1.0f, 0.3f}) {
        // In bfloat16 a difference in the last place may round to the other neighbour.
        if (scale != 1 && types.weights == DType::kBF16) continue;
        const auto plain = Bench(shape, types), measured = Bench(shape, types);
        if (plain == nullptr) continue;
        SCOPED_TRACE(fmt::format("{} scale {}", shape.ToString(), scale));
        for (RuleBench* bench : {plain.get(), measured.get()}) {
          Fill(bench->weight(), RandomValues(shape.size(), 0.5, 1));
          bench->context().gradient_scale = scale;
        }
        for (int step = 0; step < 3; ++step) {
          const std::vector<float> g = RandomValues(shape.size(), 1e-2, 10 + step);
          plain->SetGradient(g);
          measured->SetGradient(g);
          plain->Step();
          double squares = 0;
          for (const float x : ValuesOf(measured->gradient())) squares += double{x} * x;
          EXPECT_NEAR(measured->StepMeasured(), squares, 1e-6 * squares);
        }
        if (scale == 1) {
          EXPECT_EQ(BytesOf(*measured), BytesOf(*plain));
          continue;
        }
        const std::vector<float> expected = ValuesOf(plain->weight());
        const std::vector<float> actual = ValuesOf(measured->weight());
        for (size_t i = 0; i < expected.size(); ++i) {
          // Steps of 1e-2, whose bound is off by some units in the last place.
          ASSERT_NEAR(actual[i], expected[i], 1e-6) << i;
        }
      }
    }
  });
}

}  // namespace
}  // namespace terrace
