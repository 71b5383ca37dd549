// Trajectories of reference implementations (optimizers.json) for all rules but those of
// reference_test.cpp.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "optim/rule_testing.h"
#include "support/temporary_folder.h"

namespace terrace {
namespace {

// How the settings of a reference are called here; those left out have no counterpart.
struct Reference {
  std::string_view optimizer;
  std::string_view rule;
  int cases;
  double absolute;  // tolerance
  double relative;  // likewise, of the largest change from the initial weights
  Settings fixed;   // what the reference does without having a setting for it
  std::map<std::string_view, std::string_view> names;
};

void PrintTo(const Reference& reference, std::ostream* out) { *out << reference.optimizer; }

const std::vector<Reference>& References() {
  static const std::vector<Reference> references = {
      {"lion", "lion", 2, 1e-6, 0, {}, {{"beta1", "beta1"}, {"beta2", "beta2"}}},
      {"sage", "sage", 2, 1e-6, 0, {}, {{"beta1", "beta1"}, {"beta2", "beta2"}, {"eps", "eps"}}},
      {"sinkgd",
       "sinkgd",
       2,
       0,
       1e-4,
       {},
       {{"scale", "scale"}, {"iterations", "iterations"}, {"eps", "eps"}}},
      {"mesh/expert",
       "sinkgd",
       2,
       0,
       1e-4,
       {{"momentum", "hidden_f32"}},
       {{"scale", "scale"}, {"iterations", "iterations"}, {"eps", "eps"}, {"hidden_beta", "beta"}}},
      {"muon",
       "muon",
       6,
       1e-5,
       0,
       {{"precision", "f32"}},
       {{"momentum", "beta"},
        {"ns_steps", "ns_steps"},
        {"nesterov", "nesterov"},
        {"scale", "scale"}}},
      {"adafactor",
       "adafactor",
       2,
       1e-6,
       0,
       {},
       {{"decay_rate", "decay_rate"}, {"eps", "eps"}, {"clip_threshold", "clip_threshold"}}},
  };
  return references;
}

SettingValue ValueOf(const nlohmann::json& value) {
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_string()) return value.get<std::string>();
  return value.get<double>();
}

class BaselinesReferenceTest : public testing::TestWithParam<Reference> {};

TEST_P(BaselinesReferenceTest, TrajectoriesMatch) {
  const Reference& reference = GetParam();
  std::ifstream file(TestData() / "optimizers.json");
  const nlohmann::json json = nlohmann::json::parse(file);
  int cases = 0;
  for (const auto& entry : json["cases"]) {
    if (entry["optimizer"].get<std::string>() != reference.optimizer) continue;
    ++cases;
    const auto& hyper = entry["hyper"];
    Settings settings = reference.fixed;
    for (const auto& [theirs, ours] : reference.names) {
      settings[std::string(ours)] = ValueOf(hyper[std::string(theirs)]);
    }
    const std::vector<int64_t> dims = entry["shape"];
    const Shape shape{std::span<const int64_t>(dims)};
    SCOPED_TRACE(shape.ToString());
    RuleBench bench(reference.rule, settings, hyper.value("weight_decay", 0.0f), shape);
    const auto initial = entry["w0"].get<std::vector<float>>();
    Fill(bench.weight(), initial);
    bench.context().learning_rate = hyper["lr"];
    for (size_t step = 0; step < entry["grads"].size(); ++step) {
      bench.SetGradient(entry["grads"][step].get<std::vector<float>>());
      bench.Step();
      const auto expected = entry["weights"][step].get<std::vector<float>>();
      const std::vector<float> actual = ValuesOf(bench.weight());
      double change = 0, difference = 0;
      for (size_t i = 0; i < expected.size(); ++i) {
        change = std::max<double>(change, std::abs(expected[i] - initial[i]));
        difference = std::max<double>(difference, std::abs(expected[i] - actual[i]));
      }
      EXPECT_GT(change, 1e-4);
      EXPECT_LE(difference, reference.absolute + reference.relative * change) << "step " << step;
    }
  }
  EXPECT_EQ(cases, reference.cases);
}

INSTANTIATE_TEST_SUITE_P(All, BaselinesReferenceTest, testing::ValuesIn(References()),
                         [](const auto& test) {
                           std::string name(test.param.optimizer);
                           std::replace(name.begin(), name.end(), '/', '_');
                           return name;
                         });

}  // namespace
}  // namespace terrace
