#include <gtest/gtest.h>

#include <cmath>

#include "core/stochastic_rounding.h"
#include "optim/rule_testing.h"

namespace terrace {
namespace {

struct Plain {
  double decay_rate = -0.8;
  double eps = 1e-30;
  double clip_threshold = 1;
  double beta1 = 0;  // of updates; 0: none
};

Settings SettingsOf(const Plain& plain) {
  Settings settings = {{"decay_rate", plain.decay_rate},
                       {"eps", plain.eps},
                       {"clip_threshold", plain.clip_threshold}};
  if (plain.beta1 > 0) {
    settings["momentum"] = "f32";
    settings["beta1"] = plain.beta1;
  }
  return settings;
}

// adafactor.cpp in double, element by element.
class PlainAdafactor {
 public:
  PlainAdafactor(const Plain& plain, const Shape& shape)
      : s_(plain),
        factored_(shape.rank() == 2),
        columns_(factored_ ? shape[1] : shape.size()),
        rows_(shape.size() / columns_),
        vr_(rows_),
        vc_(columns_),
        m_(shape.size()) {}

  void Step(std::vector<double>& w, const std::vector<float>& g, double scale, double lr,
            double decay) {
    const double beta2 = 1 - std::pow(++step_, s_.decay_rate);
    std::vector<double> r(rows_), c(columns_), u(w.size());
    for (size_t i = 0; i < w.size(); ++i) {
      const double square = scale * g[i] * scale * g[i] + s_.eps;
      r[i / columns_] += square / columns_;
      c[i % columns_] += square / rows_;
    }
    double mean = 0;
    for (size_t i = 0; i < r.size(); ++i) {
      vr_[i] = beta2 * vr_[i] + (1 - beta2) * r[i];
      mean += vr_[i] / rows_;
    }
    // A vector is a row, whose column means are its squares.
    for (size_t j = 0; j < c.size(); ++j) vc_[j] = beta2 * vc_[j] + (1 - beta2) * c[j];
    double squares = 0;
    for (size_t i = 0; i < w.size(); ++i) {
      const double row = factored_ ? vr_[i / columns_] / mean : 1;
      u[i] = scale * g[i] / std::sqrt(row * vc_[i % columns_]);
      squares += u[i] * u[i] / static_cast<double>(w.size());
    }
    const double clip =
        s_.clip_threshold > 0 ? std::max(1.0, std::sqrt(squares) / s_.clip_threshold) : 1;
    for (size_t i = 0; i < w.size(); ++i) {
      m_[i] = s_.beta1 * m_[i] + (1 - s_.beta1) * u[i] / clip;
      w[i] = w[i] * (1 - lr * decay) - lr * m_[i];
    }
  }

 private:
  Plain s_;
  bool factored_;
  int64_t columns_;
  int64_t rows_;
  int step_ = 0;
  std::vector<double> vr_, vc_, m_;
};

// Remainders of units and of row blocks, rows of several stripes, one element.
const std::vector<Shape>& Shapes() {
  static const std::vector<Shape> shapes = {{1, 1}, {3, 63}, {5, 64},    {130, 65}, {70, 257},
                                            {1},    {63},    {2, 40001}, {70001},   {3, 5, 11}};
  return shapes;
}

TEST(AdafactorTest, MatchesTheFormula) {
  // The second has an eps that matters: it is added, and to the sums that bound the update too.
  const Plain variants[] = {{},
                            {.eps = 1e-5},
                            {.clip_threshold = 0.5},
                            {.clip_threshold = 0},
                            {.decay_rate = -0.5},
                            {.beta1 = 0.9},
                            {.eps = 1e-5, .beta1 = 0.9}};
  for (const Plain& variant : variants) {
    for (const Shape& shape : Shapes()) {
      for (const DType gradient_dtype : {DType::kF32, DType::kBF16}) {
        SCOPED_TRACE(TextOf(SettingsOf(variant)) + shape.ToString());
        RuleBench bench("adafactor", SettingsOf(variant), 0.1f, shape, DType::kF32, gradient_dtype);
        bench.context().gradient_scale = 0.37f;
        PlainAdafactor plain(variant, shape);
        const std::vector<float> initial = RandomValues(shape.size(), 0.5, 1);
        Fill(bench.weight(), initial);
        std::vector<double> expected(initial.begin(), initial.end());
        for (int step = 0; step < 4; ++step) {
          std::vector<float> gradient = RandomValues(shape.size(), 0.01, 2 + step);
          // The last step's are larger: it is clipped.
          for (float& g : gradient) g *= step == 3 ? 8 : 1;
          bench.SetGradient(gradient);
          bench.Step();
          plain.Step(expected, gradient, 0.37f, 0.01f, 0.1f);
        }
        const std::vector<float> weights = ValuesOf(bench.weight());
        for (size_t i = 0; i < weights.size(); ++i) {
          // A few roundings of w (below 1) and of updates (0.01 times some units).
          ASSERT_NEAR(weights[i], expected[i], 1e-6) << "element " << i;
        }
      }
    }
  }
}

TEST(AdafactorTest, StateIsFactoredForMatrices) {
  Parameter parameter;
  parameter.value.shape = {30, 20};
  std::vector<StateSpec> state = MakeRule("adafactor", {})->State(parameter);
  ASSERT_EQ(state.size(), 2u);
  EXPECT_EQ(state[0].shape, (Shape{30}));
  EXPECT_EQ(state[1].shape, (Shape{20}));
  state = MakeRule("adafactor", {{"momentum", "bf16"}})->State(parameter);
  ASSERT_EQ(state.size(), 3u);
  EXPECT_EQ(state[0].dtype, DType::kBF16);
  EXPECT_EQ(state[0].shape, parameter.value.shape);
  parameter.value.shape = {30};
  state = MakeRule("adafactor", {})->State(parameter);
  ASSERT_EQ(state.size(), 1u);
  EXPECT_EQ(state[0].shape, (Shape{30}));
}

// The momentum is of updates: after the first step a tenth of one, and the weights' change.
TEST(AdafactorTest, Bfloat16MomentumIsTheRoundedFloat32Momentum) {
  for (const Shape& shape : Shapes()) {
    SCOPED_TRACE(shape.ToString());
    RuleBench wide("adafactor", {{"momentum", "f32"}}, 0, shape);
    RuleBench narrow("adafactor", {{"momentum", "bf16"}}, 0, shape, DType::kBF16);
    for (RuleBench* bench : {&wide, &narrow}) {
      Fill(bench->weight(), RandomValues(shape.size(), 0.5, 1));
      bench->SetGradient(RandomValues(shape.size(), 0.01, 2));
      bench->Step();
    }
    const int64_t columns = shape.rank() == 2 ? shape[1] : shape.size();
    const int64_t stripes = (columns + kernels::kStripe - 1) / kernels::kStripe;
    const uint64_t key = narrow.context().rounding_key;
    for (int64_t i = 0; i < shape.size(); ++i) {
      const int64_t stripe = i / columns * stripes + i % columns / kernels::kStripe;
      const auto rounded = [&](TensorView exact, uint64_t rounding_key) {
        return kernels::RoundStochastically(
                   exact.as<float>()[i],
                   kernels::RoundingBits(kernels::StripeKey(rounding_key, stripe),
                                         i % columns % kernels::kStripe))
            .bits;
      };
      ASSERT_EQ(narrow.weight().as<BF16>()[i].bits, rounded(wide.weight(), key)) << i;
      ASSERT_EQ(narrow.state()[0].as<BF16>()[i].bits,
                rounded(wide.state()[0], kernels::MomentumKey(key)))
          << i;
    }
  }
}

TEST(AdafactorTest, RefusesWhatItCannotHonour) {
  const auto message = [](const Settings& settings) -> std::string {
    try {
      MakeRule("adafactor", settings);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message({}), "");
  EXPECT_EQ(message({{"decay_rate", 0.8}}), "adafactor: decay_rate = 0.8 is not within -1 .. 0");
  EXPECT_EQ(message({{"momentum", "int4"}}),
            "adafactor: momentum = 'int4' has to be one of none, f32, bf16, int8");
  EXPECT_EQ(message({{"beta1", 0.9}}), "adafactor: beta1 has no effect without a momentum");
}

}  // namespace
}  // namespace terrace
