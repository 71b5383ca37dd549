#include <gtest/gtest.h>
#include <hwy/detect_targets.h>
#include <hwy/targets.h>
#include <omp.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <functional>

#include "core/stochastic_rounding.h"
#include "optim/rule_testing.h"

namespace terrace {
namespace {

struct Tier {
  std::string label;
  std::string rule;
  RuleSettings settings;
};

// Of skewadam, and adamw.
std::vector<Tier> Float32Tiers() {
  const RuleSettings backbone{.weight_decay = 0.05f};
  RuleSettings expert = backbone;
  expert.momentum = "none";
  RuleSettings router = expert;
  router.second_moment = SecondMoment::kExact;
  RuleSettings exact_momentum = backbone;
  exact_momentum.second_moment = SecondMoment::kExact;
  RuleSettings relative = backbone;
  relative.eps_mode = EpsMode::kRelative;
  relative.eps = 1e-3;
  RuleSettings unclipped = expert;
  unclipped.rms_clip = 0;
  RuleSettings tight = backbone;
  tight.rms_clip = 0.25;
  RuleSettings adamw = exact_momentum;
  adamw.rms_clip = 0;
  return {
      {"backbone", "skewadam", backbone},     {"expert", "skewadam", expert},
      {"router", "skewadam", router},         {"exact with momentum", "skewadam", exact_momentum},
      {"relative eps", "skewadam", relative}, {"unclipped", "skewadam", unclipped},
      {"tight clip", "skewadam", tight},      {"adamw", "adamw", adamw}};
}

std::vector<Tier> Tiers() {
  std::vector<Tier> tiers = Float32Tiers();
  RuleSettings narrow{.weight_decay = 0.05f, .momentum = "bf16"};
  tiers.push_back({"bfloat16 momentum", "skewadam", narrow});
  narrow.second_moment = SecondMoment::kExact;
  tiers.push_back({"exact with bfloat16 momentum", "skewadam", narrow});
  return tiers;
}

// Remainders of units and of row blocks, rows of several stripes, one element.
const std::vector<Shape>& Shapes() {
  static const std::vector<Shape> shapes = {{1, 1},     {3, 64}, {5, 65}, {130, 63}, {70, 200},
                                            {2, 40001}, {1},     {63},    {70001}};
  return shapes;
}

TEST(RuleTest, MatchesTheFormulasOnAllShapesAndGradientTypes) {
  constexpr float kScale = 0.37f;
  for (const Tier& tier : Float32Tiers()) {
    for (const Shape& shape : Shapes()) {
      // A row with a faint gradient has its second moment floored.
      for (const auto& [gradient_dtype, faint_row] :
           {std::pair(DType::kF32, false), {DType::kBF16, false}, {DType::kF32, true}}) {
        SCOPED_TRACE(fmt::format("{} {} {} {}", tier.label, shape.ToString(),
                                 NameOf(gradient_dtype), faint_row ? "faint row" : ""));
        RuleBench bench(tier.rule, tier.settings, shape, DType::kF32, gradient_dtype);
        bench.context().gradient_scale = kScale;
        const bool factored =
            shape.rank() == 2 && tier.settings.second_moment == SecondMoment::kFactored;
        PlainRule plain(tier.rule == "adamw", tier.settings, bench.context().learning_rate,
                        shape[0], shape.size() / shape[0], factored);
        const std::vector<float> initial = RandomValues(shape.size(), 0.5, 1);
        Fill(bench.weight(), initial);
        std::vector<double> expected(initial.begin(), initial.end());
        for (int step = 0; step < 3; ++step) {
          std::vector<float> gradient = RandomValues(shape.size(), 0.01, 2 + step);
          for (int64_t j = 0; faint_row && j < shape.size() / shape[0]; ++j) gradient[j] *= 1e-6f;
          Fill(bench.gradient(), gradient);
          bench.Step();
          for (float& g : gradient) g *= kScale;
          plain.Step(expected, gradient);
        }
        const std::vector<float> weights = ValuesOf(bench.weight());
        for (int64_t i = 0; i < shape.size(); ++i) {
          // A few roundings of w (below 1) and of updates (0.01 times up to some tens).
          ASSERT_NEAR(weights[i], expected[i], 1.5e-6) << "element " << i;
        }
      }
    }
  }
}

// bfloat16 weights are the float32 result of the same step, rounded by the scalar definition.
TEST(RuleTest, Bfloat16WeightsAreTheRoundedFloat32Weights) {
  for (const Tier& tier : Tiers()) {
    for (const Shape& shape : Shapes()) {
      SCOPED_TRACE(tier.label + " " + shape.ToString());
      RuleBench wide(tier.rule, tier.settings, shape);
      RuleBench narrow(tier.rule, tier.settings, shape, DType::kBF16);
      for (RuleBench* bench : {&wide, &narrow}) {
        Fill(bench->weight(), RandomValues(shape.size(), 0.5, 1));
        Fill(bench->gradient(), RandomValues(shape.size(), 0.01, 2));
        bench->Step();
      }
      const bool by_rows =
          shape.rank() == 2 && tier.settings.second_moment == SecondMoment::kFactored;
      const int64_t columns = by_rows ? shape[1] : shape.size();
      const int64_t stripes = (columns + kernels::kStripe - 1) / kernels::kStripe;
      for (int64_t i = 0; i < shape.size(); ++i) {
        const int64_t stripe = i / columns * stripes + i % columns / kernels::kStripe;
        const uint64_t key = kernels::StripeKey(narrow.context().rounding_key, stripe);
        const BF16 expected = kernels::RoundStochastically(
            wide.weight().as<float>()[i],
            kernels::RoundingBits(key, i % columns % kernels::kStripe));
        ASSERT_EQ(narrow.weight().as<BF16>()[i].bits, expected.bits) << "element " << i;
      }
    }
  }
}

// Over many steps the two differ by a random walk of roundings: no drift.
TEST(RuleTest, Bfloat16TrainsAlongFloat32) {
  constexpr int kSteps = 50;
  const Shape shape{96, 160};
  for (const Tier& tier : Tiers()) {
    SCOPED_TRACE(tier.label);
    RuleBench wide(tier.rule, tier.settings, shape);
    RuleBench narrow(tier.rule, tier.settings, shape, DType::kBF16);
    double largest = 0;
    for (RuleBench* bench : {&wide, &narrow}) {
      Fill(bench->weight(), RandomValues(shape.size(), 0.5, 1));
      bench->context().learning_rate = 1e-3f;
    }
    for (int step = 0; step < kSteps; ++step) {
      const std::vector<float> gradient = RandomValues(shape.size(), 0.01, 2 + step);
      for (RuleBench* bench : {&wide, &narrow}) {
        Fill(bench->gradient(), gradient);
        bench->Step();
      }
    }
    const std::vector<float> w = ValuesOf(wide.weight());
    const std::vector<float> b = ValuesOf(narrow.weight());
    double drift = 0, squares = 0;
    for (int64_t i = 0; i < shape.size(); ++i) {
      drift += b[i] - w[i];
      squares += (b[i] - w[i]) * (b[i] - w[i]);
      largest = std::max(largest, std::abs(double{b[i]} - w[i]));
    }
    EXPECT_GT(squares, 0);
    EXPECT_LT(std::abs(drift), 4 * std::sqrt(squares));
    // An ulp is at most 2^-7 for weights below 2; half of one a step would add up to 0.2.
    EXPECT_LT(largest, 0x1p-7 * std::sqrt(kSteps));
  }
}

// The weight and state bytes after three steps.
std::vector<std::byte> BytesAfterSteps(const Tier& tier, const Shape& shape, DType dtype) {
  RuleBench bench(tier.rule, tier.settings, shape, dtype);
  Fill(bench.weight(), RandomValues(shape.size(), 0.5, 1));
  for (int step = 0; step < 3; ++step) {
    Fill(bench.gradient(), RandomValues(shape.size(), 0.01, 2 + step));
    bench.Step();
  }
  std::vector<std::byte> bytes(bench.weight().data, bench.weight().data + bench.weight().bytes());
  for (const TensorView& view : bench.state()) {
    bytes.insert(bytes.end(), view.data, view.data + view.bytes());
  }
  return bytes;
}

const std::vector<Shape> kParallelShapes = {{261, 70}, {131101}};

TEST(RuleTest, ResultDoesNotDependOnTheNumberOfThreads) {
  const int threads = omp_get_max_threads();
  for (const Tier& tier : Tiers()) {
    for (const Shape& shape : kParallelShapes) {
      SCOPED_TRACE(tier.label + " " + shape.ToString());
      omp_set_num_threads(1);
      const auto one = BytesAfterSteps(tier, shape, DType::kBF16);
      for (int count : {2, 3}) {
        omp_set_num_threads(count);
        EXPECT_TRUE(one == BytesAfterSteps(tier, shape, DType::kBF16)) << count << " threads";
      }
    }
  }
  omp_set_num_threads(threads);
}

TEST(RuleTest, ResultDoesNotDependOnTheVectorWidth) {
  if ((hwy::SupportedTargets() & HWY_AVX3) == 0) GTEST_SKIP() << "needs AVX-512";
  const auto with_targets = [](int64_t targets, const std::function<void()>& body) {
    hwy::SetSupportedTargetsForTest(targets);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    body();
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  };
  for (const Tier& tier : Tiers()) {
    for (const Shape& shape : kParallelShapes) {
      SCOPED_TRACE(tier.label + " " + shape.ToString());
      const auto widest = BytesAfterSteps(tier, shape, DType::kBF16);
      with_targets(HWY_AVX2, [&] {
        EXPECT_TRUE(widest == BytesAfterSteps(tier, shape, DType::kBF16)) << "AVX2";
      });
      // Without fused multiply-add the last bits of moments differ; weights stay close.
      if (shape.size() > 20000) continue;  // emulated vectors are slow
      with_targets(HWY_STATIC_TARGET, [&] {
        const auto narrow = BytesAfterSteps(tier, shape, DType::kF32);
        hwy::SetSupportedTargetsForTest(0);
        hwy::GetChosenTarget().Update(hwy::SupportedTargets());
        const auto wide = BytesAfterSteps(tier, shape, DType::kF32);
        for (int64_t i = 0; i < shape.size(); ++i) {
          float a, b;
          std::memcpy(&a, narrow.data() + 4 * i, 4);
          std::memcpy(&b, wide.data() + 4 * i, 4);
          ASSERT_NEAR(a, b, 1e-6) << "baseline, element " << i;
        }
      });
    }
  }
}

TEST(RuleTest, GradientScaleMultipliesTheGradient) {
  const Shape shape{70, 200};
  for (const Tier& tier : Tiers()) {
    RuleBench scaled(tier.rule, tier.settings, shape);
    RuleBench multiplied(tier.rule, tier.settings, shape);
    const std::vector<float> gradient = RandomValues(shape.size(), 0.01, 2);
    std::vector<float> quarter = gradient;
    for (float& g : quarter) g *= 0.25f;
    for (RuleBench* bench : {&scaled, &multiplied}) {
      Fill(bench->weight(), RandomValues(shape.size(), 0.5, 1));
      Fill(bench->gradient(), bench == &scaled ? gradient : quarter);
      bench->context().gradient_scale = bench == &scaled ? 0.25f : 1.0f;
      bench->Step();
    }
    EXPECT_EQ(std::memcmp(scaled.weight().data, multiplied.weight().data, scaled.weight().bytes()),
              0)
        << tier.label;
  }
}

TEST(RuleTest, RelativeEpsMakesTheUpdateIndependentOfTheGradientScale) {
  for (const Shape& shape : {Shape{40, 72}, Shape{300}}) {
    const auto weights = [&](EpsMode mode, double eps, double deviation) {
      RuleBench bench("skewadam", {.eps = eps, .eps_mode = mode}, shape);
      Fill(bench.weight(), std::vector<float>(shape.size()));
      for (int step = 0; step < 3; ++step) {
        Fill(bench.gradient(), RandomValues(shape.size(), deviation, 2 + step));
        bench.Step();
      }
      return ValuesOf(bench.weight());
    };
    // A power of two, so that values scale exactly. Squares of 1e-8 are under the 1e-15 of the
    // absolute mode.
    const double small = 0x1p-27;
    const auto relative = weights(EpsMode::kRelative, 1e-2, 1);
    const auto relative_small = weights(EpsMode::kRelative, 1e-2, small);
    const auto absolute = weights(EpsMode::kAbsolute, 1e-8, 1);
    const auto absolute_small = weights(EpsMode::kAbsolute, 1e-8, small);
    double difference = 0, absolute_difference = 0;
    for (int64_t i = 0; i < shape.size(); ++i) {
      difference = std::max(difference, std::abs(double{relative[i]} - relative_small[i]));
      absolute_difference =
          std::max(absolute_difference, std::abs(double{absolute[i]} - absolute_small[i]));
    }
    EXPECT_LT(difference, 1e-6) << shape.ToString();
    EXPECT_GT(absolute_difference, 1e-3) << shape.ToString();
  }
}

TEST(RuleTest, CountsFlooredEntries) {
  // Columns of a factored matrix: 0, 3 and 4 have no gradient.
  RuleBench factored("skewadam", {.momentum = "none"}, {3, 5});
  Fill(factored.weight(), std::vector<float>(15));
  Fill(factored.gradient(), {0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0});
  UpdateReport report = factored.Step();
  EXPECT_EQ(report.floored, 3);
  EXPECT_EQ(report.entries, 5);

  // Elements of an exact one, at a size that is no multiple of the kernels' unit.
  RuleBench exact("skewadam", {.momentum = "none"}, {100});
  std::vector<float> gradient(100, 1);
  gradient[3] = gradient[99] = 1e-6f;
  Fill(exact.weight(), std::vector<float>(100));
  Fill(exact.gradient(), gradient);
  report = exact.Step();
  EXPECT_EQ(report.floored, 2);
  EXPECT_EQ(report.entries, 100);
}

TEST(RuleTest, ZeroGradientOnlyDecays) {
  for (const Tier& tier : Tiers()) {
    for (const Shape& shape : {Shape{5, 65}, Shape{70}}) {
      RuleBench bench(tier.rule, tier.settings, shape);
      Fill(bench.weight(), std::vector<float>(shape.size(), 1));
      Fill(bench.gradient(), std::vector<float>(shape.size(), 0));
      bench.Step();
      for (float w : ValuesOf(bench.weight())) {
        ASSERT_FLOAT_EQ(w, 1 - 0.01f * 0.05f) << tier.label << " " << shape.ToString();
      }
    }
  }
}

// With random bits added, the NaN of all ones would wrap round to a small number.
TEST(RuleTest, NanReachesBfloat16WeightsAsNan) {
  const RuleSettings adamw{.second_moment = SecondMoment::kExact, .rms_clip = 0};
  for (uint32_t bits : {0xffffffffu, 0x7fffffffu, 0x7fc00000u}) {
    RuleBench bench("adamw", adamw, {70}, DType::kBF16);
    Fill(bench.weight(), std::vector<float>(70, 1));
    std::vector<float> gradient(70, 0.5f);
    for (int i = 30; i < 40; ++i) gradient[i] = std::bit_cast<float>(bits);
    Fill(bench.gradient(), gradient);
    bench.Step();
    const std::vector<float> weights = ValuesOf(bench.weight());
    for (int i = 0; i < 70; ++i) EXPECT_EQ(std::isnan(weights[i]), i >= 30 && i < 40) << i;
  }
}

// The momentum of one step, against the float32 one rounded by the scalar definition.
TEST(RuleTest, Bfloat16MomentumIsTheRoundedFloat32Momentum) {
  for (const SecondMoment second : {SecondMoment::kFactored, SecondMoment::kExact}) {
    for (const Shape& shape : Shapes()) {
      SCOPED_TRACE(shape.ToString());
      RuleBench wide("skewadam", {.second_moment = second}, shape);
      RuleBench narrow("skewadam", {.momentum = "bf16", .second_moment = second}, shape);
      for (RuleBench* bench : {&wide, &narrow}) {
        Fill(bench->weight(), RandomValues(shape.size(), 0.5, 1));
        Fill(bench->gradient(), RandomValues(shape.size(), 0.01, 2));
        bench->Step();
      }
      const bool by_rows = shape.rank() == 2 && second == SecondMoment::kFactored;
      const int64_t columns = by_rows ? shape[1] : shape.size();
      const int64_t stripes = (columns + kernels::kStripe - 1) / kernels::kStripe;
      const uint64_t rounding_key = kernels::MomentumKey(narrow.context().rounding_key);
      for (int64_t i = 0; i < shape.size(); ++i) {
        const int64_t stripe = i / columns * stripes + i % columns / kernels::kStripe;
        const BF16 expected = kernels::RoundStochastically(
            wide.state()[0].as<float>()[i],
            kernels::RoundingBits(kernels::StripeKey(rounding_key, stripe),
                                  i % columns % kernels::kStripe));
        ASSERT_EQ(narrow.state()[0].as<BF16>()[i].bits, expected.bits) << "element " << i;
      }
    }
  }
}

TEST(RuleTest, RefusesSettingsThatItCannotHonour) {
  const auto message = [](const std::string& rule, const Settings& settings) -> std::string {
    try {
      MakeRule(rule, settings);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message("skewadam", {}), "");
  EXPECT_EQ(message("skewadam", {{"beta2", 1.0}}),
            "skewadam: beta2 = 1 is not within 0 .. 0.9999999");
  EXPECT_EQ(message("skewadam", {{"eps", 0.0}}), "skewadam: eps = 0 is not within 1e-30 .. 1");
  EXPECT_EQ(message("skewadam", {{"rms_clip", NAN}}),
            "skewadam: rms_clip = nan has to be a number");
  EXPECT_EQ(message("skewadam", {{"momentum", "int4"}}),
            "skewadam: momentum = 'int4' has to be one of none, f32, bf16, int8");
  EXPECT_EQ(message("skewadam", {{"momentum", false}}),
            "skewadam: momentum = false has to be one of none, f32, bf16, int8");
  EXPECT_EQ(message("skewadam", {{"second_momentum", "exact"}}),
            "skewadam: unknown setting second_momentum, did you mean second_moment?");
  EXPECT_EQ(message("adamw", {}), "");
  EXPECT_EQ(message("adamw", {{"beta3", 0.9}}),
            "adamw: unknown setting beta3, did you mean beta1?");
  // Not the rule's, but what the table beside it may say.
  EXPECT_EQ(message("adamw", {{"weight_decya", 0.9}}),
            "adamw: unknown setting weight_decya, did you mean weight_decay?");
  EXPECT_EQ(message("adamv", {}), "no rule is called adamv, did you mean adamw?");
}

}  // namespace
}  // namespace terrace
