// The ready-made policies. A policy is one text here.
#include <fmt/ranges.h>

#include "core/error.h"
#include "optim/policy.h"

namespace terrace {

const std::vector<ReadyPolicy>& ReadyPolicies() {
  static const std::vector<ReadyPolicy> policies = {
      {"skewadam", "SkewAdam as published (arXiv 2607.19058)", R"(
learning_rate = 3e-4
[default]
rule = "skewadam"
weight_decay = 0.05
[expert]
momentum = "none"
[router]
momentum = "none"
second_moment = "exact"
weight_decay = 0
)"},
      {"skewadam-expert-momentum", "ablation of SkewAdam: experts have momentum too", R"(
base = "skewadam"
[expert]
momentum = "f32"
)"},
      {"skewadam-factored-router", "ablation of SkewAdam: the router's second moment is factored",
       R"(
base = "skewadam"
[router]
second_moment = "factored"
)"},
      {"skewadam-uniform", "ablation of SkewAdam: momentum and factored second moment everywhere",
       R"(
base = "skewadam"
[default]
momentum = "f32"
second_moment = "factored"
)"},
      {"adamw", "AdamW, two moments of float32 everywhere (arXiv 1711.05101)", R"(
learning_rate = 3e-4
[default]
rule = "adamw"
beta2 = 0.95
weight_decay = 0.1
[norm]
weight_decay = 0
)"},
      {"muon", "Muon on hidden matrices, else AdamW, at one learning rate (arXiv 2502.16982)", R"(
base = "adamw"
[attention]
rule = "muon"
[dense_ffn]
rule = "muon"
[shared_expert]
rule = "muon"
[expert]
rule = "muon"
)"},
      {"galore", "GaLore on hidden matrices, else AdamW, as published (arXiv 2403.03507)", R"(
learning_rate = 1e-2
[default]
rule = "adamw"
[attention]
rule = "galore"
[dense_ffn]
rule = "galore"
[shared_expert]
rule = "galore"
[expert]
rule = "galore"
)"},
  };
  return policies;
}

std::vector<std::string_view> PolicyNames() {
  std::vector<std::string_view> names;
  for (const ReadyPolicy& policy : ReadyPolicies()) names.push_back(policy.name);
  return names;
}

Policy PolicyNamed(std::string_view name) {
  for (const ReadyPolicy& policy : ReadyPolicies()) {
    if (policy.name == name) return ResolvePolicy(name, ParsePolicy(policy.text, name));
  }
  Fail("no policy is called \"{}\"; ready-made are {}; a file's name ends in .toml", name,
       fmt::join(PolicyNames(), ", "));
}

}  // namespace terrace
