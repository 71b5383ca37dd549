// muon against its formula in plain double arithmetic and against what must hold for it.
#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>

#include "backend/cpu/matmul.h"
#include "core/stochastic_rounding.h"
#include "optim/kernels/block_quantization.h"
#include "optim/matrix_rule_testing.h"
#include "optim/optimizer.h"
#include "optim/rule_testing.h"

namespace terrace {
namespace {

constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;

// Of an iteration, what a singular value becomes.
double Quintic(double s) { return kA * s + kB * s * s * s + kC * s * s * s * s * s; }

PlainMatrix Iterated(PlainMatrix x, int64_t steps) {
  if (x.rows > x.columns) return Transposed(Iterated(Transposed(x), steps));
  for (int64_t step = 0; step < steps; ++step) {
    const PlainMatrix gram = x * Transposed(x);
    PlainMatrix polynomial = gram * gram;
    for (int64_t i = 0; i < gram.rows; ++i) {
      for (int64_t j = 0; j < gram.rows; ++j) {
        polynomial(i, j) = kC * polynomial(i, j) + kB * gram(i, j) + (i == j ? kA : 0);
      }
    }
    x = polynomial * x;
  }
  return x;
}

// `norm` 0: x's own.
PlainMatrix Orthogonalized(PlainMatrix x, double eps, int64_t steps, double norm = 0) {
  if (norm == 0) {
    double squares = 0;
    for (double value : x.values) squares += value * value;
    norm = std::sqrt(squares);
  }
  for (double& value : x.values) value /= norm + eps;
  return Iterated(std::move(x), steps);
}

struct Variant {
  double beta = 0.95;
  bool nesterov = true;
  std::string scale = "moonshot";
  int64_t ns_steps = 5;
  double eps = 1e-7;

  double ScaleOf(const Shape& shape) const {
    const double rows = static_cast<double>(shape[0]);
    const double columns = static_cast<double>(shape[1]);
    if (scale == "keller") return std::sqrt(std::max(1.0, rows / columns));
    if (scale == "moonshot") return 0.2 * std::sqrt(std::max(rows, columns));
    if (scale == "spectral") return std::sqrt(rows / columns);
    return 1;
  }
  Settings AsSettings(const std::string& precision = "f32") const {
    return {{"beta", beta},   {"nesterov", nesterov},
            {"scale", scale}, {"ns_steps", static_cast<double>(ns_steps)},
            {"eps", eps},     {"precision", precision}};
  }
};

// The weights after steps with random gradients, and those of the formula.
struct Outcome {
  std::vector<float> actual;
  std::vector<double> expected;
};
Outcome Train(const Variant& variant, const Shape& shape, DType gradient_dtype,
              const std::string& precision) {
  constexpr float kDecay = 0.1f, kScale = 0.37f;
  RuleBench bench("muon", variant.AsSettings(precision), kDecay, shape, DType::kF32,
                  gradient_dtype);
  bench.context().gradient_scale = kScale;
  const double lr = bench.context().learning_rate;
  const std::vector<float> initial = RandomValues(shape.size(), 0.5, 1);
  Fill(bench.weight(), initial);
  std::vector<double> w(initial.begin(), initial.end()), m(shape.size());
  for (int step = 0; step < 3; ++step) {
    const std::vector<float> gradient = RandomValues(shape.size(), 0.01, 2 + step);
    Fill(bench.gradient(), gradient);
    bench.Step();
    PlainMatrix u(shape[0], shape[1]);
    for (int64_t i = 0; i < shape.size(); ++i) {
      const double g = double{kScale} * gradient[i];
      m[i] = variant.beta * m[i] + g;
      u.values[i] = variant.nesterov ? g + variant.beta * m[i] : m[i];
    }
    const PlainMatrix x = Orthogonalized(u, variant.eps, variant.ns_steps);
    for (int64_t i = 0; i < shape.size(); ++i) {
      w[i] = w[i] * (1 - lr * kDecay) - lr * variant.ScaleOf(shape) * x.values[i];
    }
  }
  return {ValuesOf(bench.weight()), w};
}

// One element, single rows and columns, remainders of units, several blocks.
const std::vector<Shape>& Shapes() {
  static const std::vector<Shape> shapes = {{1, 1}, {1, 70},   {70, 1},   {7, 5},   {64, 65},
                                            {4, 7}, {130, 70}, {30, 300}, {300, 30}};
  return shapes;
}

TEST(MuonTest, MatchesTheFormula) {
  for (const Variant& variant : {Variant{},
                                 {.nesterov = false, .scale = "keller"},
                                 {.beta = 0.5, .scale = "none", .ns_steps = 2},
                                 {.scale = "keller", .eps = 1e-2},
                                 {.scale = "spectral", .ns_steps = 3}}) {
    for (const Shape& shape : Shapes()) {
      for (const DType gradient_dtype : {DType::kF32, DType::kBF16}) {
        SCOPED_TRACE(fmt::format("{} {} {}", TextOf(variant.AsSettings()), shape.ToString(),
                                 NameOf(gradient_dtype)));
        const Outcome outcome = Train(variant, shape, gradient_dtype, "f32");
        // Weights are rounded at 1e-7; X, of entries up to 1, at 1e-7 in each iteration, which the
        // next one enlarges by up to kA.
        const double tolerance = 1e-6 + 3 * 0.01 * variant.ScaleOf(shape) * 1e-5;
        for (int64_t i = 0; i < shape.size(); ++i) {
          ASSERT_NEAR(outcome.actual[i], outcome.expected[i], tolerance) << "element " << i;
        }
      }
    }
  }
}

// Where the momentum is rounded, X is of the rounded one, over the norm before.
TEST(MuonTest, StepsByTheStoredMomentum) {
  for (const bool nesterov : {true, false}) {
    for (const Shape& shape : Shapes()) {
      SCOPED_TRACE(fmt::format("{} {}", shape.ToString(), nesterov));
      const Variant variant{.nesterov = nesterov, .scale = "none"};
      Settings settings = variant.AsSettings();
      settings["momentum"] = "int8";
      RuleBench bench("muon", settings, 0, shape);
      Fill(bench.weight(), std::vector<float>(shape.size()));
      const std::vector<float> gradient = RandomValues(shape.size(), 0.01, 2);
      Fill(bench.gradient(), gradient);
      bench.Step();
      PlainMatrix u(shape[0], shape[1]);
      double squares = 0;
      for (int64_t i = 0; i < shape.size(); ++i) {
        const int64_t row = i / shape[1], block = i % shape[1] / kernels::kQuantizationBlock;
        const float scale =
            bench.state()[1].as<float>()[row * kernels::CodeBlocks(shape[1]) + block];
        const double m =
            kernels::Dequantize<kernels::Code::kSigned>(bench.state()[0].as<uint8_t>()[i], scale);
        u.values[i] = nesterov ? gradient[i] + variant.beta * m : m;
        squares += std::pow((nesterov ? 1 + variant.beta : 1) * gradient[i], 2);
      }
      const PlainMatrix x = Orthogonalized(u, variant.eps, variant.ns_steps, std::sqrt(squares));
      const std::vector<float> weights = ValuesOf(bench.weight());
      for (int64_t i = 0; i < shape.size(); ++i) {
        ASSERT_NEAR(weights[i], -0.01 * x.values[i], 1.3e-6) << "element " << i;
      }
    }
  }
}

TEST(MuonTest, WithoutAMomentumTheGradientIsTheDirection) {
  for (const Shape& shape : Shapes()) {
    SCOPED_TRACE(shape.ToString());
    RuleBench none("muon", {{"momentum", "none"}, {"precision", "f32"}}, 0.1f, shape);
    RuleBench first("muon", {{"nesterov", false}, {"precision", "f32"}}, 0.1f, shape);
    EXPECT_TRUE(none.state().empty());
    for (int step = 0; step < 2; ++step) {
      for (RuleBench* bench : {&none, &first}) {
        Fill(bench->weight(), RandomValues(shape.size(), 0.5, 1));
        Fill(bench->gradient(), RandomValues(shape.size(), 0.01, 2 + step));
        bench->context().gradient_scale = 0.5f;
        bench->Step();
      }
      // A first step: the momentum is the gradient.
      const std::vector<float> a = ValuesOf(none.weight()), b = ValuesOf(first.weight());
      for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 2e-6) << i;
      Fill(first.state()[0], std::vector<float>(shape.size()));
    }
  }
}

// The gradient buffer that outlives its step is the momentum of heavy-ball muon.
TEST(MuonTest, AHiddenBufferIsTheMomentum) {
  for (const Shape& shape : Shapes()) {
    SCOPED_TRACE(shape.ToString());
    RuleBench hidden("muon", {{"momentum", "hidden_f32"}, {"precision", "f32"}}, 0.1f, shape);
    RuleBench stored("muon", {{"nesterov", false}, {"precision", "f32"}}, 0.1f, shape);
    for (RuleBench* bench : {&hidden, &stored}) {
      Fill(bench->weight(), RandomValues(shape.size(), 0.5, 1));
      for (int step = 0; step < 3; ++step) {
        bench->SetGradient(RandomValues(shape.size(), 0.01, 2 + step));
        bench->Step();
      }
    }
    const double tolerance = 1e-6 + 3 * 0.01 * Variant{}.ScaleOf(shape) * 1e-5;
    const std::vector<float> a = ValuesOf(hidden.weight()), b = ValuesOf(stored.weight());
    for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], tolerance) << i;
  }
}

TEST(MuonTest, MatchesTheFormulaOnSeveralTiles) {
  for (const Shape& shape : {Shape{140, 150}, Shape{150, 140}}) {
    SCOPED_TRACE(shape.ToString());
    const Outcome outcome = Train({.scale = "none"}, shape, DType::kF32, "f32");
    for (int64_t i = 0; i < shape.size(); ++i) {
      ASSERT_NEAR(outcome.actual[i], outcome.expected[i], 1.3e-6) << "element " << i;
    }
  }
}

// Three steps of 2^-8 rounding in five iterations: some per cent of the update as a whole. Where
// the processor has no bfloat16 products, it is the float32 result.
TEST(MuonTest, Bfloat16IterationsStayClose) {
  for (const Shape& shape : {Shape{64, 65}, Shape{130, 70}, Shape{60, 300}}) {
    SCOPED_TRACE(shape.ToString());
    const Outcome outcome = Train({}, shape, DType::kF32, "bf16");
    const Outcome wide = Train({}, shape, DType::kF32, "f32");
    const std::vector<float> initial = RandomValues(shape.size(), 0.5, 1);
    double difference = 0, change = 0;
    for (int64_t i = 0; i < shape.size(); ++i) {
      difference += std::pow(outcome.actual[i] - wide.actual[i], 2);
      change += std::pow(wide.actual[i] - initial[i], 2);
    }
    EXPECT_LT(std::sqrt(difference / change), 0.03);
    EXPECT_EQ(difference != 0, Matmul().HasBF16());
  }
}

// The update of one step from weights of zero, per learning rate.
PlainMatrix UpdateOf(const Shape& shape, const std::vector<float>& gradient,
                     const Variant& variant) {
  RuleBench bench("muon", variant.AsSettings(), 0, shape);
  bench.context().learning_rate = 1;
  Fill(bench.weight(), std::vector<float>(shape.size()));
  Fill(bench.gradient(), gradient);
  bench.Step();
  PlainMatrix update(shape[0], shape[1], ValuesOf(bench.weight()));
  for (double& value : update.values) value = -value;
  return update;
}

TEST(MuonTest, SingularVectorsStayAndSingularValuesComeCloseToOne) {
  for (const Shape& shape : {Shape{24, 40}, Shape{40, 24}, Shape{20, 20}}) {
    SCOPED_TRACE(shape.ToString());
    const std::vector<float> gradient = RandomValues(shape.size(), 0.01, 2);
    const PlainMatrix g(shape[0], shape[1], gradient);
    const PlainMatrix update = UpdateOf(shape, gradient, {.scale = "none"});
    std::vector<double> expected = SingularValuesOf(g);
    double squares = 0;
    for (double s : expected) squares += s * s;
    for (double& s : expected) {
      s /= std::sqrt(squares);
      for (int step = 0; step < 5; ++step) s = Quintic(s);
    }
    std::sort(expected.rbegin(), expected.rend());
    const std::vector<double> actual = SingularValuesOf(update);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(actual[i], expected[i], 1e-4);
      // A square matrix has singular values near 0, which take longer.
      if (shape[0] == shape[1]) continue;
      EXPECT_GT(actual[i], 0.65);
      EXPECT_LT(actual[i], 1.25);
    }
    // With common singular vectors, g^T update is symmetric and positive.
    const PlainMatrix product = Transposed(g) * update;
    for (int64_t i = 0; i < product.rows; ++i) {
      EXPECT_GT(product(i, i), 0);
      for (int64_t j = 0; j < i; ++j) EXPECT_NEAR(product(i, j), product(j, i), 1e-5);
    }
  }
}

TEST(MuonTest, ATransposedGradientGivesTheTransposedUpdate) {
  for (const Shape& shape : Shapes()) {
    SCOPED_TRACE(shape.ToString());
    const std::vector<float> gradient = RandomValues(shape.size(), 0.01, 2);
    const PlainMatrix turned = Transposed(PlainMatrix(shape[0], shape[1], gradient));
    const PlainMatrix update = UpdateOf(shape, gradient, {});
    const PlainMatrix other =
        UpdateOf({shape[1], shape[0]}, {turned.values.begin(), turned.values.end()}, {});
    const PlainMatrix back = Transposed(other);
    const double tolerance = 1e-5 * Variant().ScaleOf(shape);
    for (int64_t i = 0; i < shape.size(); ++i) {
      ASSERT_NEAR(update.values[i], back.values[i], tolerance) << i;
    }
  }
}

TEST(MuonTest, ZeroGradientOnlyDecays) {
  RuleBench bench("muon", Settings{}, 0.05f, {40, 70});
  Fill(bench.weight(), std::vector<float>(2800, 1));
  Fill(bench.gradient(), std::vector<float>(2800));
  bench.Step();
  for (float w : ValuesOf(bench.weight())) ASSERT_FLOAT_EQ(w, 1 - 0.01f * 0.05f);
}

TEST(MuonTest, NanBecomesNanWeights) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    RuleBench bench("muon", Settings{}, 0, {40, 70}, dtype);
    Fill(bench.weight(), std::vector<float>(2800, 1));
    std::vector<float> gradient(2800, 0.5f);
    gradient[100] = NAN;
    Fill(bench.gradient(), gradient);
    bench.Step();
    for (float w : ValuesOf(bench.weight())) ASSERT_TRUE(std::isnan(w));
  }
}

// bfloat16 weights and momentum are the float32 results of the same step, rounded by the scalar
// definition.
TEST(MuonTest, Bfloat16IsRoundedStochastically) {
  for (const Shape& shape : {Shape{7, 5}, Shape{130, 200}}) {
    RuleBench wide("muon", Settings{}, 0.05f, shape);
    RuleBench narrow("muon", Settings{}, 0.05f, shape, DType::kBF16);
    RuleBench narrow_momentum("muon", {{"momentum", "bf16"}}, 0.05f, shape);
    for (RuleBench* bench : {&wide, &narrow, &narrow_momentum}) {
      Fill(bench->weight(), RandomValues(shape.size(), 0.5, 1));
      Fill(bench->gradient(), RandomValues(shape.size(), 0.01, 2));
      bench->context().gradient_scale = 0.3f;
      bench->Step();
    }
    const auto rounded = [&](float value, uint64_t key, int64_t i) {
      return kernels::RoundStochastically(
          value, kernels::RoundingBits(kernels::StripeKey(key, i / kernels::kStripe),
                                       i % kernels::kStripe));
    };
    const uint64_t key = narrow.context().rounding_key;
    for (int64_t i = 0; i < shape.size(); ++i) {
      ASSERT_EQ(narrow.weight().as<BF16>()[i].bits,
                rounded(wide.weight().as<float>()[i], key, i).bits)
          << i;
      ASSERT_EQ(narrow_momentum.state()[0].as<BF16>()[i].bits,
                rounded(wide.state()[0].as<float>()[i], kernels::MomentumKey(key), i).bits)
          << i;
    }
  }
}

TEST(MuonTest, ThreadsChangeNothing) {
  for (const Shape& shape : {Shape{300, 530}, Shape{530, 300}, Shape{40, 70}}) {
    SCOPED_TRACE(shape.ToString());
    const auto weights = [&](int threads, bool all_threads) {
      return WeightsAfterSteps("muon", {}, shape, DType::kF32, threads, all_threads);
    };
    const auto one = weights(1, true);
    for (const int threads : {2, 3, 7}) {
      EXPECT_TRUE(one == weights(threads, true)) << threads;
      EXPECT_TRUE(one == weights(threads, false)) << threads << " side by side";
    }
  }
}

TEST(MuonTest, ScratchIsXTwoSquaresAndABlockAThread) {
  const auto bytes = [](const Shape& shape, int threads, bool all_threads) {
    return ScratchBytesOf("muon", {{"precision", "f32"}}, shape, threads, all_threads);
  };
  const int64_t pad = int64_t{8} << 20;  // more than oneDNN asks for, for one thread
  for (const Shape& shape : {Shape{4096, 4096}, Shape{1024, 512}, Shape{512, 1024}}) {
    SCOPED_TRACE(shape.ToString());
    const int64_t side = std::min(shape[0], shape[1]);
    const int64_t least = 4 * (shape.size() + 2 * side * side + 128 * side);
    EXPECT_GE(bytes(shape, 1, true), least);
    EXPECT_LE(bytes(shape, 1, true), least + pad);
    EXPECT_EQ(bytes(shape, 8, false), bytes(shape, 1, true));
    EXPECT_LE(bytes(shape, 64, true), 4 * (2 * shape.size() + 2 * side * side) + 64 * pad);
  }
}

TEST(MuonTest, RefusesWhatItCannotServe) {
  Parameter parameter;
  parameter.value.shape = {70, 7};
  for (const Population population : {Population::kEmbedding, Population::kHead}) {
    parameter.population = population;
    EXPECT_EQ(MessageOf([&] { MakeRule("muon", {})->State(parameter); }),
              "muon serves hidden matrices only, neither embedding nor head");
  }
  parameter.value.shape = {70};
  EXPECT_EQ(MessageOf([&] { MakeRule("muon", {})->State(parameter); }),
            "muon serves matrices only");
  EXPECT_EQ(MessageOf([&] {
              MakeRule("muon", {{"ns_steps", 2.5}});
            }),
            "muon: ns_steps = 2.5 has to be a whole number");
  EXPECT_EQ(MessageOf([&] {
              MakeRule("muon", {{"scale", "moon"}});
            }),
            "muon: scale = 'moon' has to be one of none, keller, moonshot, spectral");
  EXPECT_EQ(MessageOf([&] {
              MakeRule("muon", {{"momentum", "hidden_f32"}, {"nesterov", true}});
            }),
            "muon: nesterov has no effect without a momentum that is not hidden");
  EXPECT_EQ(MessageOf([&] {
              MakeRule("muon", {{"momentum", "none"}, {"beta", 0.9}});
            }),
            "muon: beta has no effect without a momentum");
}

TEST(MuonTest, ThePolicyServesHiddenMatrices) {
  for (const PolicyEntry& entry : PolicyNamed("muon").entries) {
    const bool hidden =
        entry.population == Population::kAttention || entry.population == Population::kDenseFfn ||
        entry.population == Population::kSharedExpert || entry.population == Population::kExpert;
    EXPECT_EQ(entry.rule, hidden ? "muon" : "adamw") << NameOf(entry.population);
    EXPECT_EQ(entry.weight_decay, entry.population == Population::kNorm ? 0 : 0.1f);
  }
}

}  // namespace
}  // namespace terrace
