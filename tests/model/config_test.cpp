#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "core/nearest_name.h"
#include "model/harness.h"
#include "model/presets.h"
#include "support/message_of.h"

namespace terrace {
namespace {

struct Wrong {
  void (*change)(ModelConfig& config);
  const char* message;
};

TEST(ModelConfigTest, ImpossibleModelsNameTheKey) {
  SmallConfig().Check();
  constexpr Wrong kWrong[] = {
      {[](ModelConfig& c) { c.kv_heads = 3; },
       "model.kv_heads = 3 does not divide model.heads = 4"},
      {[](ModelConfig& c) { c.kv_heads = 8; },
       "model.kv_heads = 8 does not divide model.heads = 4"},
      {[](ModelConfig& c) { c.width = 18; },
       "model.heads = 4 does not divide model.width = 18, and model.head_width is not given"},
      {[](ModelConfig& c) { c.head_width = 5; },
       "model.head_width = 5 is odd, which model.positions = \"rope\" cannot rotate"},
      {[](ModelConfig& c) { c.vocab_size = 0; },
       "model.vocab_size = 0 is not within 1 .. 2147483647"},
      {[](ModelConfig& c) { c.vocab_size = int64_t{1} << 40; },
       "model.vocab_size = 1099511627776 is not within 1 .. 2147483647"},
      {[](ModelConfig& c) { c.max_positions = -1; },
       "model.max_positions = -1 is not within 1 .. 2147483647"},
      {[](ModelConfig& c) { c.layers = 0; }, "model.layers = 0 is not within 1 .. 65536"},
      {[](ModelConfig& c) { c.heads = 0; }, "model.heads = 0 is not within 1 .. 2147483647"},
      {[](ModelConfig& c) { c.ffn = {}; },
       "model.ffn is empty: it needs at least one of dense, moe"},
      {[](ModelConfig& c) { c.ffn_width = 0; },
       "model.ffn_width = 0, and model.ffn has dense layers"},
      {[](ModelConfig& c) { c.experts = 0; }, "model.experts = 0, and model.ffn has MoE layers"},
      {[](ModelConfig& c) { c.router.top_k = 6; },
       "model.router.top_k = 6 is not within 1 .. model.experts = 5"},
      {[](ModelConfig& c) { c.router.top_k = 0; },
       "model.router.top_k = 0 is not within 1 .. 4194304"},
      {[](ModelConfig& c) {
         c.ffn = {FeedForwardKind::kMoe};
         c.ffn_width = c.expert_width = 0;
       },
       "model.expert_width = 0, and model.ffn_width is not given"},
      {[](ModelConfig& c) {
         c.layers = 60000;
         c.experts = 1000;
       },
       "model.experts = 1000 in 30000 layers are more than 4194304 together"},
      {[](ModelConfig& c) { c.router.aux_coefficient = -1; },
       "model.router.aux_coefficient = -1 is not a finite number of at least 0"},
      {[](ModelConfig& c) { c.router.noise_scale = NAN; },
       "model.router.noise_scale = nan is not a finite number of at least 0"},
      {[](ModelConfig& c) { c.norm_epsilon = 0; },
       "model.norm_epsilon = 0 is not within 1e-30 .. 1"},
      {[](ModelConfig& c) { c.rope_theta = INFINITY; },
       "model.rope_theta = inf is not within 1 .. 1000000000000"},
      {[](ModelConfig& c) { c.heads = c.kv_heads = c.head_width = 1 << 20; },
       "model.heads = 1048576 of width 1048576 are more than 2147483647 together"},
      {[](ModelConfig& c) {
         c.width = c.vocab_size = INT32_MAX;
         c.head_width = 2;
       },
       "the model would have some 9.2e+18 parameters, more than 1e+15"},
      {[](ModelConfig& c) { c.weight_dtype = DType::kI32; },
       "training.precision = \"i32\" is not one of f32, bf16"},
  };
  for (const Wrong& wrong : kWrong) {
    ModelConfig config = SmallConfig();
    wrong.change(config);
    EXPECT_EQ(MessageOf([&] { config.Check(); }), wrong.message);
    // And before anything is allocated.
    Arena arena = Arena::Dry();
    ReferenceBackend backend(arena);
    EXPECT_EQ(MessageOf([&] { Model model(config, backend); }), wrong.message);
    EXPECT_EQ(arena.ledger().total_bytes, 0);
  }
}

TEST(ModelConfigTest, UnusedKeysAreFree) {
  ModelConfig config = SmallConfig();
  config.ffn = {FeedForwardKind::kDense};
  config.experts = 0;
  config.router.top_k = 7;
  config.Check();
  config = SmallConfig();
  config.ffn = {FeedForwardKind::kMoe};
  config.ffn_width = 0;
  config.Check();
  config = SmallConfig();
  config.head_width = 5;
  config.positions = PositionKind::kLearned;
  config.Check();
}

TEST(ModelConfigTest, PopulationsAreThoseOfTheParameters) {
  for (const auto& ffn : {std::vector{FeedForwardKind::kDense}, std::vector{FeedForwardKind::kMoe},
                          std::vector{FeedForwardKind::kDense, FeedForwardKind::kMoe}}) {
    for (const bool tied : {false, true}) {
      ModelConfig config = SmallConfig();
      config.ffn = ffn;
      config.tied_head = tied;
      std::set<Population> present;
      for (const Parameter& parameter : ParametersOf(config)) present.insert(parameter.population);
      for (int i = 0; i < kPopulations; ++i) {
        EXPECT_EQ(config.Has(Population(i)), present.contains(Population(i)))
            << NameOf(Population(i));
      }
    }
  }
}

// Of zeros, every token would go to expert 0: ties go to the lower number.
TEST(ModelConfigTest, RoutersStartAsOtherMatrices) {
  const ModelConfig config = PresetNamed("gpt-moe-tiny");
  for (const Parameter& parameter : ParametersOf(config)) {
    if (parameter.population == Population::kRouter) {
      EXPECT_EQ(parameter.init_std, config.init_std) << parameter.name;
    }
  }
}

TEST(PresetTest, ParameterCounts) {
  EXPECT_EQ(SizeOf(PresetNamed("skewadam-6.78b")).parameters, 6'784'327'680);
  EXPECT_EQ(SizeOf(PresetNamed("moe-110m")).parameters, 110'732'288);
  EXPECT_EQ(SizeOf(PresetNamed("moe-laptop")).parameters, 7'350'528);
  EXPECT_EQ(SizeOf(PresetNamed("gpt-moe-tiny")).parameters, 81'632);
  // Published as 64 more: attention sinks, 8 in each layer, which its forward pass does not use.
  EXPECT_EQ(SizeOf(PresetNamed("nanowhale-110m")).parameters, 110'369'621 - 64);
}

TEST(PresetTest, AllAreSoundAndDistinct) {
  std::set<std::string_view> names;
  for (const Preset& preset : Presets()) {
    EXPECT_TRUE(names.insert(preset.name).second) << preset.name;
    PresetNamed(preset.name).Check();
    EXPECT_FALSE(preset.summary.empty());
  }
  EXPECT_EQ(MessageOf([] { PresetNamed("moe-110"); }),
            "there is no preset \"moe-110\"; the nearest is \"moe-110m\"");
}

// By hand, for d 512 and two MoE layers of 32 experts, of which 2 serve a token.
TEST(ModelSizeTest, ActiveParametersAndFlops) {
  const ModelSize size = SizeOf(PresetNamed("moe-110m"));
  const int64_t embedding = 8192 * 512, positions = 128 * 512, norms = 9 * 2 * 512;
  const int64_t attention = 4 * (2 * 512 * 512 + 2 * 128 * 512);
  const int64_t ffn = 3 * 512 * 1024, router = 32 * 512;
  const int64_t products = embedding + attention + 2 * ffn + 2 * (router + 2 * ffn);
  EXPECT_EQ(size.product_parameters, products);
  EXPECT_EQ(size.active_parameters, products + positions + norms);
  EXPECT_DOUBLE_EQ(size.FlopsPerToken(128), 6.0 * products + 6.0 * 4 * 512 * 128);

  // Untied, the head multiplies and the embedding does not.
  ModelConfig untied = PresetNamed("moe-110m");
  untied.tied_head = false;
  EXPECT_EQ(SizeOf(untied).product_parameters, products);
  EXPECT_EQ(SizeOf(untied).parameters, size.parameters + embedding);
}

TEST(ModelSizeTest, DeclaredParametersAreTheModels) {
  for (const bool tied : {false, true}) {
    ModelConfig config = SmallConfig();
    config.tied_head = tied;
    TestModel model(config, kReference);
    int64_t count = 0, id = 0;
    for (const Parameter& parameter : model->parameters()) {
      EXPECT_EQ(parameter.id, id++);
      EXPECT_STREQ(parameter.value.name, parameter.name.c_str());
      EXPECT_NE(parameter.value.data, nullptr);
      count += parameter.value.size();
    }
    EXPECT_EQ(count, SizeOf(config).parameters);
    EXPECT_EQ(model->Find("tok_emb.weight").contributions, tied ? 2 : 1);
    const Parameter& expert = model->Find("layers.1.ff.experts.4.down_proj.weight");
    EXPECT_EQ(expert.layer, 1);
    EXPECT_EQ(expert.expert, 4);
    EXPECT_EQ(expert.population, Population::kExpert);
  }
}

TEST(ModelTest, UnknownParameterNamesTheNearest) {
  TestModel model(SmallConfig(), kReference);
  EXPECT_EQ(MessageOf([&] { model->Find("layers.0.attn.qproj.weight"); }),
            "the model has no parameter \"layers.0.attn.qproj.weight\"; the nearest is "
            "\"layers.0.attn.q_proj.weight\"");
}

TEST(ModelTest, SequencesBeyondThePositionsAreErrors) {
  TestModel model(SmallConfig(), kReference);
  HostBatch batch = RandomBatch(SmallConfig(), 1, 10, 1);
  EXPECT_EQ(MessageOf([&] { model->Embed(PassOf(batch)); }),
            "sequences of 10 tokens exceed model.max_positions = 9");
}

TEST(NearestNameTest, FewestEdits) {
  EXPECT_EQ(NearestName("widht", {"heads", "width", "with"}), "width");
  EXPECT_EQ(NearestName("a", {"b", "c"}), "b");
  EXPECT_EQ(NearestName("a", {}), "");
}

}  // namespace
}  // namespace terrace
