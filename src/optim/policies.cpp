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
      {"skewadam-bf16-momentum", "SkewAdam with the backbone's momentum in bfloat16", R"(
base = "skewadam"
[default]
momentum = "bf16"
[expert]
momentum = "none"
[router]
momentum = "none"
)"},
      {"skewadam-int8-momentum", "SkewAdam with the backbone's momentum in 8 bits by block", R"(
base = "skewadam"
[default]
momentum = "int8"
[expert]
momentum = "none"
[router]
momentum = "none"
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
      {"adamw8bit", "AdamW with both moments in 8 bits by block (after arXiv 2110.02861)", R"(
base = "adamw"
[default]
rule = "adamw8bit"
beta2 = 0.95
# Small, so that 8 bits would save nothing; and where a router sends its tokens turns on little.
[norm]
rule = "adamw"
beta2 = 0.95
[router]
rule = "adamw"
beta2 = 0.95
)"},
      {"adafactor", "Adafactor without momentum: factored second moment (arXiv 1804.04235)", R"(
learning_rate = 1e-3
[default]
rule = "adafactor"
weight_decay = 0.1
[norm]
weight_decay = 0
)"},
      {"sgd", "gradient descent with momentum: the least that moves a model", R"(
learning_rate = 0.1
[default]
rule = "sgd"
weight_decay = 1e-4
[norm]
weight_decay = 0
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
