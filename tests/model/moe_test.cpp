// Identities of mixtures of experts, and the situations that break them.
#include <numeric>

#include "model/harness.h"

namespace terrace {
namespace {

// A single MoE layer whose attention adds nothing: x -> x + moe(norm(x)).
ModelConfig OneLayer() {
  ModelConfig config = SmallConfig();
  config.layers = 1;
  config.ffn = {FeedForwardKind::kMoe};
  config.norm = NormKind::kLayerNorm;
  return config;
}

void Silence(TestModel& model, const std::string& name) {
  const TensorView value = model.Value(name);
  std::memset(value.data, 0, value.bytes());
}

// The input of the first block and its output, f32 [N * D].
struct BlockRun {
  std::vector<float> x, out;
  LayerRouting routing;
};
BlockRun RunBlock(TestModel& model, const Pass& pass) {
  const Arena::Frame frame(model.arena());
  BlockRun run;
  std::unique_ptr<Block::Saved> saved;
  const TensorView x = model->Embed(pass);
  const TensorView out = model->blocks()[0]->Forward(pass, x, saved, &run.routing);
  run.x.assign(x.span<float>().begin(), x.span<float>().end());
  run.out.assign(out.span<float>().begin(), out.span<float>().end());
  return run;
}

bool AllFinite(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(),
                     [](float value) { return std::isfinite(value); });
}

int64_t Sum(const std::vector<int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

// The feed-forward of a row y[D] by formula, for expert prefix "layers.0.ff.experts.E".
std::vector<double> ExpertOutput(TestModel& model, const std::string& prefix,
                                 const std::vector<double>& y) {
  const TensorView gate_proj = model.Value(prefix + ".gate_proj.weight");
  const TensorView up_proj = model.Value(prefix + ".up_proj.weight");
  const TensorView down_proj = model.Value(prefix + ".down_proj.weight");
  const int64_t width = gate_proj.columns(), ffn_width = gate_proj.rows();
  std::vector<double> out(width);
  for (int64_t f = 0; f < ffn_width; ++f) {
    double gate = 0, up = 0;
    for (int64_t d = 0; d < width; ++d) {
      gate += ElementAt(gate_proj, f * width + d) * y[d];
      up += ElementAt(up_proj, f * width + d) * y[d];
    }
    const double h = gate / (1 + std::exp(-gate)) * up;
    for (int64_t d = 0; d < width; ++d) out[d] += ElementAt(down_proj, d * ffn_width + f) * h;
  }
  return out;
}

// The MoE layer as a plain loop over tokens and experts.
std::vector<float> LoopedMoe(TestModel& model, const std::vector<float>& x) {
  const ModelConfig& config = model->config();
  const int64_t width = config.width, experts = config.experts;
  const TensorView norm_weight = model.Value("layers.0.norm2.weight");
  const TensorView norm_bias = model.Value("layers.0.norm2.bias");
  const TensorView router = model.Value("layers.0.ff.router.weight");
  std::vector<float> out;
  for (size_t first = 0; first < x.size(); first += width) {
    double mean = 0, variance = 0;
    for (int64_t d = 0; d < width; ++d) mean += x[first + d] / static_cast<double>(width);
    for (int64_t d = 0; d < width; ++d) {
      variance += (x[first + d] - mean) * (x[first + d] - mean) / static_cast<double>(width);
    }
    std::vector<double> y(width), logits(experts);
    for (int64_t d = 0; d < width; ++d) {
      y[d] = (x[first + d] - mean) / std::sqrt(variance + config.norm_epsilon) *
                 ElementAt(norm_weight, d) +
             ElementAt(norm_bias, d);
    }
    for (int64_t e = 0; e < experts; ++e) {
      for (int64_t d = 0; d < width; ++d) logits[e] += ElementAt(router, e * width + d) * y[d];
    }
    std::vector<int64_t> order(experts);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return logits[a] > logits[b]; });
    order.resize(config.router.top_k);
    double total = 0;
    for (int64_t e : order) total += std::exp(logits[e]);
    std::vector<double> sum(width);
    for (int64_t e : order) {
      const auto expert = ExpertOutput(model, fmt::format("layers.0.ff.experts.{}", e), y);
      for (int64_t d = 0; d < width; ++d) sum[d] += std::exp(logits[e]) / total * expert[d];
    }
    for (int64_t d = 0; d < width; ++d) out.push_back(static_cast<float>(x[first + d] + sum[d]));
  }
  return out;
}

class MoeTest : public ModelTest {
 protected:
  // Sends every token to the experts in the order of `scores`, highest first: the normalized
  // input has one constant component, which alone the router reads.
  static void Steer(TestModel& model, const std::vector<float>& scores) {
    const int64_t width = model->config().width;
    std::vector<float> weight(width, 1.0f), bias(width, 0.0f), router(scores.size() * width);
    weight[0] = 0;
    bias[0] = 1;
    for (size_t e = 0; e < scores.size(); ++e) router[e * width] = scores[e];
    model.Set("layers.0.norm2.weight", weight);
    model.Set("layers.0.norm2.bias", bias);
    model.Set("layers.0.ff.router.weight", router);
  }
};

TEST_P(MoeTest, OneExpertEqualsTheDenseFeedForward) {
  ModelConfig moe_config = OneLayer();
  moe_config.experts = moe_config.router.top_k = 1;
  moe_config.expert_width = moe_config.ffn_width;
  ModelConfig dense_config = moe_config;
  dense_config.ffn = {FeedForwardKind::kDense};
  TestModel moe(moe_config, GetParam()), dense(dense_config, GetParam());
  moe.Randomize(1, 0.3);
  const auto dense_name = [](std::string name) {
    const size_t found = name.find("experts.0.");
    if (found != std::string::npos) name.erase(found, std::strlen("experts.0."));
    return name;
  };
  for (const Parameter& parameter : moe->parameters()) {
    if (parameter.population == Population::kRouter) continue;
    const TensorView value = dense.Value(dense_name(parameter.name));
    std::memcpy(value.data, parameter.value.data, value.bytes());
  }
  HostBatch batch = RandomBatch(moe_config, 2, 6, 3);
  Pass pass = PassOf(batch);
  pass.balance_scale = 0;
  EXPECT_LE(RelativeError(RunBlock(moe, pass).out, RunBlock(dense, pass).out), 1e-6);

  TestSink moe_sink, dense_sink;
  moe.Step(pass, moe_sink);
  dense.Step(pass, dense_sink);
  for (const auto& [name, gradient] : moe_sink.gradients) {
    if (name.find("router") != std::string::npos) {
      EXPECT_EQ(Norm(gradient), 0) << "a single expert leaves nothing to choose";
      continue;
    }
    EXPECT_LE(RelativeError(gradient, dense_sink.gradients.at(dense_name(name))), 1e-5) << name;
  }
}

TEST_P(MoeTest, PermutedEqualsLooped) {
  for (const int64_t top_k : {1, 2, 3, 5}) {
    ModelConfig config = OneLayer();
    config.router.top_k = top_k;
    TestModel model(config, GetParam());
    model.Randomize(20 + top_k, 0.3);
    Silence(model, "layers.0.attn.out_proj.weight");
    HostBatch batch = RandomBatch(config, 3, 7, 5);
    const BlockRun run = RunBlock(model, PassOf(batch));
    EXPECT_LE(RelativeError(run.out, LoopedMoe(model, run.x)), 1e-5);
    EXPECT_GT(RelativeError(run.out, run.x), 0.1) << "the experts add something";
  }
}

TEST_P(MoeTest, RecomputationIsBitwiseTheSame) {
  ModelConfig config = OneLayer();
  config.router.noise_scale = 1;
  TestModel model(config, GetParam());
  model.Randomize(2, 0.3);
  HostBatch batch = RandomBatch(config, 2, 8, 1);
  Pass pass = PassOf(batch);
  pass.training = true;
  pass.noise_key = 5;
  const BlockRun first = RunBlock(model, pass), again = RunBlock(model, pass);
  EXPECT_EQ(first.out, again.out);
  EXPECT_EQ(first.routing.counts, again.routing.counts);

  TestSink sink, sink_again;
  model.Step(pass, sink);
  model.Step(pass, sink_again);
  EXPECT_EQ(sink.gradients, sink_again.gradients);

  // Another key, or no training: other noise, or none.
  pass.noise_key = 6;
  EXPECT_NE(RunBlock(model, pass).out, first.out);
  pass.training = false;
  const BlockRun quiet = RunBlock(model, pass);
  pass.noise_key = 5;
  EXPECT_EQ(RunBlock(model, pass).out, quiet.out);
  EXPECT_NE(quiet.out, first.out);
}

// Layers draw different noise from one key.
TEST_P(MoeTest, NoiseDiffersBetweenLayers) {
  ModelConfig config = OneLayer();
  config.layers = 2;
  config.router.noise_scale = 1;
  TestModel model(config, GetParam());
  model.Randomize(2, 0.3);
  for (const char* layer : {"0", "1"})
    Silence(model, fmt::format("layers.{}.ff.router.weight", layer));
  HostBatch batch = RandomBatch(config, 2, 8, 1);
  Pass pass = PassOf(batch);
  pass.training = true;
  const Losses losses = model.Forward(pass);
  EXPECT_NE(losses.routings[0].counts, losses.routings[1].counts);
}

TEST_P(MoeTest, ZeroRouterTakesTheFirstExpertsAlways) {
  ModelConfig config = OneLayer();
  config.router.top_k = 3;
  TestModel model(config, GetParam());
  model.Randomize(3, 0.3);
  Silence(model, "layers.0.ff.router.weight");
  Silence(model, "layers.0.attn.out_proj.weight");
  HostBatch batch = RandomBatch(config, 2, 8, 1);
  const BlockRun run = RunBlock(model, PassOf(batch)), again = RunBlock(model, PassOf(batch));
  EXPECT_EQ(run.routing.counts, (std::vector<int64_t>{16, 16, 16, 0, 0}));
  EXPECT_EQ(run.out, again.out);
  EXPECT_LE(RelativeError(run.out, LoopedMoe(model, run.x)), 1e-5);
  // E * sum of (1 / E) * fraction = 1, logsumexp = log(E).
  EXPECT_NEAR(run.routing.statistics.aux_loss, config.router.aux_coefficient, 1e-6);
  EXPECT_NEAR(run.routing.statistics.z_loss,
              config.router.z_coefficient * std::pow(std::log(5.0), 2), 1e-6);
  EXPECT_NEAR(run.routing.statistics.entropy, std::log(5.0), 1e-5);
}

TEST_P(MoeTest, LogitsThatAreNotFiniteRouteToDistinctExperts) {
  const float nan = std::nanf(""), inf = INFINITY;
  // Router scores of the five experts, and where two choices must go.
  const struct {
    std::vector<float> scores;
    std::vector<int64_t> counts;
  } cases[] = {
      {{nan, 1, nan, 0, nan}, {0, 16, 0, 16, 0}},
      {{nan, nan, nan, nan, nan}, {16, 16, 0, 0, 0}},
      {{nan, nan, nan, nan, -inf}, {16, 0, 0, 0, 16}},
      {{0, inf, 0, 0, inf}, {0, 16, 0, 0, 16}},
      {{-inf, -inf, -inf, -inf, -inf}, {16, 16, 0, 0, 0}},
      {{inf, inf, inf, inf, inf}, {16, 16, 0, 0, 0}},
      {{0, 1, -inf, inf, nan}, {0, 16, 0, 16, 0}},
  };
  for (const auto& [scores, counts] : cases) {
    SCOPED_TRACE(testing::PrintToString(scores));
    // On the operation itself: in the model 0 * inf is NaN for every expert at once.
    ModelConfig config = OneLayer();
    Arena arena(int64_t{1} << 20);
    const std::unique_ptr<Backend> backend = GetParam().make(arena);
    const int64_t n = 16, e = 5, k = 2;
    const auto f32 = [&](Shape shape) {
      return arena.Allocate(Memory::kActivations, DType::kF32, shape, "f32");
    };
    const auto i64 = [&](Shape shape) {
      return arena.Allocate(Memory::kActivations, DType::kI64, shape, "i64");
    };
    const TensorView logits = f32({n, e});
    for (int64_t i = 0; i < n * e; ++i) SetElement(logits, i, scores[i % e]);
    HostBatch batch = RandomBatch(config, 2, 8, 1);
    Routing routing;
    routing.probabilities = f32({n, e});
    routing.log_sums = f32({n});
    routing.experts = arena.Allocate(Memory::kActivations, DType::kI32, {n, k}, "experts");
    routing.weights = f32({n, k});
    routing.token_rows = i64({n, k});
    routing.row_tokens = i64({n * k});
    routing.row_weights = f32({n * k});
    routing.offsets = i64({e + 1});
    routing.fractions = f32({e});
    std::vector<int64_t> counted(e);
    const RouterStatistics statistics = backend->Route(config.router, std::nullopt, logits, {},
                                                       batch.View().targets, routing, counted);
    EXPECT_EQ(counted, counts);
    EXPECT_TRUE(std::isfinite(statistics.aux_loss));
    for (int64_t i = 0; i < n * k; i += k) {
      const float first = routing.weights.as<float>()[i],
                  second = routing.weights.as<float>()[i + 1];
      EXPECT_NEAR(first + second, 1, 1e-6);
      EXPECT_GE(second, 0);
      EXPECT_NE(routing.experts.as<int32_t>()[i], routing.experts.as<int32_t>()[i + 1]);
    }
    const TensorView drow_weights = f32({n * k}), dlogits = f32({n, e});
    for (int64_t i = 0; i < n * k; ++i) SetElement(drow_weights, i, 1.0 + static_cast<double>(i));
    backend->RouteBackward(config.router, routing, batch.View().targets, drow_weights, 1, dlogits);
    const auto slopes = dlogits.span<float>();
    EXPECT_TRUE(AllFinite({slopes.begin(), slopes.end()}));
  }
}

// NaN that reaches the router through the model: a wrong loss, but no wild memory access.
TEST_P(MoeTest, NanInTheRouterIsContained) {
  for (const float value : {std::nanf(""), INFINITY, -INFINITY}) {
    TestModel model(OneLayer(), GetParam());
    model.Randomize(4, 0.3);
    const TensorView router = model.Value("layers.0.ff.router.weight");
    for (int64_t i = 0; i < router.columns(); ++i) router.as<float>()[i] = value;
    HostBatch batch = RandomBatch(OneLayer(), 2, 8, 1);
    TestSink sink;
    const Losses losses = model.Step(PassOf(batch), sink);
    EXPECT_TRUE(std::isfinite(losses.tokens));
    EXPECT_EQ(Sum(losses.routings[0].counts), 2 * 16);
  }
}

TEST_P(MoeTest, ExpertsWithoutTokensAreSkipped) {
  const struct {
    std::vector<float> scores;
    std::vector<int64_t> busy;
  } cases[] = {
      {{-9, 1, 2, 3, 4}, {3, 4}},   // not the first
      {{4, 3, 2, 1, -9}, {0, 1}},   // not the last
      {{-9, 1, 9, 1, -9}, {1, 2}},  // neither
  };
  for (const int64_t top_k : {1, 2}) {
    for (const auto& [scores, busy] : cases) {
      ModelConfig config = OneLayer();
      config.router.top_k = top_k;
      TestModel model(config, GetParam());
      model.Randomize(5, 0.3);
      Silence(model, "layers.0.attn.out_proj.weight");
      Steer(model, scores);
      HostBatch batch = RandomBatch(config, 2, 8, 1);
      const Pass pass = PassOf(batch);
      const BlockRun run = RunBlock(model, pass);
      EXPECT_LE(RelativeError(run.out, LoopedMoe(model, run.x)), 1e-5);

      TestSink sink;
      model.Step(pass, sink);
      int64_t with_gradient = 0;
      for (const Parameter& parameter : model->parameters()) {
        if (parameter.population != Population::kExpert) {
          EXPECT_FALSE(sink.skips.contains(parameter.name));
          continue;
        }
        const bool has_tokens = run.routing.counts[parameter.expert] > 0;
        with_gradient += has_tokens;
        if (has_tokens && top_k == 2) {
          EXPECT_TRUE(std::count(busy.begin(), busy.end(), parameter.expert)) << parameter.name;
        }
        EXPECT_EQ(sink.gradients.contains(parameter.name), has_tokens) << parameter.name;
        EXPECT_EQ(sink.skips.contains(parameter.name), !has_tokens) << parameter.name;
      }
      EXPECT_EQ(with_gradient, 3 * top_k);
      for (const auto& [name, gradient] : sink.gradients) EXPECT_TRUE(AllFinite(gradient)) << name;
    }
  }
}

// One call on several micro-batches, of which an expert sees tokens in some only.
TEST_P(MoeTest, ExpertIdleInOneMicroBatchOnly) {
  TestModel model(OneLayer(), GetParam());
  model.Randomize(6, 0.5);
  HostBatch first = RandomBatch(OneLayer(), 1, 1, 1), second = RandomBatch(OneLayer(), 1, 1, 2);
  std::vector<Pass> passes = {PassOf(first), PassOf(second)};
  TestSink together, apart;
  const Losses losses = model.Run(passes, &together);
  ASSERT_NE(losses.routings[0].counts, losses.routings[1].counts);
  for (const Pass& pass : passes) model.Step(pass, apart);
  ExpectGradientsNear(together, apart, 1e-5);
  for (const Parameter& parameter : model->parameters()) {
    if (parameter.population != Population::kExpert) continue;
    const bool busy = losses.routings[0].counts[parameter.expert] > 0 ||
                      losses.routings[1].counts[parameter.expert] > 0;
    EXPECT_EQ(together.skips.contains(parameter.name), !busy);
    EXPECT_EQ(together.ends.contains(parameter.name), busy);
  }
}

TEST_P(MoeTest, PaddingDoesNotCountInBalance) {
  const ModelConfig config = SmallConfig();
  TestModel model(config, GetParam());
  model.Randomize(7, 0.3);
  HostBatch batch = RandomBatch(config, 2, 8, 1);
  for (const int64_t n : {5, 6, 7, 15}) batch.targets[n] = kIgnoredTarget;
  TestSink sink;
  const Losses losses = model.Step(PassOf(batch), sink);
  EXPECT_EQ(losses.routings[0].statistics.tokens, 12);
  EXPECT_EQ(Sum(losses.routings[0].counts), 12 * config.router.top_k);

  // Other padding at the sequences' ends, where nothing attends to it: nothing changes.
  for (const int64_t n : {5, 6, 7, 15}) batch.inputs[n] = (batch.inputs[n] + 7) % 23;
  TestSink other_sink;
  const Losses other = model.Step(PassOf(batch), other_sink);
  EXPECT_EQ(other.routings[0].counts, losses.routings[0].counts);
  EXPECT_NEAR(other.tokens, losses.tokens, 1e-6);
  EXPECT_NEAR(other.balance, losses.balance, 1e-9);
  for (const auto& [name, gradient] : sink.gradients) {
    const auto found = other_sink.gradients.find(name);
    // Only padding reached the expert, so its gradient is zero, one way or the other.
    if (found == other_sink.gradients.end()) {
      EXPECT_EQ(Norm(gradient), 0) << name;
    } else {
      EXPECT_LE(RelativeError(found->second, gradient), 1e-5) << name;
    }
  }
}

TEST_P(MoeTest, NothingButPadding) {
  TestModel model(SmallConfig(), GetParam());
  model.Randomize(7, 0.3);
  HostBatch batch = RandomBatch(SmallConfig(), 2, 8, 1);
  std::fill(batch.targets.begin(), batch.targets.end(), kIgnoredTarget);
  TestSink sink;
  const Losses losses = model.Step(PassOf(batch), sink);
  EXPECT_EQ(losses.tokens, 0);
  EXPECT_EQ(losses.balance, 0);
  EXPECT_EQ(Sum(losses.routings[0].counts), 0);
  for (const auto& [name, gradient] : sink.gradients) EXPECT_EQ(Norm(gradient), 0) << name;
}

TEST_P(MoeTest, CountsAreExact) {
  const ModelConfig config = SmallConfig();
  TestModel model(config, GetParam());
  model.Randomize(8, 0.3);
  HostBatch batch = RandomBatch(config, 3, 9, 1);
  const Losses losses = model.Forward(PassOf(batch));
  ASSERT_EQ(losses.routings.size(), 1);
  EXPECT_EQ(losses.routings[0].layer, 1);
  EXPECT_EQ(Sum(losses.routings[0].counts), 27 * config.router.top_k);
  for (int64_t count : losses.routings[0].counts) EXPECT_LE(count, 27);
}

// Balance pulls at the router when tokens leave it alone, towards fewer tokens of busy experts.
TEST_P(MoeTest, AuxiliaryLossReachesTheRouter) {
  ModelConfig config = OneLayer();
  config.router.z_coefficient = 0;
  TestModel model(config, GetParam());
  model.Randomize(9, 0.3);
  HostBatch batch = RandomBatch(config, 2, 8, 1);
  Pass pass = PassOf(batch);
  pass.loss_scale = 0;
  TestSink sink;
  const Losses before = model.Step(pass, sink);
  const std::vector<float>& gradient = sink.gradients.at("layers.0.ff.router.weight");
  EXPECT_GT(Norm(gradient), 1e-4);
  const TensorView router = model.Value("layers.0.ff.router.weight");
  for (size_t i = 0; i < gradient.size(); ++i) router.as<float>()[i] -= 0.1f * gradient[i];
  EXPECT_LT(model.Forward(pass).balance, before.balance);

  pass.balance_scale = 0;
  TestSink silent;
  model.Step(pass, silent);
  EXPECT_EQ(Norm(silent.gradients.at("layers.0.ff.router.weight")), 0);
}

TERRACE_ON_ALL_BACKENDS(MoeTest);

}  // namespace
}  // namespace terrace
