// Trajectories of reference implementations (optimizers.json), and that the comparison would
// notice subtle errors.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "optim/rule_testing.h"
#include "support/temporary_folder.h"

namespace terrace {
namespace {

constexpr double kTolerance = 1e-6;

struct Case {
  std::string label;
  std::string rule;
  RuleSettings settings;
  double gradient_scale;
  double learning_rate;
  Shape shape;
  std::vector<float> initial;
  std::vector<std::vector<float>> gradients;
  std::vector<std::vector<float>> weights;

  bool Factored() const {
    return rule == "skewadam" && settings.second_moment == SecondMoment::kFactored &&
           shape.rank() == 2;
  }
};

std::vector<Case> ReadCases() {
  std::ifstream file(TestData() / "optimizers.json");
  const nlohmann::json json = nlohmann::json::parse(file);
  std::vector<Case> cases;
  for (const auto& entry : json["cases"]) {
    const std::string optimizer = entry["optimizer"];
    const auto& hyper = entry["hyper"];
    Case c;
    RuleSettings& settings = c.settings;
    c.rule = optimizer.substr(0, optimizer.find('/'));
    if (c.rule == "adamw") {
      settings.second_moment = SecondMoment::kExact;
      settings.rms_clip = 0;
    } else if (c.rule == "skewadam") {
      if (optimizer != "skewadam/backbone") settings.momentum = "none";
      if (optimizer == "skewadam/router") settings.second_moment = SecondMoment::kExact;
      settings.rms_clip = hyper["rms_clip"];
    } else {
      continue;
    }
    settings.beta1 = hyper["beta1"];
    settings.beta2 = hyper["beta2"];
    settings.eps = hyper["eps"];
    settings.weight_decay = hyper["weight_decay"];
    c.learning_rate = hyper["lr"];
    c.gradient_scale = entry["grad_scale"];
    const std::vector<int64_t> dims = entry["shape"];
    c.shape = dims.size() == 2 ? Shape{dims[0], dims[1]} : Shape{dims[0]};
    c.initial = entry["w0"].get<std::vector<float>>();
    c.gradients = entry["grads"].get<std::vector<std::vector<float>>>();
    c.weights = entry["weights"].get<std::vector<std::vector<float>>>();
    c.label = fmt::format("{} {} gradients * {}", optimizer, c.shape.ToString(), c.gradient_scale);
    cases.push_back(std::move(c));
  }
  return cases;
}

double LargestDifference(const Case& c, const std::vector<std::vector<double>>& trajectory) {
  double largest = 0;
  for (size_t step = 0; step < c.weights.size(); ++step) {
    for (size_t i = 0; i < c.weights[step].size(); ++i) {
      largest = std::max(largest, std::abs(trajectory[step][i] - c.weights[step][i]));
    }
  }
  return largest;
}

double DifferenceOfPlainRule(const Case& c, Mutation mutation) {
  const int64_t rows = c.shape[0];
  PlainRule rule(c.rule == "adamw", c.settings, c.learning_rate, rows, c.shape.size() / rows,
                 c.Factored(), mutation);
  std::vector<double> w(c.initial.begin(), c.initial.end());
  std::vector<std::vector<double>> trajectory;
  for (const std::vector<float>& gradient : c.gradients) {
    rule.Step(w, gradient);
    trajectory.push_back(w);
  }
  return LargestDifference(c, trajectory);
}

TEST(ReferenceTest, TrajectoriesMatch) {
  std::set<std::string> seen;
  for (const Case& c : ReadCases()) {
    SCOPED_TRACE(c.label);
    seen.insert(c.label);
    RuleBench bench(c.rule, c.settings, c.shape);
    Fill(bench.weight(), c.initial);
    bench.context().learning_rate = static_cast<float>(c.learning_rate);
    std::vector<std::vector<double>> trajectory;
    for (const std::vector<float>& gradient : c.gradients) {
      Fill(bench.gradient(), gradient);
      bench.Step();
      const std::vector<float> w = ValuesOf(bench.weight());
      trajectory.emplace_back(w.begin(), w.end());
    }
    ASSERT_EQ(trajectory.size(), c.weights.size());
    EXPECT_LE(LargestDifference(c, trajectory), kTolerance);
    EXPECT_LE(DifferenceOfPlainRule(c, Mutation::kNone), kTolerance);
  }
  EXPECT_EQ(seen.size(), 14u);  // 3 tiers x 2 shapes x 2 scales, adamw x 2 shapes
}

TEST(ReferenceTest, ToleranceSeesDecayAfterUpdate) {
  for (const Case& c : ReadCases()) {
    if (c.gradient_scale != 1) continue;
    EXPECT_GT(DifferenceOfPlainRule(c, Mutation::kDecayAfterUpdate), 4 * kTolerance) << c.label;
  }
}

TEST(ReferenceTest, ToleranceSeesAddedEps) {
  for (const Case& c : ReadCases()) {
    if (c.rule != "skewadam" || c.gradient_scale == 1) continue;
    EXPECT_GT(DifferenceOfPlainRule(c, Mutation::kAddedEps), 4 * kTolerance) << c.label;
  }
}

}  // namespace
}  // namespace terrace
