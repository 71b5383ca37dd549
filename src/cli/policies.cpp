// terrace policies

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>

#include "cli/commands.h"
#include "cli/streams.h"
#include "core/error.h"
#include "optim/policy.h"

namespace terrace {
namespace {

void ListPolicies() {
  size_t width = 0;
  for (const ReadyPolicy& policy : ReadyPolicies()) width = std::max(width, policy.name.size());
  std::string text;
  for (const ReadyPolicy& policy : ReadyPolicies()) {
    text += fmt::format("{:{}}  {}\n", policy.name, width, policy.summary);
  }
  WriteOutput("-", text);
}

void PrintPolicy(const std::string& name) {
  WriteOutput("-", ToToml(IsPolicyFile(name) ? ResolvePolicy(name, ReadPolicyFile(name))
                                             : PolicyNamed(name)));
}

}  // namespace

void AddPoliciesCommand(CLI::App& app) {
  const auto name = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand(
      "policies", "List the ready-made optimizer policies, or print one with all its settings");
  command->add_option("policy", *name, "A ready-made policy, or a file of one's own")
      ->option_text("NAME|FILE.toml");
  command->callback([name] { name->empty() ? ListPolicies() : PrintPolicy(*name); });
}

}  // namespace terrace
