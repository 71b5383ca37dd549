#include "compare/study.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <set>

#include "core/error.h"

namespace terrace {
namespace {

// Runs are folders that begin with the policy's name.
constexpr size_t kLongestName = 100;

// The decimal number that a float is written as: 0.0003, not 0.00030000001424923539.
double Shortest(float value) { return std::stod(fmt::format("{}", value)); }

// A learning rate as it will be used: float32.
double RateOf(const std::string& text, const Policy& policy) {
  const bool multiple = text.ends_with('x');
  const char* end = text.data() + text.size() - (multiple ? 1 : 0);
  double value = 0;
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || rest != end) {
    Fail("--lr {}: neither a learning rate (3e-3) nor a multiple of the policy's own (0.3x)", text);
  }
  if (multiple) value *= Shortest(policy.learning_rate);
  const double rate = Shortest(static_cast<float>(value));
  if (!(rate >= kLearningRates.minimum && rate <= kLearningRates.maximum)) {
    Fail("--lr {}: policy {} would have a learning rate of {}, which is not within {} .. {}", text,
         policy.name, rate, kLearningRates.minimum, kLearningRates.maximum);
  }
  return rate;
}

// With the tables of a file; those of a ready-made policy are known by its name.
StudyPolicy ReadPolicy(const std::string& name) {
  if (!IsPolicyFile(name)) {
    PolicyTablesNamed(name);
    return {.name = name};
  }
  StudyPolicy policy{.name = std::filesystem::path(name).stem().string(),
                     .file = true,
                     .tables = ReadPolicyFile(name)};
  if (policy.name.empty() || policy.name.starts_with('.')) Fail("{}: has no name", name);
  const auto ready = PolicyNames();
  if (std::find(ready.begin(), ready.end(), policy.name) != ready.end()) {
    Fail("{}: {} is a ready-made policy; the file needs another name", name, policy.name);
  }
  if (policy.name.size() > kLongestName ||
      std::any_of(policy.name.begin(), policy.name.end(),
                  [](char c) { return std::iscntrl(static_cast<unsigned char>(c)) != 0; })) {
    Fail("{}: cannot name folders: up to {} bytes, without control characters", name, kLongestName);
  }
  return policy;
}

Policy Resolved(const StudyPolicy& policy, const ModelConfig& model) {
  if (!policy.file) return PolicyNamed(policy.name);
  try {
    return ResolvePolicy(policy.name, policy.tables);
  } catch (const PolicyError& error) {
    throw Error(error.what() + TensorsOf(model, error.population()));
  }
}

std::string BaseOf(const StudyPolicy& policy) {
  return policy.file ? policy.tables.base : PolicyTablesNamed(policy.name).base;
}

const RunResult* Find(const RunResults& results, const RunSpec& run) {
  const auto found = results.find(NameOf(run));
  return found == results.end() ? nullptr : &found->second;
}

}  // namespace

const StudyPolicy& Study::Named(std::string_view name) const {
  for (const StudyPolicy& policy : policies) {
    if (policy.name == name) return policy;
  }
  Fail("the study has no policy {}", name);
}

Study MakeStudy(const RunConfig& base, const StudyRequest& request) {
  Study study{.base = base, .policies = {}, .seeds = request.seeds};
  if (request.policies.empty()) Fail("--policies: name at least one policy");
  if (base.training.eval_interval == 0) {
    Fail("training.eval_interval = 0: policies are compared by their validation loss");
  }
  for (const std::string& name : request.policies) {
    StudyPolicy policy = ReadPolicy(name);
    const Policy resolved = Resolved(policy, base.model);
    std::set<double> rates;
    for (const std::string& text : request.learning_rates) rates.insert(RateOf(text, resolved));
    if (rates.empty()) rates.insert(Shortest(resolved.learning_rate));
    policy.rates.assign(rates.begin(), rates.end());
    study.policies.push_back(std::move(policy));
  }
  for (const std::string& name : request.ablations) {
    StudyPolicy ablation = ReadPolicy(name);
    Resolved(ablation, base.model);
    ablation.base = BaseOf(ablation);
    const auto is_base = [&](const StudyPolicy& policy) {
      return policy.name == ablation.base && !policy.ablation();
    };
    if (ablation.base.empty()) {
      Fail("--ablations {}: has no base, whose learning rate it would take", name);
    }
    if (std::none_of(study.policies.begin(), study.policies.end(), is_base)) {
      Fail("--ablations {}: its base {} has to be among --policies", name, ablation.base);
    }
    study.policies.push_back(std::move(ablation));
  }
  std::set<std::string> names;
  for (const StudyPolicy& policy : study.policies) {
    if (!names.insert(policy.name).second) Fail("two policies are called {}", policy.name);
  }
  return study;
}

std::string NameOf(const RunSpec& run) {
  return fmt::format("{}-lr{}-seed{}", run.policy, run.learning_rate, run.seed);
}

ResolvedRun ResolvedOf(const Study& study, const RunSpec& run) {
  const StudyPolicy& policy = study.Named(run.policy);
  RunConfig config = study.base;
  config.policy = policy.tables;
  config.optimizer.policy = policy.file ? std::string(kOwnPolicy) : policy.name;
  config.optimizer.policy_file = policy.file ? policy.name : "";
  config.optimizer.learning_rate = static_cast<float>(run.learning_rate);
  config.training.seed = run.seed;
  try {
    return config;
  } catch (const Error& error) {
    Fail("policy {}: {}", policy.name, error.what());
  }
}

ChosenRate ChooseRate(const Study& study, const StudyPolicy& policy, const RunResults& results) {
  ChosenRate chosen{.complete = true};
  double lowest = 0;
  for (const double rate : policy.rates) {
    const RunResult* result = Find(results, {policy.name, rate, study.first_seed()});
    if (result == nullptr) chosen.complete = false;
    if (result == nullptr || result->diverged()) continue;
    if (!chosen.rate || result->final_loss() < lowest) {
      chosen.rate = rate;
      lowest = result->final_loss();
    }
  }
  chosen.at_edge = chosen.rate && policy.rates.size() > 1 &&
                   (*chosen.rate == policy.rates.front() || *chosen.rate == policy.rates.back());
  return chosen;
}

std::vector<RunSpec> KnownRuns(const Study& study, const RunResults& results) {
  std::vector<RunSpec> runs;
  for (const StudyPolicy& policy : study.policies) {
    for (const double rate : policy.rates) runs.push_back({policy.name, rate, study.first_seed()});
  }
  // Seed by seed, so that a study that is cut short has as many of each policy.
  for (int64_t i = 0; i < study.seeds; ++i) {
    for (const StudyPolicy& policy : study.policies) {
      if (i == 0 && !policy.ablation()) continue;
      const StudyPolicy& tuned = policy.ablation() ? study.Named(policy.base) : policy;
      const ChosenRate chosen = ChooseRate(study, tuned, results);
      if (!chosen.complete || !chosen.rate) continue;
      runs.push_back({policy.name, *chosen.rate, study.first_seed() + i});
    }
  }
  return runs;
}

int64_t UndecidedRuns(const Study& study, const RunResults& results) {
  int64_t runs = 0;
  for (const StudyPolicy& policy : study.policies) {
    const StudyPolicy& tuned = policy.ablation() ? study.Named(policy.base) : policy;
    if (ChooseRate(study, tuned, results).complete) continue;
    runs += policy.ablation() ? study.seeds : study.seeds - 1;
  }
  return runs;
}

}  // namespace terrace
