#include "optim/optimizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "optim/accumulate_sink.h"
#include "optim/release_sink.h"
#include "optim/rule_testing.h"
#include "support/message_of.h"

namespace terrace {
namespace {

using testing::HasSubstr;

Parameter& Add(Parameters& parameters, const std::string& name, Population population, Shape shape,
               DType dtype = DType::kBF16) {
  Parameter& parameter = parameters.emplace_back();
  parameter.name = name;
  parameter.population = population;
  parameter.id = static_cast<int64_t>(parameters.size()) - 1;
  parameter.value = {nullptr, dtype, shape, parameter.name.c_str()};
  return parameter;
}

// The 6.78 B-parameter model: two layers, the second with 128 experts. Data is never touched.
Parameters LargeModel() {
  using enum Population;
  constexpr int64_t kWidth = 4096;
  Parameters parameters;
  Add(parameters, "tokens", kEmbedding, {50304, kWidth});
  Add(parameters, "positions", kEmbedding, {256, kWidth});
  for (int layer = 0; layer < 2; ++layer) {
    for (const char* name : {"norm1", "norm2"}) {
      Add(parameters, std::string(name) + ".weight", kNorm, {kWidth}, DType::kF32);
      Add(parameters, std::string(name) + ".bias", kNorm, {kWidth}, DType::kF32);
    }
    Add(parameters, "q", kAttention, {kWidth, kWidth});
    Add(parameters, "k", kAttention, {1024, kWidth});
    Add(parameters, "v", kAttention, {1024, kWidth});
    Add(parameters, "out", kAttention, {kWidth, kWidth});
    const int experts = layer == 0 ? 1 : 128;
    for (int expert = 0; expert < experts; ++expert) {
      for (const char* name : {"gate_proj", "up_proj", "down_proj"}) {
        Add(parameters, name, layer == 0 ? kDenseFfn : kExpert, {4096, kWidth});
      }
    }
    if (layer == 1) Add(parameters, "router", kRouter, {128, kWidth}, DType::kF32);
  }
  Add(parameters, "norm.weight", kNorm, {kWidth}, DType::kF32);
  Add(parameters, "norm.bias", kNorm, {kWidth}, DType::kF32);
  return parameters;
}

TEST(StateBytesTest, EqualThePublishedFigures) {
  const Parameters parameters = LargeModel();
  int64_t count = 0;
  for (const Parameter& parameter : parameters) count += parameter.value.size();
  ASSERT_EQ(count, 6784327680);

  const StateBytes skewadam = StateBytesOf(PolicyNamed("skewadam"), parameters);
  EXPECT_EQ(skewadam.total, 1380800000);
  EXPECT_EQ(skewadam.by_population[static_cast<int>(Population::kRouter)], 4 * 524288);

  const auto bytes = [&](std::string_view name) {
    return StateBytesOf(PolicyNamed(name), parameters).total;
  };
  EXPECT_EQ(bytes("adamw"), 54274621440);
  EXPECT_EQ(bytes("lion"), 27137310720);
  // Ablations, by data alone.
  EXPECT_EQ(bytes("skewadam-expert-momentum"), 27150603776);
  EXPECT_EQ(bytes("skewadam-factored-router"), 1378719744);
  // Of 6,784,327,680 - 128 * 3 * 4096^2 - 524,288 backbone parameters, the momentum alone is less:
  // 2 bytes instead of 4; or 1 and a scale of 4 bytes for each 256, all rows being multiples.
  const int64_t backbone = count - int64_t{128} * 3 * 4096 * 4096 - 524288;
  EXPECT_EQ(bytes("skewadam-bf16-momentum"), skewadam.total - 2 * backbone);
  EXPECT_EQ(bytes("skewadam-int8-momentum"), skewadam.total - 3 * backbone + 4 * backbone / 256);
  // The same for experts, without the router. Rows have 4096 columns.
  EXPECT_EQ(bytes("skewadam-expert-int8"),
            bytes("skewadam-int8-momentum") + (count - backbone - 524288) * 260 / 256);
  EXPECT_EQ(bytes("skewadam-expert-f32"), bytes("skewadam-expert-momentum"));
  // Norms and the router keep float32.
  const int64_t wide = 10 * 4096 + 524288;
  EXPECT_EQ(bytes("adamw8bit"), 8 * wide + 2 * (count - wide) + 2 * 4 * (count - wide) / 256);
  // The expert momentum, the router's too, and its second moment by rows and columns.
  EXPECT_EQ(bytes("skewadam-uniform"),
            27150603776 - 4 * 128 * 4096 + 4 * (128 * 4096 + 128 + 4096));
}

// What a parameter of an expert costs under `release`, where its gradient does not stay: 2 bytes of
// weight and what its momentum takes, as a state or as a hidden buffer.
TEST(StateBytesTest, BytesOfAMomentum) {
  struct Case {
    const char* momentum;
    double bytes;
  };
  const Case cases[] = {{"none", 2}, {"int8", 3 + 4.0 / 256}, {"bf16", 4},
                        {"f32", 6},  {"hidden_bf16", 4},      {"hidden_f32", 6}};
  Parameters parameters;
  for (const char* name : {"gate_proj", "up_proj", "down_proj"}) {
    Add(parameters, name, Population::kExpert, {4096, 4096});
  }
  const int64_t count = 3 * 4096 * 4096;
  for (const auto& [rule, hidden, row_and_column] :
       {std::tuple("sinkgd", true, 0.0), {"muon", true, 0.0}, {"skewadam", false, 1.0}}) {
    for (const auto& [momentum, bytes] : cases) {
      if (!hidden && std::string_view(momentum).starts_with("hidden")) continue;
      SCOPED_TRACE(fmt::format("{} {}", rule, momentum));
      PolicyEntry entry{.population = Population::kExpert, .rule = rule};
      entry.settings = {{"momentum", momentum}};
      Arena arena = Arena::Dry();
      const Optimizer optimizer({.name = "test", .entries = {entry}}, parameters, arena, 1);
      int64_t held = count * BytesOf(DType::kBF16);
      for (const TensorView& view : optimizer.state()) held += view.bytes();
      // Of skewadam a float a row and a column.
      EXPECT_DOUBLE_EQ(static_cast<double>(held) / static_cast<double>(count),
                       bytes + row_and_column * 8 / 4096);
    }
  }
}

// What README and `terrace policies` say of budgets: bytes an expert's parameter of bfloat16 costs
// under `release`, the few of rows, columns and scales aside.
TEST(StateBytesTest, ReadyPoliciesKeepToTheirBudgets) {
  std::map<std::string_view, int64_t> budgets = {
      {"mesh-stateless", 2}, {"mesh-bf16-buffer", 4}, {"mesh", 6}, {"muon", 6}, {"muon-hidden", 6}};
  for (const ReadyPolicy& policy : ReadyPolicies()) {
    // "for 3 bytes a parameter: ..."
    if (policy.summary.substr(5).starts_with(" bytes a parameter:")) {
      budgets[policy.name] = policy.summary[4] - '0';
    }
  }
  EXPECT_EQ(budgets.size(), 10u);
  Parameters parameters;
  Add(parameters, "expert", Population::kExpert, {4096, 4096});
  const double count = 4096 * 4096;
  for (const auto& [name, budget] : budgets) {
    Arena arena = Arena::Dry();
    const Optimizer optimizer(PolicyNamed(name), parameters, arena, 1);
    double bytes = 2 * count;
    for (const TensorView& view : optimizer.state()) bytes += static_cast<double>(view.bytes());
    EXPECT_GE(bytes / count, static_cast<double>(budget)) << name;
    EXPECT_LT(bytes / count, static_cast<double>(budget) + 0.02) << name;
  }
}

TEST(StateBytesTest, AreWhatTheOptimizerAllocatesInADryArena) {
  const Parameters parameters = LargeModel();
  for (std::string_view name : PolicyNames()) {
    const Policy policy = PolicyNamed(name);
    Arena arena = Arena::Dry();
    const Optimizer optimizer(policy, parameters, arena, 1);
    int64_t bytes = 0, buffer_bytes = 0;
    for (const TensorView& view : optimizer.state()) bytes += view.bytes();
    for (const Parameter& parameter : parameters) {
      const TensorView buffer = optimizer.HiddenBuffer(parameter);
      if (!buffer.empty()) buffer_bytes += buffer.bytes();
    }
    EXPECT_EQ(bytes - buffer_bytes, StateBytesOf(policy, parameters).total);
    const auto& held = arena.ledger().current_bytes;
    EXPECT_GE(held[static_cast<int>(Memory::kOptimizer)], bytes - buffer_bytes);
    EXPECT_GE(held[static_cast<int>(Memory::kGradients)], buffer_bytes);
    EXPECT_EQ(arena.ledger().total_bytes, held[static_cast<int>(Memory::kOptimizer)] +
                                              held[static_cast<int>(Memory::kGradients)]);
  }
}

// A selection bias, say: no rule serves it, no sink has a buffer for it, and no step is due to it.
TEST(UntrainedTest, HasNeitherStateNorGradient) {
  Policy policy = PolicyNamed("adamw");
  std::erase_if(policy.entries,
                [](const PolicyEntry& entry) { return entry.population == Population::kRouter; });
  Parameters parameters;
  Add(parameters, "weight", Population::kAttention, {4, 8}, DType::kF32);
  Add(parameters, "bias", Population::kRouter, {4}, DType::kF32).contributions = 0;
  EXPECT_EQ(StateBytesOf(policy, parameters).total, 2 * 4 * 32);

  Arena arena(1 << 20);
  for (Parameter& parameter : parameters) {
    parameter.value.data =
        arena.Allocate(Memory::kWeights, DType::kF32, parameter.value.shape, "value").data;
    std::fill_n(parameter.value.as<float>(), parameter.value.size(), 1.0f);
  }
  Optimizer optimizer(policy, parameters, arena, 1);
  const auto step = [&](StepSink& sink) {
    sink.BeginStep(1, 0.1f);
    do {
      const GradientSlot slot = sink.Begin(parameters[0]);
      std::fill_n(slot.view.as<float>(), slot.view.size(), 1.0f);
      sink.End(parameters[0], slot);
    } while (sink.AnotherPass());
    return sink.Finish();
  };
  AccumulateSink accumulate(parameters, optimizer, arena, DType::kF32, {});
  Arena weight_alone = Arena::Dry();
  weight_alone.Allocate(Memory::kGradients, DType::kF32, {4, 8}, "weight");
  const auto gradients = static_cast<size_t>(Memory::kGradients);
  EXPECT_EQ(arena.ledger().current_bytes[gradients],
            weight_alone.ledger().current_bytes[gradients]);
  EXPECT_EQ(step(accumulate).skipped_tensors, 0);
  ReleaseSink release(parameters, optimizer, arena, DType::kF32, {});
  EXPECT_EQ(step(release).updated_tensors, 1);
  EXPECT_NE(parameters[0].value.as<float>()[0], 1.0f);
  EXPECT_EQ(parameters[1].value.as<float>()[0], 1.0f);
  EXPECT_EQ(optimizer.steps()[1], 0);
  accumulate.BeginStep(1, 0.1f);
  EXPECT_THROW(accumulate.Skip(parameters[1]), InternalError);
}

std::string MessageOfPolicy(const Policy& policy) {
  Parameters parameters;
  Add(parameters, "layers.0.router.weight", Population::kRouter, {4, 8});
  return MessageOf([&] {
    StateBytesOf(policy, parameters);
    Arena arena = Arena::Dry();
    Optimizer optimizer(policy, parameters, arena, 1);
  });
}

TEST(PolicyTest, ErrorsNameThePopulation) {
  EXPECT_EQ(MessageOfPolicy(PolicyNamed("skewadam")), "");
  Policy policy = PolicyNamed("skewadam");
  std::erase_if(policy.entries,
                [](const PolicyEntry& entry) { return entry.population == Population::kRouter; });
  EXPECT_EQ(MessageOfPolicy(policy),
            "policy skewadam: population router has no rule; layers.0.router.weight needs one");
  policy.entries.push_back({.population = Population::kRouter, .rule = "skewadan"});
  EXPECT_EQ(MessageOfPolicy(policy),
            "policy skewadam: population router: no rule is called skewadan, did you mean "
            "skewadam?");
  policy.entries.back() = {
      .population = Population::kRouter, .rule = "adamw", .settings = {{"beta1", 2.0}}};
  EXPECT_EQ(MessageOfPolicy(policy),
            "policy skewadam: population router: adamw: beta1 = 2 is not within 0 .. 0.9999999");
  policy.entries.back() = {.population = Population::kNorm, .rule = "skewadam"};
  EXPECT_EQ(MessageOfPolicy(policy), "policy skewadam: population norm has two rules");
}

// A model of all kinds of tensors with data, in an arena of its own.
struct SmallModel {
  Arena arena{int64_t{64} << 20};
  Parameters parameters;
  std::vector<TensorView> gradients;

  SmallModel() {
    using enum Population;
    Add(parameters, "embedding", kEmbedding, {90, 40});
    Add(parameters, "norm", kNorm, {40}, DType::kF32);
    Add(parameters, "router", kRouter, {3, 40}, DType::kF32);
    for (const char* name : {"expert.0", "expert.1", "expert.2"}) {
      Add(parameters, name, kExpert, {70, 40});
    }
    for (Parameter& parameter : parameters) {
      const Shape shape = parameter.value.shape;
      parameter.value =
          arena.Allocate(Memory::kWeights, parameter.value.dtype, shape, parameter.name.c_str());
      Fill(parameter.value, RandomValues(shape.size(), 0.5, parameter.id));
      gradients.push_back(arena.Allocate(Memory::kGradients, DType::kF32, shape, "gradient"));
      Fill(gradients.back(), RandomValues(shape.size(), 0.01, 100 + parameter.id));
    }
  }

  std::vector<Update> Updates() const {
    std::vector<Update> updates;
    for (const Parameter& parameter : parameters) {
      updates.push_back({&parameter, gradients[parameter.id], 0.5f});
    }
    return updates;
  }
};

TEST(OptimizerTest, NamesItsStateByParameter) {
  SmallModel model;
  const Optimizer optimizer(PolicyNamed("skewadam"), model.parameters, model.arena, 1);
  std::vector<std::string> names;
  for (const TensorView& view : optimizer.state()) {
    names.push_back(view.name);
    for (float value : ValuesOf(view)) ASSERT_EQ(value, 0) << view.name;
  }
  EXPECT_THAT(names,
              testing::ElementsAre("embedding.momentum", "embedding.row_second_moment",
                                   "embedding.column_second_moment", "norm.momentum",
                                   "norm.second_moment", "router.second_moment",
                                   "expert.0.row_second_moment", "expert.0.column_second_moment",
                                   "expert.1.row_second_moment", "expert.1.column_second_moment",
                                   "expert.2.row_second_moment", "expert.2.column_second_moment"));
}

TEST(OptimizerTest, SideBySideEqualsOneAfterAnother) {
  for (std::string_view name : PolicyNames()) {
    SmallModel together, single;
    Optimizer a(PolicyNamed(name), together.parameters, together.arena, 1);
    Optimizer b(PolicyNamed(name), single.parameters, single.arena, 1);
    for (int step = 0; step < 3; ++step) {
      const PopulationReports reports = a.Apply(together.Updates(), 0.01f);
      PopulationReports sums{};
      for (const Update& update : single.Updates()) {
        const UpdateReport report = b.Apply(update, 0.01f);
        sums[static_cast<int>(update.parameter->population)].entries += report.entries;
      }
      for (int p = 0; p < kPopulations; ++p) EXPECT_EQ(reports[p].entries, sums[p].entries);
    }
    for (size_t i = 0; i < together.parameters.size(); ++i) {
      EXPECT_EQ(ValuesOf(together.parameters[i].value), ValuesOf(single.parameters[i].value));
    }
  }
}

// Tensors past the size that one thread updates alone take another path.
TEST(OptimizerTest, LargeTensorsInABatchOfUpdates) {
  Arena arena(int64_t{64} << 20);
  Parameters parameters;
  for (const char* name : {"large", "same"}) {
    Add(parameters, name, Population::kExpert, {2050, 2049});
    parameters.back().value = arena.Allocate(Memory::kWeights, DType::kBF16, {2050, 2049},
                                             parameters.back().name.c_str());
    std::memset(parameters.back().value.data, 0, parameters.back().value.bytes());
  }
  const TensorView gradient =
      arena.Allocate(Memory::kGradients, DType::kF32, {2050, 2049}, "gradient");
  Fill(gradient, std::vector<float>(gradient.size(), 0.25f));
  Optimizer optimizer(PolicyNamed("skewadam"), parameters, arena, 1);
  const Update updates[] = {{&parameters[0], gradient, 1}, {&parameters[1], gradient, 1}};
  const PopulationReports reports = optimizer.Apply(updates, 0.5f);
  EXPECT_EQ(reports[static_cast<int>(Population::kExpert)].entries, 2 * 2049);
  // The first update without momentum is g / |g|: exactly -lr, which bfloat16 holds... up to the
  // last bits of float32, which may round either way.
  for (const Parameter& parameter : parameters) {
    for (float w : ValuesOf(parameter.value)) ASSERT_NEAR(w, -0.5f, 0x1p-9f);
  }
}

TEST(OptimizerTest, EachTensorCountsItsOwnSteps) {
  SmallModel model;
  Optimizer optimizer(PolicyNamed("skewadam"), model.parameters, model.arena, 1);
  const std::vector<Update> updates = model.Updates();
  for (int step = 0; step < 5; ++step) optimizer.Apply(updates[1], 0.01f);
  const std::vector<float> before = ValuesOf(model.parameters[3].value);
  optimizer.Apply(updates[3], 0.01f);
  EXPECT_EQ(optimizer.steps()[1], 5);
  EXPECT_EQ(optimizer.steps()[3], 1);
  EXPECT_EQ(optimizer.steps()[4], 0);

  // The late tensor's first update is a first update: as in an optimizer of its own.
  SmallModel fresh;
  Optimizer other(PolicyNamed("skewadam"), fresh.parameters, fresh.arena, 1);
  other.Apply(fresh.Updates()[3], 0.01f);
  EXPECT_EQ(ValuesOf(model.parameters[3].value), ValuesOf(fresh.parameters[3].value));
  EXPECT_NE(ValuesOf(model.parameters[3].value), before);
}

TEST(OptimizerTest, RestoredStateContinuesBitForBit) {
  SmallModel straight, resumed;
  Optimizer a(PolicyNamed("adamw"), straight.parameters, straight.arena, 1);
  Optimizer b(PolicyNamed("adamw"), resumed.parameters, resumed.arena, 1);
  for (int step = 0; step < 3; ++step) a.Apply(straight.Updates(), 0.01f);
  for (size_t i = 0; i < a.state().size(); ++i) {
    std::memcpy(b.state()[i].data, a.state()[i].data, a.state()[i].bytes());
  }
  std::copy(a.steps().begin(), a.steps().end(), b.steps().begin());
  for (size_t i = 0; i < straight.parameters.size(); ++i) {
    const TensorView from = straight.parameters[i].value;
    std::memcpy(resumed.parameters[i].value.data, from.data, from.bytes());
  }
  a.Apply(straight.Updates(), 0.01f);
  b.Apply(resumed.Updates(), 0.01f);
  for (size_t i = 0; i < straight.parameters.size(); ++i) {
    EXPECT_EQ(ValuesOf(straight.parameters[i].value), ValuesOf(resumed.parameters[i].value));
  }
}

TEST(OptimizerTest, SettingsOfAPopulationApply) {
  SmallModel model;
  Policy policy = PolicyNamed("skewadam");
  for (PolicyEntry& entry : policy.entries) {
    if (entry.population == Population::kNorm) entry.lr_multiplier = 0;
  }
  Optimizer optimizer(policy, model.parameters, model.arena, 1);
  const std::vector<float> norm = ValuesOf(model.parameters[1].value);
  const std::vector<float> router = ValuesOf(model.parameters[2].value);
  optimizer.Apply(model.Updates(), 0.01f);
  EXPECT_EQ(ValuesOf(model.parameters[1].value), norm);
  EXPECT_NE(ValuesOf(model.parameters[2].value), router);
}

// Equal tensors with equal gradients round differently, and so do two steps, two seeds.
TEST(OptimizerTest, RoundingDiffersByTensorStepAndSeed) {
  const auto weights = [](uint64_t seed, int64_t step, int64_t expert) {
    SmallModel model;
    Optimizer optimizer(PolicyNamed("skewadam"), model.parameters, model.arena, seed);
    const Parameter& parameter = model.parameters[3 + expert];
    Fill(parameter.value, RandomValues(70 * 40, 0.5, 7));
    Fill(model.gradients[parameter.id], std::vector<float>(70 * 40));
    optimizer.steps()[parameter.id] = step;
    optimizer.Apply({&parameter, model.gradients[parameter.id], 1}, 0.01f);
    return ValuesOf(parameter.value);
  };
  EXPECT_EQ(weights(1, 0, 0), weights(1, 0, 0));
  EXPECT_NE(weights(1, 0, 0), weights(1, 0, 1));
  EXPECT_NE(weights(1, 0, 0), weights(1, 1, 0));
  EXPECT_NE(weights(1, 0, 0), weights(2, 0, 0));
}

}  // namespace
}  // namespace terrace
