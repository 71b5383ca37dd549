#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <set>

#include "support/kernel_fixture.h"

namespace terrace {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct RouteCase {
  int64_t tokens, experts, top_k;
};
// Counts and sums are made per block of 128 tokens.
constexpr RouteCase kCases[] = {{0, 4, 2},   {1, 1, 1},    {5, 3, 3},     {7, 2, 1},
                                {129, 8, 2}, {300, 33, 4}, {256, 16, 15}, {1000, 130, 8}};

// Four logits whose order and ties tell a wrong comparison.
constexpr float kOddRows[][4] = {
    {0, 0, 0, 0},
    {kNan, kNan, kNan, kNan},
    {kNan, -kInfinity, kNan, -kInfinity},
    {kNan, 1, kNan, 2},
    {1, kNan, 1, kNan},
    {kInfinity, kInfinity, kInfinity, kInfinity},
    {-kInfinity, -kInfinity, -kInfinity, -kInfinity},
    {0, kInfinity, 0, kInfinity},
    {-kInfinity, 0, kInfinity, kNan},
    {kInfinity, kNan, -kInfinity, 3e38f},
    {1, -kInfinity, -kInfinity, -kInfinity},
    {3e38f, -3e38f, 3e38f, -3e38f},
    {-3e38f, -3e38f, -3e38f, kNan},
    {1, 2, 2, 1},
    {-0.0f, 0.0f, -0.0f, 0.0f},
};

class RouteTest : public KernelTest {
 protected:
  std::optional<uint64_t> noise_key_ = 5;

  Routing NewRouting(const RouteCase& c) {
    const int64_t n = c.tokens, e = c.experts, k = c.top_k;
    return {New(DType::kF32, {n, e}, "probabilities"), New(DType::kF32, {n}, "log_sums"),
            New(DType::kI32, {n, k}, "experts"),       New(DType::kF32, {n, k}, "weights"),
            New(DType::kI64, {n, k}, "token_rows"),    New(DType::kI64, {n * k}, "row_tokens"),
            New(DType::kF32, {n * k}, "row_weights"),  New(DType::kI64, {e + 1}, "offsets"),
            New(DType::kF32, {e}, "fractions")};
  }

  // Every `ignored_every`-th token is ignored; 0 for none.
  TensorView Targets(int64_t tokens, int64_t ignored_every) {
    const TensorView targets = Indices(DType::kI32, {tokens}, 100, "targets");
    for (int64_t n = 0; n < tokens; ++n) {
      if (ignored_every != 0 && n % ignored_every == 0) {
        targets.as<int32_t>()[n] = kIgnoredTarget;
      }
    }
    return targets;
  }

  static RouterConfig Config(const RouteCase& c, bool normalize) {
    return {.top_k = c.top_k,
            .normalize_weights = normalize,
            .aux_coefficient = 0.05f,
            .z_coefficient = 1e-3f};
  }

  // Routes on both backends, compares all that comes out, and returns this backend's routing.
  Routing CheckRoute(const RouterConfig& config, const RouteCase& c, const TensorView& logits,
                     const TensorView& targets, const TensorView& selection_bias = {}) {
    SCOPED_TRACE(testing::Message()
                 << c.tokens << " tokens, top " << c.top_k << " of " << c.experts);
    const Routing actual = NewRouting(c), expected = NewRouting(c);
    const TensorView logits_expected = CopyOf(logits);
    std::vector<int64_t> counts(c.experts, 77), counts_expected(c.experts, 77);
    const RouterStatistics s =
        cpu_.Route(config, noise_key_, logits, selection_bias, targets, actual, counts);
    const RouterStatistics s_expected = reference_.Route(
        config, noise_key_, logits_expected, selection_bias, targets, expected, counts_expected);

    EXPECT_TRUE(Near(logits, logits_expected, RoundingOf(DType::kF32, 0)));
    EXPECT_TRUE(SameBytes(actual.experts, expected.experts));
    EXPECT_TRUE(SameBytes(actual.token_rows, expected.token_rows));
    EXPECT_TRUE(SameBytes(actual.row_tokens, expected.row_tokens));
    EXPECT_TRUE(SameBytes(actual.offsets, expected.offsets));
    EXPECT_EQ(counts, counts_expected);
    // Logits of size g move exp(logit - top) by a relative g * 2^-24.
    const double growth = std::min(MaxAbs(logits), 100.0);
    Tolerance tolerance = RoundingOf(DType::kF32, 0, c.experts);
    tolerance.relative *= 1 + growth;
    tolerance.absolute = 1e-37;
    EXPECT_TRUE(Near(actual.probabilities, expected.probabilities, tolerance));
    EXPECT_TRUE(Near(actual.weights, expected.weights, tolerance));
    EXPECT_TRUE(Near(actual.row_weights, expected.row_weights, tolerance));
    EXPECT_TRUE(Near(actual.log_sums, expected.log_sums, RoundingOf(DType::kF32, growth)));
    EXPECT_TRUE(SameBytes(actual.fractions, expected.fractions));
    EXPECT_EQ(s.tokens, s_expected.tokens);
    EXPECT_NEAR(s.aux_loss, s_expected.aux_loss, 1e-6 * s_expected.aux_loss);
    EXPECT_NEAR(s.z_loss, s_expected.z_loss, 1e-5 * s_expected.z_loss);
    EXPECT_NEAR(s.entropy, s_expected.entropy, 1e-5 * (1 + s_expected.entropy));
    return actual;
  }

  void CheckBackward(const RouterConfig& config, const RouteCase& c, const Routing& routing,
                     const TensorView& targets, float loss_scale) {
    const TensorView dweights = Normals(DType::kF32, {c.tokens * c.top_k}, "drow_weights");
    const TensorView dlogits = New(DType::kF32, {c.tokens, c.experts}, "dlogits");
    const TensorView expected = New(DType::kF32, dlogits.shape);
    cpu_.RouteBackward(config, routing, targets, dweights, loss_scale, dlogits);
    reference_.RouteBackward(config, routing, targets, dweights, loss_scale, expected);
    const double balance =
        std::abs(loss_scale) * (config.aux_coefficient * static_cast<double>(c.experts) +
                                2 * config.z_coefficient * MaxAbs(routing.log_sums));
    EXPECT_TRUE(
        Near(dlogits, expected, RoundingOf(DType::kF32, 2 * MaxAbs(dweights) + balance, c.experts)))
        << c.tokens << " tokens, top " << c.top_k << " of " << c.experts;
  }
};
INSTANTIATE_KERNEL_TEST(RouteTest);

TEST_P(RouteTest, MatchesTheReference) {
  for (const RouteCase& c : kCases) {
    for (const bool normalize : {false, true}) {
      for (const int64_t ignored_every : {0, 3, 1}) {
        const RouterConfig config = Config(c, normalize);
        const TensorView logits = Normals(DType::kF32, {c.tokens, c.experts}, "logits");
        const TensorView targets = Targets(c.tokens, ignored_every);
        const Routing routing = CheckRoute(config, c, logits, targets);
        for (const float loss_scale : {0.0f, 1.0f, -0.25f}) {
          CheckBackward(config, c, routing, targets, loss_scale);
        }
      }
    }
  }
}

TEST_P(RouteTest, NoiseIsAddedInPlaceAndKeyed) {
  const RouteCase c{200, 32, 2};
  RouterConfig config = Config(c, true);
  config.noise_scale = 0.5f;
  noise_key_ = 123456789;
  const TensorView logits = Normals(DType::kF32, {c.tokens, c.experts}, "logits");
  const TensorView clean = CopyOf(logits), again = CopyOf(logits), other = CopyOf(logits);
  const TensorView targets = Targets(c.tokens, 0);
  CheckRoute(config, c, logits, targets);
  EXPECT_FALSE(Near(logits, clean, {.absolute = 0.01}));
  std::vector<int64_t> counts(c.experts);
  cpu_.Route(config, noise_key_, again, {}, targets, NewRouting(c), counts);
  EXPECT_TRUE(SameBytes(again, logits));
  noise_key_ = 987654321;
  cpu_.Route(config, noise_key_, other, {}, targets, NewRouting(c), counts);
  EXPECT_FALSE(Near(other, logits, {.absolute = 0.01}));
}

TEST_P(RouteTest, LogitsOfZeroChooseTheFirstExperts) {
  const RouteCase c{130, 32, 3};
  const TensorView logits = New(DType::kF32, {c.tokens, c.experts}, "logits");
  cpu_.Zero(logits);
  const TensorView targets = Targets(c.tokens, 0);
  const Routing routing = CheckRoute(Config(c, true), c, logits, targets);
  for (int64_t i = 0; i < routing.experts.size(); ++i) {
    EXPECT_EQ(routing.experts.as<int32_t>()[i], i % 3);
    EXPECT_FLOAT_EQ(routing.weights.as<float>()[i], 1.0f / 3.0f);
  }
  CheckBackward(Config(c, true), c, routing, targets, 1.0f);
}

// Experts without tokens: the first, the last, all but one.
TEST_P(RouteTest, IdleExpertsHaveNoRows) {
  const RouteCase c{50, 8, 1};
  for (const auto& [lowest, highest] : {std::pair{1, 7}, {0, 6}, {3, 3}}) {
    const TensorView logits = Normals(DType::kF32, {c.tokens, c.experts}, "logits");
    for (int64_t i = 0; i < logits.size(); ++i) {
      const int64_t expert = i % c.experts;
      if (expert < lowest || expert > highest) logits.as<float>()[i] -= 1000.0f;
    }
    const TensorView targets = Targets(c.tokens, 0);
    const Routing routing = CheckRoute(Config(c, true), c, logits, targets);
    const int64_t* offsets = routing.offsets.as<int64_t>();
    EXPECT_EQ(offsets[lowest], 0);
    EXPECT_EQ(offsets[highest + 1], c.tokens);
    CheckBackward(Config(c, true), c, routing, targets, 1.0f);
  }
}

TEST_P(RouteTest, AnyLogitsGiveDistinctExpertsAndFiniteValues) {
  constexpr int64_t kTokens = std::ssize(kOddRows);
  for (int64_t top_k = 1; top_k <= 4; ++top_k) {
    // 4 experts, and 20 of which the others are NaN: whole vectors and remainders.
    for (const int64_t experts : {4, 20}) {
      const RouteCase c{kTokens, experts, top_k};
      for (const bool normalize : {false, true}) {
        const TensorView logits = New(DType::kF32, {kTokens, experts}, "logits");
        std::fill_n(logits.as<float>(), logits.size(), kNan);
        for (int64_t n = 0; n < kTokens; ++n) {
          std::copy_n(kOddRows[n], 4, logits.as<float>() + n * experts);
        }
        const TensorView targets = Targets(kTokens, 0);
        const Routing routing = CheckRoute(Config(c, normalize), c, logits, targets);
        for (int64_t n = 0; n < kTokens; ++n) {
          const int32_t* chosen = routing.experts.as<int32_t>() + n * top_k;
          const std::set<int32_t> distinct(chosen, chosen + top_k);
          EXPECT_EQ(std::ssize(distinct), top_k) << "row " << n;
          EXPECT_GE(*distinct.begin(), 0);
          EXPECT_LT(*distinct.rbegin(), experts);
          double sum = 0;
          for (int64_t e = 0; e < experts; ++e) {
            sum += ElementAt(routing.probabilities, n * experts + e);
          }
          EXPECT_NEAR(sum, 1.0, 1e-6) << "row " << n;
        }
        CheckBackward(Config(c, normalize), c, routing, targets, 0.0f);
      }
    }
  }
}

TEST_P(RouteTest, IgnoredTokensAreRoutedButNotCounted) {
  const RouteCase c{20, 4, 2};
  const TensorView logits = Normals(DType::kF32, {c.tokens, c.experts}, "logits");
  const TensorView targets = Targets(c.tokens, 0);
  for (int64_t n = 10; n < 20; ++n) targets.as<int32_t>()[n] = kIgnoredTarget;
  const Routing routing = NewRouting(c);
  std::vector<int64_t> counts(c.experts), first_counts(c.experts);
  const RouterStatistics all =
      cpu_.Route(Config(c, true), noise_key_, logits, {}, targets, routing, counts);
  EXPECT_EQ(routing.offsets.as<int64_t>()[c.experts], 40);
  EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), int64_t{0}), 20);

  // As if the ignored tokens were not there.
  const RouteCase half{10, 4, 2};
  const RouterStatistics first = cpu_.Route(Config(c, true), noise_key_, logits.Rows(0, 10), {},
                                            targets.Rows(0, 10), NewRouting(half), first_counts);
  EXPECT_EQ(counts, first_counts);
  EXPECT_EQ(all.tokens, first.tokens);
  EXPECT_DOUBLE_EQ(all.aux_loss, first.aux_loss);
  EXPECT_DOUBLE_EQ(all.z_loss, first.z_loss);
  EXPECT_DOUBLE_EQ(all.entropy, first.entropy);
}

TEST_P(RouteTest, OtherScoresMatchTheReference) {
  for (const RouteCase& c : kCases) {
    for (const RouterScore score : {RouterScore::kSigmoid, RouterScore::kSqrtSoftplus}) {
      for (const bool normalize : {false, true}) {
        for (const bool biased : {false, true}) {
          RouterConfig config = Config(c, normalize);
          config.score = score;
          config.scaling_factor = 1.5f;
          const TensorView logits = Normals(DType::kF32, {c.tokens, c.experts}, "logits");
          const TensorView targets = Targets(c.tokens, 3);
          const TensorView bias =
              biased ? Normals(DType::kF32, {c.experts}, "selection_bias") : TensorView{};
          const Routing routing = CheckRoute(config, c, logits, targets, bias);
          CheckBackward(config, c, routing, targets, 0.5f);
        }
      }
    }
  }
}

// However far apart logits are, a token's combine weights are those of a distribution, and
// gradients are finite.
TEST_P(RouteTest, OtherScoresOfOddLogitsAreFinite) {
  const RouteCase c{std::ssize(kOddRows), 4, 2};
  for (const RouterScore score : {RouterScore::kSigmoid, RouterScore::kSqrtSoftplus}) {
    for (const bool biased : {false, true}) {
      RouterConfig config = Config(c, true);
      config.score = score;
      const TensorView logits = New(DType::kF32, {c.tokens, c.experts}, "logits");
      std::memcpy(logits.data, kOddRows, sizeof(kOddRows));
      const TensorView bias =
          biased ? Normals(DType::kF32, {c.experts}, "selection_bias") : TensorView{};
      const TensorView targets = Targets(c.tokens, 0);
      const Routing routing = NewRouting(c);
      std::vector<int64_t> counts(c.experts);
      cpu_.Route(config, std::nullopt, logits, bias, targets, routing, counts);
      for (int64_t n = 0; n < c.tokens; ++n) {
        const float* weights = routing.weights.as<float>() + n * c.top_k;
        EXPECT_NEAR(weights[0] + weights[1], 1, 1e-6) << n;
        const int32_t* chosen = routing.experts.as<int32_t>() + n * c.top_k;
        EXPECT_NE(chosen[0], chosen[1]);
      }
      const TensorView dweights = Normals(DType::kF32, {c.tokens * c.top_k}, "drow_weights");
      const TensorView dlogits = New(DType::kF32, {c.tokens, c.experts}, "dlogits");
      cpu_.RouteBackward(config, routing, targets, dweights, 1, dlogits);
      for (const float value : dlogits.span<float>()) EXPECT_TRUE(std::isfinite(value));
    }
  }
}

// The gradient of the two load-balancing losses, by differences of the losses themselves.
TEST_P(RouteTest, BalanceGradientsAreThoseOfTheLosses) {
  const RouteCase c{6, 5, 2};
  RouterConfig config = Config(c, true);
  config.aux_coefficient = 0.7f;
  config.z_coefficient = 0.3f;
  const TensorView logits = Normals(DType::kF32, {c.tokens, c.experts}, "logits");
  const TensorView targets = Targets(c.tokens, 3);
  const Routing routing = NewRouting(c);
  std::vector<int64_t> counts(c.experts);
  const auto loss = [&] {
    const RouterStatistics s = cpu_.Route(config, noise_key_, logits, {}, targets, routing, counts);
    return s.aux_loss + s.z_loss;
  };
  loss();
  const TensorView dweights = New(DType::kF32, {c.tokens * c.top_k});
  cpu_.Zero(dweights);
  const TensorView dlogits = New(DType::kF32, {c.tokens, c.experts});
  cpu_.RouteBackward(config, routing, targets, dweights, 2.0f, dlogits);
  for (int64_t i = 0; i < logits.size(); ++i) {
    constexpr float kStep = 1e-2f;
    float& logit = logits.as<float>()[i];
    const float before = logit;
    logit = before + kStep;
    const double above = loss();
    logit = before - kStep;
    const double below = loss();
    logit = before;
    EXPECT_NEAR(dlogits.as<float>()[i], 2.0 * (above - below) / (2.0 * kStep), 1e-4) << i;
  }
}

TEST_P(RouteTest, ResultsDoNotDependOnTheNumberOfThreads) {
  const RouteCase c{3000, 40, 3};
  const TensorView logits = Normals(DType::kF32, {c.tokens, c.experts});
  const TensorView targets = Targets(c.tokens, 7);
  RouterConfig config = Config(c, true);
  config.noise_scale = 0.1f;
  std::vector<int64_t> counts(c.experts);
  ExpectSameForAnyThreads([&] {
    const TensorView sums = New(DType::kI64, {3});
    const RouterStatistics s =
        cpu_.Route(config, noise_key_, CopyOf(logits), {}, targets, NewRouting(c), counts);
    sums.as<int64_t>()[0] = std::bit_cast<int64_t>(s.aux_loss);
    sums.as<int64_t>()[1] = std::bit_cast<int64_t>(s.z_loss);
    sums.as<int64_t>()[2] = std::bit_cast<int64_t>(s.entropy);
    return sums;
  });
  ExpectSameForAnyThreads([&] {
    const Routing routing = NewRouting(c);
    cpu_.Route(config, noise_key_, CopyOf(logits), {}, targets, routing, counts);
    return routing.row_tokens;
  });
}

TEST_P(RouteTest, DryRunsTakeTheSameScratchAndCountNothing) {
  ExpectDryTakesTheSame([](CpuBackend& backend) {
    const RouteCase c{300, 8, 2};
    const auto allocate = [&](DType dtype, Shape shape) {
      const TensorView view =
          backend.arena().Allocate(Memory::kActivations, dtype, shape, "tensor");
      backend.Zero(view);
      return view;
    };
    const Routing routing = {allocate(DType::kF32, {300, 8}), allocate(DType::kF32, {300}),
                             allocate(DType::kI32, {300, 2}), allocate(DType::kF32, {300, 2}),
                             allocate(DType::kI64, {300, 2}), allocate(DType::kI64, {600}),
                             allocate(DType::kF32, {600}),    allocate(DType::kI64, {9}),
                             allocate(DType::kF32, {8})};
    const TensorView logits = allocate(DType::kF32, {300, 8});
    const TensorView targets = allocate(DType::kI32, {300});
    std::vector<int64_t> counts(8, 77);
    const RouterStatistics s =
        backend.Route(Config(c, true), std::nullopt, logits, {}, targets, routing, counts);
    EXPECT_EQ(s.tokens, backend.dry() ? 0 : 300);
    EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), int64_t{0}), backend.dry() ? 0 : 600);
    backend.RouteBackward(Config(c, true), routing, targets, allocate(DType::kF32, {600}), 1.0f,
                          logits);
  });
}

TEST_P(RouteTest, ImpossibleShapesAreRefused) {
  const RouteCase c{6, 4, 2};
  const TensorView logits = Normals(DType::kF32, {6, 4}), targets = Targets(6, 0);
  std::vector<int64_t> counts(4), short_counts(3);
  EXPECT_THROW(
      cpu_.Route(Config(c, true), noise_key_, logits, {}, targets, NewRouting(c), short_counts),
      InternalError);
  EXPECT_THROW(
      cpu_.Route(Config({6, 4, 5}, true), noise_key_, logits, {}, targets, NewRouting(c), counts),
      InternalError);
  EXPECT_THROW(
      cpu_.Route(Config({6, 4, 0}, true), noise_key_, logits, {}, targets, NewRouting(c), counts),
      InternalError);
  EXPECT_THROW(
      cpu_.Route(Config(c, true), noise_key_, logits, {}, Targets(5, 0), NewRouting(c), counts),
      InternalError);
}

}  // namespace
}  // namespace terrace
