#include <gtest/gtest.h>

#include "core/stochastic_rounding.h"
#include "optim/rule_testing.h"

namespace terrace {
namespace {

const std::vector<Shape>& Shapes() {
  static const std::vector<Shape> shapes = {{1, 1},   {3, 63}, {5, 64}, {4, 65},
                                            {7, 257}, {1},     {70001}, {3, 5, 11}};
  return shapes;
}

// sgd.cpp in double; `momentum` is empty for none.
void PlainStep(std::vector<double>& weight, std::vector<double>& momentum, bool nesterov,
               const std::vector<float>& gradient, double scale, double lr, double decay) {
  constexpr double kBeta = 0.8;
  for (size_t i = 0; i < weight.size(); ++i) {
    const double g = scale * gradient[i];
    double direction = g;
    if (!momentum.empty()) {
      momentum[i] = kBeta * momentum[i] + g;
      direction = nesterov ? g + kBeta * momentum[i] : momentum[i];
    }
    weight[i] = weight[i] * (1 - lr * decay) - lr * direction;
  }
}

TEST(SgdTest, MatchesTheFormula) {
  const std::vector<Settings> variants = {{{"momentum", "none"}},
                                          {{"momentum", "f32"}, {"beta", 0.8}},
                                          {{"momentum", "f32"}, {"beta", 0.8}, {"nesterov", true}}};
  for (const Settings& settings : variants) {
    for (const Shape& shape : Shapes()) {
      for (const DType gradient_dtype : {DType::kF32, DType::kBF16}) {
        SCOPED_TRACE(TextOf(settings) + shape.ToString());
        RuleBench bench("sgd", settings, 0.1f, shape, DType::kF32, gradient_dtype);
        bench.context().gradient_scale = 0.37f;
        const std::vector<float> initial = RandomValues(shape.size(), 0.5, 1);
        Fill(bench.weight(), initial);
        std::vector<double> expected(initial.begin(), initial.end());
        std::vector<double> momentum(settings.size() > 1 ? initial.size() : 0);
        for (int step = 0; step < 3; ++step) {
          const std::vector<float> gradient = RandomValues(shape.size(), 1, 2 + step);
          bench.SetGradient(gradient);
          bench.Step();
          PlainStep(expected, momentum, settings.contains("nesterov"), gradient, 0.37f, 0.01f,
                    0.1f);
        }
        const std::vector<float> weights = ValuesOf(bench.weight());
        for (size_t i = 0; i < weights.size(); ++i) {
          // Three roundings of weights below 1, and of steps far below.
          ASSERT_NEAR(weights[i], expected[i], 3e-7) << "element " << i;
        }
      }
    }
  }
}

// The float32 result of the same step, rounded by the scalar definition; and so the momentum.
TEST(SgdTest, Bfloat16IsTheRoundedFloat32) {
  for (const Shape& shape : Shapes()) {
    SCOPED_TRACE(shape.ToString());
    RuleBench wide("sgd", {{"momentum", "f32"}}, 0.1f, shape);
    RuleBench narrow("sgd", {{"momentum", "bf16"}}, 0.1f, shape, DType::kBF16);
    for (RuleBench* bench : {&wide, &narrow}) {
      Fill(bench->weight(), RandomValues(shape.size(), 0.5, 1));
      bench->SetGradient(RandomValues(shape.size(), 1, 2));
      bench->context().gradient_scale = 0.37f;
      bench->Step();
    }
    const uint64_t key = narrow.context().rounding_key;
    for (int64_t i = 0; i < shape.size(); ++i) {
      const auto rounded = [&](TensorView exact, uint64_t rounding_key) {
        const uint64_t stripe = kernels::StripeKey(rounding_key, i / kernels::kStripe);
        return kernels::RoundStochastically(exact.as<float>()[i],
                                            kernels::RoundingBits(stripe, i % kernels::kStripe))
            .bits;
      };
      ASSERT_EQ(narrow.weight().as<BF16>()[i].bits, rounded(wide.weight(), key)) << i;
      ASSERT_EQ(narrow.state()[0].as<BF16>()[i].bits,
                rounded(wide.state()[0], kernels::MomentumKey(key)))
          << i;
    }
  }
}

TEST(SgdTest, RefusesWhatItCannotHonour) {
  const auto message = [](const Settings& settings) -> std::string {
    try {
      MakeRule("sgd", settings);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message({{"momentum", "none"}}), "");
  EXPECT_EQ(message({{"momentum", "int4"}}),
            "sgd: momentum = 'int4' has to be one of none, f32, bf16, int8");
  EXPECT_EQ(message({{"momentum", "none"}, {"nesterov", true}}).find("sgd: nesterov has no effect"),
            0u);
}

}  // namespace
}  // namespace terrace
