// The ready-made policies. A policy is one text here.
#include "core/error.h"
#include "core/nearest_name.h"
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
      {"skewadam-relative-eps",
       "SkewAdam with the floor on squared gradients relative to their mean",
       R"(
base = "skewadam"
[default]
eps_mode = "relative"
)"},
      // For a budget of bytes a parameter, of bfloat16 weights under `release`: 2 without momentum,
      // 3 with one of 8 bits, 6 of float32. The like with 4 is a line of one's own: momentum =
      // "bf16".
      {"skewadam-expert-int8",
       "for 3 bytes a parameter: SkewAdam off its eps floor, momentum for experts too, in 8 bits",
       R"(
base = "skewadam-relative-eps"
[default]
momentum = "int8"
[router]
momentum = "none"
)"},
      {"skewadam-expert-f32",
       "for 6 bytes a parameter: SkewAdam off its eps floor, momentum for experts too",
       R"(
base = "skewadam-relative-eps"
[expert]
momentum = "f32"
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
      {"lion", "Lion, the sign of one momentum of float32 everywhere (arXiv 2302.06675)", R"(
learning_rate = 1e-4
[default]
rule = "lion"
weight_decay = 0.3
[norm]
weight_decay = 0
)"},
      // An entry of X is 1 on the root mean square: with 20 * 0.05 a matrix moves as far by sinkgd
      // as it would by the sign.
      {"mesh", "MESH: experts have their momentum in the gradient buffer (arXiv 2608.04407)", R"(
learning_rate = 1e-3
[default]
rule = "sinkgd"
lr_multiplier = 20
weight_decay = 0.01
[embedding]
rule = "sage"
lr_multiplier = 1
[head]
rule = "sage"
lr_multiplier = 1
[norm]
rule = "sage"
lr_multiplier = 1
weight_decay = 0
[expert]
momentum = "hidden_f32"
)"},
      {"mesh-b", "MESH with a multiplier for each neuron of an expert", R"(
base = "mesh"
[expert]
multiplier = "neuron"
)"},
      {"mesh-bf16-buffer", "MESH with a gradient buffer of bfloat16", R"(
base = "mesh"
[expert]
momentum = "hidden_bf16"
)"},
      {"mesh-int8", "for 3 bytes a parameter: MESH with all momentum in 8 bits, as state", R"(
base = "mesh"
[embedding]
momentum = "int8"
[head]
momentum = "int8"
[expert]
momentum = "int8"
)"},
      {"mesh-stateless",
       "ablation of MESH: experts without momentum, Sinkhorn on each step's gradient",
       R"(
base = "mesh"
[expert]
momentum = "none"
)"},
      {"mesh-small-steps", "ablation of MESH: stateless experts with steps of a quarter", R"(
base = "mesh"
[expert]
momentum = "none"
lr_multiplier = 5
)"},
      {"mesh-layer-grouping", "ablation of MESH: the experts of a layer normalized as one matrix",
       R"(
base = "mesh"
[expert]
grouping = "layer"
)"},
      {"mesh-sign", "ablation of MESH: the sign of experts' momentum in place of Sinkhorn", R"(
base = "mesh"
[expert]
direction = "sign"
)"},
      {"mesh-state-momentum", "ablation of MESH: experts' momentum as optimizer state", R"(
base = "mesh"
[expert]
momentum = "f32"
)"},
      {"mesh-adamw-experts", "ablation of MESH: full state, AdamW on experts", R"(
base = "mesh"
[expert]
rule = "adamw"
lr_multiplier = 1
beta2 = 0.95
weight_decay = 0.1
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
      {"muon-stateless", "for 2 bytes a parameter: Muon without momentum on hidden matrices", R"(
base = "muon"
[attention]
momentum = "none"
[dense_ffn]
momentum = "none"
[shared_expert]
momentum = "none"
[expert]
momentum = "none"
)"},
      {"muon-int8", "for 3 bytes a parameter: Muon, and AdamW beside it, with all state in 8 bits",
       R"(
base = "adamw8bit"
[attention]
rule = "muon"
momentum = "int8"
[dense_ffn]
rule = "muon"
momentum = "int8"
[shared_expert]
rule = "muon"
momentum = "int8"
[expert]
rule = "muon"
momentum = "int8"
)"},
      {"muon-hidden",
       "for `accumulate`: Muon whose momentum is the gradient buffer, which is no state",
       R"(
base = "muon"
[attention]
momentum = "hidden_f32"
[dense_ffn]
momentum = "hidden_f32"
[shared_expert]
momentum = "hidden_f32"
[expert]
momentum = "hidden_f32"
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

PolicyTables PolicyTablesNamed(std::string_view name) {
  for (const ReadyPolicy& policy : ReadyPolicies()) {
    if (policy.name == name) return ParsePolicy(policy.text, name);
  }
  Fail(
      "no policy is called \"{}\", did you mean {}? (`terrace policies` lists them; the name of a "
      "file ends in .toml)",
      name, NearestName(name, PolicyNames()));
}

Policy PolicyNamed(std::string_view name) { return ResolvePolicy(name, PolicyTablesNamed(name)); }

}  // namespace terrace
