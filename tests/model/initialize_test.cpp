#include <omp.h>

#include "model/harness.h"

namespace terrace {
namespace {

ModelConfig Config() {
  ModelConfig config = SmallConfig();
  config.vocab_size = 501;  // an odd number of elements, some thousands
  config.width = 36;
  config.norm = NormKind::kLayerNorm;
  config.init_std = 0.05f;
  config.heads = 6;
  config.kv_heads = 3;
  return config;
}

struct Moments {
  double mean = 0, stddev = 0;
};
Moments MomentsOf(const TensorView& value) {
  Moments moments;
  for (int64_t i = 0; i < value.size(); ++i) moments.mean += ElementAt(value, i) / value.size();
  for (int64_t i = 0; i < value.size(); ++i) {
    const double centered = ElementAt(value, i) - moments.mean;
    moments.stddev += centered * centered / value.size();
  }
  moments.stddev = std::sqrt(moments.stddev);
  return moments;
}

TEST(InitializeTest, DistributionOfEveryParameter) {
  TestModel model(Config(), kReference);
  model->Initialize(7);
  for (const Parameter& parameter : model->parameters()) {
    const Moments moments = MomentsOf(parameter.value);
    double stddev = 0.05, mean = 0;
    if (parameter.name.ends_with("out_proj.weight") ||
        parameter.name.ends_with("down_proj.weight")) {
      stddev = 0.05 / 2;  // / sqrt(2 * layers)
    }
    if (parameter.population == Population::kRouter) stddev = 0;
    if (parameter.population == Population::kNorm) {
      stddev = 0;
      mean = parameter.name.ends_with("weight") ? 1 : 0;
    }
    // Five standard errors, and the rounding of the sums.
    const double count = static_cast<double>(parameter.value.size());
    EXPECT_NEAR(moments.mean, mean, 1e-12 + 5 * stddev / std::sqrt(count)) << parameter.name;
    EXPECT_NEAR(moments.stddev, stddev, 1e-12 + 5 * stddev / std::sqrt(2 * count))
        << parameter.name;
  }
  // A normal distribution has a kurtosis of 3, with a standard error of sqrt(24 / n).
  const TensorView table = model.Value("tok_emb.weight");
  const Moments moments = MomentsOf(table);
  double kurtosis = 0;
  for (int64_t i = 0; i < table.size(); ++i) {
    kurtosis += std::pow((ElementAt(table, i) - moments.mean) / moments.stddev, 4) /
                static_cast<double>(table.size());
  }
  EXPECT_NEAR(kurtosis, 3, 5 * std::sqrt(24.0 / static_cast<double>(table.size())));
}

TEST(InitializeTest, DependsOnSeedAndParameterButNotOnThreads) {
  const auto bytes_of = [](uint64_t seed, const std::string& name, int threads) {
    const int before = omp_get_max_threads();
    omp_set_num_threads(threads);
    TestModel model(Config(), kReference);
    model->Initialize(seed);
    omp_set_num_threads(before);
    const TensorView value = model.Value(name);
    return std::vector<std::byte>(value.data, value.data + value.bytes());
  };
  const std::string gate_proj = "layers.1.ff.experts.0.gate_proj.weight",
                    up_proj = "layers.1.ff.experts.0.up_proj.weight";
  EXPECT_EQ(bytes_of(1, "tok_emb.weight", 1), bytes_of(1, "tok_emb.weight", 3));
  EXPECT_NE(bytes_of(1, gate_proj, 1), bytes_of(2, gate_proj, 1));
  EXPECT_NE(bytes_of(1, gate_proj, 1), bytes_of(1, up_proj, 1));
}

TEST(InitializeTest, BFloat16IsTheFloat32Rounded) {
  ModelConfig config = Config();
  TestModel wide(config, kReference);
  config.weight_dtype = DType::kBF16;
  TestModel narrow(config, kReference);
  wide->Initialize(5);
  narrow->Initialize(5);
  for (const Parameter& parameter : wide->parameters()) {
    const TensorView other = narrow.Value(parameter.name);
    const bool kept =
        parameter.population == Population::kNorm || parameter.population == Population::kRouter;
    ASSERT_EQ(other.dtype, kept ? DType::kF32 : DType::kBF16);
    for (int64_t i = 0; i < other.size(); ++i) {
      const float value = parameter.value.as<float>()[i];
      ASSERT_EQ(ElementAt(other, i), kept ? value : ToFloat(ToBF16(value))) << parameter.name;
    }
  }
}

}  // namespace
}  // namespace terrace
