#include "optim/policy.h"

#include <fmt/ranges.h>

#include <initializer_list>
#include <span>

namespace terrace {
namespace {

using enum Population;

Policy SkewAdam() {
  // Published settings (arXiv 2607.19058). One table: the state follows the population.
  const RuleSettings backbone{.weight_decay = 0.05f};
  const RuleSettings expert{.weight_decay = 0.05f, .momentum = false};
  const RuleSettings router{
      .weight_decay = 0, .momentum = false, .second_moment = SecondMoment::kExact};
  return {.name = "skewadam",
          .learning_rate = 3e-4f,
          .entries = {{kEmbedding, "skewadam", backbone},
                      {kHead, "skewadam", backbone},
                      {kAttention, "skewadam", backbone},
                      {kDenseFfn, "skewadam", backbone},
                      {kSharedExpert, "skewadam", backbone},
                      {kNorm, "skewadam", backbone},
                      {kExpert, "skewadam", expert},
                      {kRouter, "skewadam", router}}};
}

Policy AdamW() {
  const RuleSettings matrix{
      .weight_decay = 0.1f, .beta2 = 0.95, .second_moment = SecondMoment::kExact, .rms_clip = 0};
  RuleSettings norm = matrix;
  norm.weight_decay = 0;
  return {.name = "adamw",
          .learning_rate = 3e-4f,
          .entries = {{kEmbedding, "adamw", matrix},
                      {kHead, "adamw", matrix},
                      {kAttention, "adamw", matrix},
                      {kDenseFfn, "adamw", matrix},
                      {kSharedExpert, "adamw", matrix},
                      {kNorm, "adamw", norm},
                      {kExpert, "adamw", matrix},
                      {kRouter, "adamw", matrix}}};
}

struct NamedPolicy {
  std::string_view name;
  Policy (*make)();
};
constexpr NamedPolicy kPolicies[] = {{"skewadam", SkewAdam}, {"adamw", AdamW}};

}  // namespace

std::vector<std::string_view> PolicyNames() {
  std::vector<std::string_view> names;
  for (const NamedPolicy& policy : kPolicies) names.push_back(policy.name);
  return names;
}

Policy PolicyNamed(std::string_view name) {
  for (const NamedPolicy& policy : kPolicies) {
    if (policy.name == name) return policy.make();
  }
  Fail("policy: no policy is called \"{}\"; known are {}", name, fmt::join(PolicyNames(), ", "));
}

}  // namespace terrace
