// galore against its formula in plain double arithmetic and against what must hold for it.
#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <cstring>

#include "core/stochastic_rounding.h"
#include "optim/eigenvectors.h"
#include "optim/matrix_rule_testing.h"
#include "optim/optimizer.h"
#include "optim/rule_testing.h"

namespace terrace {
namespace {

struct Variant {
  int64_t rank = 4;
  int64_t period = 2;
  double alpha = 0.5;
  double beta1 = 0.9;
  double beta2 = 0.99;
  double eps = 0.1;  // of the size of what it guards: else errors decide on signs near 0

  Settings AsSettings() const {
    return {{"rank", static_cast<double>(rank)},
            {"period", static_cast<double>(period)},
            {"alpha", alpha},
            {"beta1", beta1},
            {"beta2", beta2},
            {"eps", eps}};
  }
};

// Singular values apart from each other, whose vectors are then well defined.
std::vector<float> Gradient(const Shape& shape, uint64_t key) {
  std::vector<float> values = RandomValues(shape.size(), 1, key);
  const bool wide = shape[0] < shape[1];
  for (int64_t i = 0; i < shape.size(); ++i) {
    const int64_t along = wide ? i / shape[1] : i % shape[1];
    values[i] = ToFloat(ToBF16(values[i] * std::pow(0.8f, static_cast<float>(along))));
  }
  return values;
}

// Rows are the leading eigenvectors, the largest entry of each positive.
PlainMatrix LeadingRows(const PlainMatrix& symmetric, int64_t count) {
  const Eigen eigen = EigenOf(symmetric);
  PlainMatrix rows(count, symmetric.rows);
  for (int64_t k = 0; k < count; ++k) {
    double largest = 0;
    for (int64_t i = 0; i < symmetric.rows; ++i) {
      if (std::abs(eigen.vectors(i, k)) > std::abs(largest)) largest = eigen.vectors(i, k);
    }
    for (int64_t i = 0; i < symmetric.rows; ++i) {
      rows(k, i) = std::copysign(1.0, largest) * eigen.vectors(i, k);
    }
  }
  return rows;
}

// The rule in double, for matrices that are not square.
class PlainGalore {
 public:
  PlainGalore(const Variant& variant, const Shape& shape, double learning_rate, double decay)
      : v_(variant),
        wide_(shape[0] < shape[1]),
        rank_(std::min({variant.rank, shape[0], shape[1]})),
        lr_(learning_rate),
        decay_(decay),
        projector_(0, 0),
        first_(wide_ ? rank_ : shape[0], wide_ ? shape[1] : rank_),
        second_(first_) {}

  void Step(PlainMatrix& w, const PlainMatrix& g) {
    if (step_ % v_.period == 0) {
      projector_ = LeadingRows(wide_ ? g * Transposed(g) : Transposed(g) * g, rank_);
    }
    ++step_;
    PlainMatrix x = wide_ ? projector_ * g : g * Transposed(projector_);
    for (size_t i = 0; i < x.values.size(); ++i) {
      double& m = first_.values[i];
      double& s = second_.values[i];
      m = v_.beta1 * m + (1 - v_.beta1) * x.values[i];
      s = v_.beta2 * s + (1 - v_.beta2) * x.values[i] * x.values[i];
      x.values[i] = m / (1 - std::pow(v_.beta1, step_)) /
                    (std::sqrt(s / (1 - std::pow(v_.beta2, step_))) + v_.eps);
    }
    const PlainMatrix update = wide_ ? Transposed(projector_) * x : x * projector_;
    for (size_t i = 0; i < w.values.size(); ++i) {
      w.values[i] = w.values[i] * (1 - lr_ * decay_) - lr_ * v_.alpha * update.values[i];
    }
  }

 private:
  Variant v_;
  bool wide_;
  int64_t rank_;
  double lr_;
  double decay_;
  int step_ = 0;
  PlainMatrix projector_, first_, second_;
};

// Single rows and columns, remainders of units, several blocks, either side smaller.
const std::vector<Shape>& Shapes() {
  static const std::vector<Shape> shapes = {{1, 70}, {70, 1}, {5, 7},    {7, 5},
                                            {9, 65}, {65, 9}, {12, 600}, {600, 12}};
  return shapes;
}

// Five steps of the rule and of the formula, side by side.
void ExpectMatch(const Variant& variant, const Shape& shape, DType gradient_dtype) {
  constexpr float kDecay = 0.1f, kScale = 0.37f;
  SCOPED_TRACE(fmt::format("{} {} {}", TextOf(variant.AsSettings()), shape.ToString(),
                           NameOf(gradient_dtype)));
  RuleBench bench("galore", variant.AsSettings(), kDecay, shape, DType::kF32, gradient_dtype);
  bench.context().gradient_scale = kScale;
  PlainGalore plain(variant, shape, bench.context().learning_rate, kDecay);
  Fill(bench.weight(), RandomValues(shape.size(), 0.5, 1));
  PlainMatrix expected(shape[0], shape[1], ValuesOf(bench.weight()));
  for (int step = 0; step < 5; ++step) {
    std::vector<float> gradient = Gradient(shape, 2 + step);
    Fill(bench.gradient(), gradient);
    bench.Step();
    for (float& g : gradient) g *= kScale;
    plain.Step(expected, PlainMatrix(shape[0], shape[1], gradient));
  }
  const std::vector<float> weights = ValuesOf(bench.weight());
  for (int64_t i = 0; i < shape.size(); ++i) {
    // Eigenvectors are good to some 1e-6 times the largest eigenvalue over the gap to the next;
    // updates are 0.01 times up to some units.
    ASSERT_NEAR(weights[i], expected.values[i], 3e-6) << "element " << i;
  }
}

TEST(GaloreTest, MatchesTheFormula) {
  for (const Variant& variant : {Variant{},
                                 {.rank = 1, .period = 3, .alpha = 1},
                                 {.rank = 100, .period = 1, .beta1 = 0, .beta2 = 0.5}}) {
    for (const Shape& shape : Shapes()) {
      for (const DType gradient_dtype : {DType::kF32, DType::kBF16}) {
        ExpectMatch(variant, shape, gradient_dtype);
      }
    }
  }
}

TEST(GaloreTest, MatchesTheFormulaOnSeveralTiles) {
  ExpectMatch({}, {140, 150}, DType::kF32);
  ExpectMatch({}, {150, 140}, DType::kBF16);
}

TEST(GaloreTest, StateIsTheSubspaceAndTwoMomentsInIt) {
  const auto shapes = [](Shape shape, double rank) {
    Parameter parameter;
    parameter.value.shape = shape;
    std::string text;
    for (const StateSpec& spec : MakeRule("galore", {{"rank", rank}})->State(parameter)) {
      text += fmt::format("{} {} {} ", spec.name, NameOf(spec.dtype), spec.shape.ToString());
    }
    return text;
  };
  EXPECT_EQ(shapes({30, 70}, 8),
            "projector f32 [8, 30] momentum f32 [8, 70] second_moment f32 [8, 70] ");
  EXPECT_EQ(shapes({70, 30}, 8),
            "projector f32 [8, 30] momentum f32 [70, 8] second_moment f32 [70, 8] ");
  EXPECT_EQ(shapes({30, 70}, 128),
            "projector f32 [30, 30] momentum f32 [30, 70] second_moment f32 [30, 70] ");
}

// Writes random gradients and steps; `first` keys the gradients.
void Train(RuleBench& bench, int first, int steps) {
  for (int step = first; step < first + steps; ++step) {
    Fill(bench.gradient(), RandomValues(bench.weight().size(), 0.01, 2 + step));
    bench.Step();
  }
}

std::vector<std::byte> BytesOfView(const TensorView& view) {
  return {view.data, view.data + view.bytes()};
}

TEST(GaloreTest, TheSubspaceChangesEveryPeriodOnly) {
  RuleBench bench("galore", {{"rank", 3.0}, {"period", 3.0}}, 0, {20, 30});
  Fill(bench.weight(), RandomValues(600, 0.5, 1));
  std::vector<std::byte> before = BytesOfView(bench.state()[0]);
  for (int step = 1; step <= 8; ++step) {
    Train(bench, step, 1);
    const std::vector<std::byte> after = BytesOfView(bench.state()[0]);
    EXPECT_EQ(after != before, step == 1 || step == 4 || step == 7) << step;
    before = after;
  }
}

TEST(GaloreTest, ContinuesInTheMiddleOfAPeriod) {
  for (const Shape& shape : {Shape{20, 30}, Shape{30, 20}}) {
    const Settings settings = {{"rank", 3.0}, {"period", 3.0}};
    RuleBench whole("galore", settings, 0.1f, shape, DType::kBF16);
    RuleBench resumed("galore", settings, 0.1f, shape, DType::kBF16);
    Fill(whole.weight(), RandomValues(600, 0.5, 1));
    Train(whole, 0, 5);
    const auto copy = [](const TensorView& from, const TensorView& to) {
      std::memcpy(to.data, from.data, from.bytes());
    };
    copy(whole.weight(), resumed.weight());
    for (int i = 0; i < 3; ++i) copy(whole.state()[i], resumed.state()[i]);
    resumed.context().tensor_step = 5;
    Train(whole, 5, 4);
    Train(resumed, 5, 4);
    EXPECT_TRUE(BytesOfView(whole.weight()) == BytesOfView(resumed.weight()));
  }
}

// With a subspace that is the whole space, it is AdamW on rotated weights and gradients.
TEST(GaloreTest, AtFullRankItIsAdamWInTheRotatedBasis) {
  for (const Shape& shape : {Shape{12, 40}, Shape{40, 12}, Shape{12, 12}}) {
    SCOPED_TRACE(shape.ToString());
    const bool wide = shape[0] < shape[1];
    RuleBench galore("galore", {{"alpha", 1.0}, {"eps", 1e-2}}, 0.1f, shape);
    RuleBench adamw("adamw", {{"eps", 1e-2}}, 0.1f, shape);
    const std::vector<float> initial = RandomValues(shape.size(), 0.5, 1);
    Fill(galore.weight(), initial);
    std::optional<PlainMatrix> projector;
    const auto rotated = [&](const std::vector<float>& values) {
      const PlainMatrix matrix(shape[0], shape[1], values);
      const PlainMatrix result = wide ? *projector * matrix : matrix * Transposed(*projector);
      return std::vector<float>(result.values.begin(), result.values.end());
    };
    for (int step = 0; step < 4; ++step) {
      const std::vector<float> gradient = RandomValues(shape.size(), 0.01, 2 + step);
      Fill(galore.gradient(), gradient);
      galore.Step();
      if (step == 0) {
        projector = PlainMatrix(12, 12, ValuesOf(galore.state()[0]));
        Fill(adamw.weight(), rotated(initial));
      }
      Fill(adamw.gradient(), rotated(gradient));
      adamw.Step();
    }
    const std::vector<float> expected = ValuesOf(adamw.weight());
    const std::vector<float> actual = rotated(ValuesOf(galore.weight()));
    for (int64_t i = 0; i < shape.size(); ++i) ASSERT_NEAR(actual[i], expected[i], 2e-6) << i;
  }
}

// Where a gradient's rank is no larger than the subspace's, projecting loses nothing. With moments
// that forget at once and an eps that dwarfs them, the step is then along the gradient itself.
TEST(GaloreTest, AGradientOfLowRankIsKeptWhole) {
  for (const Shape& shape : {Shape{20, 50}, Shape{50, 20}}) {
    SCOPED_TRACE(shape.ToString());
    const PlainMatrix left(shape[0], 2, RandomValues(2 * shape[0], 1, 1));
    const PlainMatrix right(2, shape[1], RandomValues(2 * shape[1], 1, 2));
    const PlainMatrix product = left * right;
    std::vector<float> gradient(product.values.begin(), product.values.end());
    for (float& g : gradient) g *= 1e-5f;
    RuleBench bench("galore",
                    {{"rank", 2.0}, {"alpha", 1.0}, {"beta1", 0.0}, {"beta2", 0.0}, {"eps", 1.0}},
                    0, shape);
    bench.context().learning_rate = 1e5f;
    Fill(bench.weight(), std::vector<float>(shape.size()));
    Fill(bench.gradient(), gradient);
    bench.Step();
    const std::vector<float> weights = ValuesOf(bench.weight());
    for (int64_t i = 0; i < shape.size(); ++i) {
      ASSERT_NEAR(weights[i], -product.values[i], 2e-3) << i;  // entries up to 8, eps 1e-4
    }
  }
}

TEST(GaloreTest, ATransposedGradientGivesTheTransposedUpdate) {
  for (const Shape& shape : Shapes()) {
    SCOPED_TRACE(shape.ToString());
    RuleBench one("galore", Variant{}.AsSettings(), 0, shape);
    RuleBench other("galore", Variant{}.AsSettings(), 0, {shape[1], shape[0]});
    Fill(one.weight(), std::vector<float>(shape.size()));
    Fill(other.weight(), std::vector<float>(shape.size()));
    for (int step = 0; step < 3; ++step) {
      const std::vector<float> gradient = Gradient(shape, 2 + step);
      const PlainMatrix turned = Transposed(PlainMatrix(shape[0], shape[1], gradient));
      Fill(one.gradient(), gradient);
      Fill(other.gradient(), {turned.values.begin(), turned.values.end()});
      one.Step();
      other.Step();
    }
    const PlainMatrix back = Transposed(PlainMatrix(shape[1], shape[0], ValuesOf(other.weight())));
    const std::vector<float> weights = ValuesOf(one.weight());
    for (int64_t i = 0; i < shape.size(); ++i) ASSERT_NEAR(weights[i], back.values[i], 2e-6) << i;
  }
}

TEST(GaloreTest, ZeroGradientOnlyDecaysAndLeavesABasis) {
  for (const Shape& shape : {Shape{40, 70}, Shape{70, 40}}) {
    RuleBench bench("galore", {{"rank", 8.0}}, 0.05f, shape);
    Fill(bench.weight(), std::vector<float>(2800, 1));
    Fill(bench.gradient(), std::vector<float>(2800));
    bench.Step();
    for (float w : ValuesOf(bench.weight())) ASSERT_FLOAT_EQ(w, 1 - 0.01f * 0.05f);
    const PlainMatrix projector(8, 40, ValuesOf(bench.state()[0]));
    const PlainMatrix products = projector * Transposed(projector);
    for (int64_t i = 0; i < 8; ++i) {
      for (int64_t j = 0; j < 8; ++j) EXPECT_NEAR(products(i, j), i == j, 1e-6);
    }
  }
}

TEST(GaloreTest, WhatIsNotFiniteReachesTheWeightsAndNotLapack) {
  for (const float wrong : {NAN, INFINITY}) {
    RuleBench bench("galore", {{"rank", 8.0}, {"period", 1.0}}, 0, {40, 70});
    Fill(bench.weight(), std::vector<float>(2800, 1));
    Train(bench, 0, 1);
    const std::vector<std::byte> before = BytesOfView(bench.state()[0]);
    std::vector<float> gradient(2800, 0.5f);
    gradient[100] = wrong;
    Fill(bench.gradient(), gradient);
    bench.Step();
    EXPECT_TRUE(before == BytesOfView(bench.state()[0]));
    // In the subspace, an entry spreads over its column.
    int64_t failed = 0;
    for (float w : ValuesOf(bench.weight())) failed += !std::isfinite(w);
    EXPECT_EQ(failed, 40);
  }
}

TEST(GaloreTest, Bfloat16WeightsAreTheRoundedFloat32Weights) {
  for (const Shape& shape : {Shape{7, 5}, Shape{20, 600}, Shape{600, 20}}) {
    SCOPED_TRACE(shape.ToString());
    RuleBench wide("galore", {{"rank", 4.0}}, 0.05f, shape);
    RuleBench narrow("galore", {{"rank", 4.0}}, 0.05f, shape, DType::kBF16);
    for (RuleBench* bench : {&wide, &narrow}) {
      Fill(bench->weight(), RandomValues(shape.size(), 0.5, 1));
      Train(*bench, 0, 1);
    }
    // Stripes: rows, cut where blocks of 128 columns end in a wide matrix.
    const bool by_blocks = shape[0] < shape[1];
    const int64_t stripe_columns = by_blocks ? 128 : shape[1];
    const int64_t stripes = (shape[1] + stripe_columns - 1) / stripe_columns;
    for (int64_t i = 0; i < shape.size(); ++i) {
      const int64_t row = i / shape[1], column = i % shape[1];
      const uint64_t key = kernels::StripeKey(narrow.context().rounding_key,
                                              row * stripes + column / stripe_columns);
      const BF16 expected = kernels::RoundStochastically(
          wide.weight().as<float>()[i], kernels::RoundingBits(key, column % stripe_columns));
      ASSERT_EQ(narrow.weight().as<BF16>()[i].bits, expected.bits) << "element " << i;
    }
  }
}

TEST(GaloreTest, ThreadsChangeNothing) {
  for (const Shape& shape : {Shape{300, 530}, Shape{530, 300}, Shape{40, 70}}) {
    for (const DType gradient_dtype : {DType::kF32, DType::kBF16}) {
      SCOPED_TRACE(fmt::format("{} {}", shape.ToString(), NameOf(gradient_dtype)));
      const auto weights = [&](int threads, bool all_threads) {
        return WeightsAfterSteps("galore", {{"rank", 16.0}, {"period", 2.0}}, shape, gradient_dtype,
                                 threads, all_threads);
      };
      const auto one = weights(1, true);
      for (const int threads : {2, 7}) {
        EXPECT_TRUE(one == weights(threads, true)) << threads;
        EXPECT_TRUE(one == weights(threads, false)) << threads << " side by side";
      }
    }
  }
}

// Several threads in LAPACK at the same time.
TEST(GaloreTest, SideBySideIsOneAfterAnother) {
  constexpr int64_t kTensors = 12;
  const Shape shape{60, 90};
  const auto weights = [&](int threads) {
    const int before = omp_get_max_threads();
    omp_set_num_threads(threads);
    Arena arena(int64_t{64} << 20);
    Parameters parameters;
    std::vector<Update> updates;
    for (int64_t i = 0; i < kTensors; ++i) {
      Parameter& parameter = parameters.emplace_back();
      parameter.name = "tensor";
      parameter.population = Population::kExpert;
      parameter.id = i;
      parameter.value = arena.Allocate(Memory::kWeights, DType::kF32, shape, "tensor");
      Fill(parameter.value, RandomValues(shape.size(), 0.5, i));
      const TensorView gradient =
          arena.Allocate(Memory::kGradients, DType::kF32, shape, "gradient");
      Fill(gradient, RandomValues(shape.size(), 0.01, 100 + i));
      updates.push_back({&parameter, gradient, 1});
    }
    Policy policy = PolicyNamed("galore");
    Override(policy, Population::kExpert, {{"rank", 20.0}, {"period", 1.0}});
    Optimizer optimizer(policy, parameters, arena, 1);
    for (int step = 0; step < 5; ++step) optimizer.Apply(updates, 0.01f);
    std::vector<float> all;
    for (const Parameter& parameter : parameters) {
      const std::vector<float> values = ValuesOf(parameter.value);
      all.insert(all.end(), values.begin(), values.end());
    }
    omp_set_num_threads(before);
    return all;
  };
  const std::vector<float> one = weights(1);
  for (int repetition = 0; repetition < 5; ++repetition) EXPECT_TRUE(one == weights(4));
}

TEST(GaloreTest, ScratchIsABlockAThreadOrTheSquareOfTheSmallerSide) {
  const auto bytes = [](const Shape& shape, int threads, bool all_threads) {
    return ScratchBytesOf("galore", {}, shape, threads, all_threads);
  };
  const int64_t pad = int64_t{8} << 20;  // more than oneDNN asks for, for one thread
  for (const Shape& shape : {Shape{4096, 4096}, Shape{1024, 512}, Shape{512, 1024}}) {
    SCOPED_TRACE(shape.ToString());
    const int64_t side = std::min(shape[0], shape[1]);
    const int64_t refresh = 4 * (side * side + 128 * side);
    EXPECT_GE(bytes(shape, 1, true), refresh);
    EXPECT_LE(bytes(shape, 1, true), refresh + pad);
    EXPECT_EQ(bytes(shape, 8, false), bytes(shape, 1, true));
    EXPECT_LE(
        bytes(shape, 64, true),
        std::max(refresh, 4 * (shape.size() + 128 * std::max(shape[0], shape[1]))) + 64 * pad);
  }
}

TEST(GaloreTest, RefusesWhatItCannotServe) {
  Parameter parameter;
  parameter.value.shape = {70};
  EXPECT_EQ(MessageOf([&] { MakeRule("galore", {})->State(parameter); }),
            "galore serves matrices only");
  EXPECT_EQ(MessageOf([] {
              MakeRule("galore", {{"rank", 0.5}});
            }),
            "galore: rank = 0.5 has to be a whole number");
  EXPECT_EQ(MessageOf([] {
              MakeRule("galore", {{"period", 2.5}});
            }),
            "galore: period = 2.5 has to be a whole number");
}

TEST(GaloreTest, ThePolicyServesHiddenMatrices) {
  for (const PolicyEntry& entry : PolicyNamed("galore").entries) {
    const bool hidden =
        entry.population == Population::kAttention || entry.population == Population::kDenseFfn ||
        entry.population == Population::kSharedExpert || entry.population == Population::kExpert;
    EXPECT_EQ(entry.rule, hidden ? "galore" : "adamw") << NameOf(entry.population);
  }
}

// --- Eigenvectors ---
std::vector<float> Leading(PlainMatrix symmetric, int64_t count) {
  const int64_t size = symmetric.rows;
  std::vector<float> matrix(symmetric.values.begin(), symmetric.values.end());
  for (int64_t i = 0; i < size; ++i) {
    for (int64_t j = 0; j < i; ++j) matrix[i * size + j] = NAN;  // is not read
  }
  std::vector<float> vectors(count * size);
  const ExactScratch work(EigenvectorWorkBytes(size, count));
  LeadingEigenvectors(matrix.data(), size, count, vectors.data(),
                      static_cast<std::byte*>(work.data));
  return vectors;
}

TEST(EigenvectorsTest, AreThoseOfJacobisRotations) {
  for (const int64_t size : {1, 2, 5, 40, 97}) {
    const PlainMatrix g(size, size + 3, Gradient({size, size + 3}, 1));
    const PlainMatrix symmetric = g * Transposed(g);
    for (const int64_t count : {int64_t{1}, std::min<int64_t>(size, 6)}) {
      SCOPED_TRACE(fmt::format("{} of {}", count, size));
      const PlainMatrix expected = LeadingRows(symmetric, count);
      const std::vector<float> actual = Leading(symmetric, count);
      for (int64_t i = 0; i < count * size; ++i) ASSERT_NEAR(actual[i], expected.values[i], 1e-4);
    }
  }
}

TEST(EigenvectorsTest, AreABasisWhereEigenvaluesAreEqual) {
  constexpr int64_t kSize = 50;
  PlainMatrix identity(kSize, kSize), ones(kSize, kSize), zero(kSize, kSize);
  for (int64_t i = 0; i < kSize; ++i) identity(i, i) = 3;
  for (double& value : ones.values) value = 1;
  for (const PlainMatrix& symmetric : {identity, ones, zero}) {
    for (const int64_t count : {int64_t{7}, kSize}) {
      const PlainMatrix vectors(count, kSize, Leading(symmetric, count));
      const PlainMatrix products = vectors * Transposed(vectors);
      for (int64_t i = 0; i < count; ++i) {
        for (int64_t j = 0; j < count; ++j) ASSERT_NEAR(products(i, j), i == j, 1e-5);
      }
    }
  }
}

}  // namespace
}  // namespace terrace
