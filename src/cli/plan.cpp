// terrace plan

#include <CLI/CLI.hpp>
#include <algorithm>
#include <limits>
#include <memory>
#include <optional>

#include "cli/commands.h"
#include "cli/config_notices.h"
#include "cli/streams.h"
#include "cli/text_options.h"
#include "cli/threads.h"
#include "core/error.h"
#include "plan/bytes.h"
#include "plan/report.h"
#include "train/measure.h"

namespace terrace {
namespace {

struct PlanFlags {
  std::string source;
  std::vector<std::string> policies;
  std::vector<std::string> sinks;
  std::string memory;
  std::vector<std::string> assignments;
  std::string chart;
  bool json = false;
  bool largest = false;
};

std::optional<int64_t> BudgetOf(const PlanFlags& flags) {
  if (!flags.memory.empty()) {
    try {
      return ParseBytes(flags.memory);
    } catch (const Error& error) {
      Fail("--memory: {}", error.what());
    }
  }
  const int64_t available = AvailableMemoryBytes();
  if (available == std::numeric_limits<int64_t>::max()) return std::nullopt;
  return available;
}

// A flag and a setting that contradict each other would leave open which counts.
void RequireNoAssignment(const PlanFlags& flags, std::string_view flag, std::string_view key) {
  for (const std::string_view assignment : flags.assignments) {
    std::string_view name = assignment.substr(0, assignment.find('='));
    while (name.ends_with(' ')) name.remove_suffix(1);
    if (name == key) Fail("--set {}: is {}'s to say", assignment, flag);
  }
}

// One for each policy and sink.
std::vector<Subject> SubjectsOf(const PlanFlags& flags) {
  std::vector<Subject> subjects;
  if (!flags.policies.empty()) RequireNoAssignment(flags, "--policy", "optimizer.policy");
  if (!flags.sinks.empty()) RequireNoAssignment(flags, "--sink", "training.sink");
  const auto or_none = [](const std::vector<std::string>& names) {
    return names.empty() ? std::vector<std::string>{""} : names;
  };
  for (const std::string& policy : or_none(flags.policies)) {
    for (const std::string& sink : or_none(flags.sinks)) {
      std::vector<std::string> assignments = flags.assignments;
      if (!sink.empty()) assignments.push_back("training.sink=" + sink);
      subjects.push_back(LoadSubject(flags.source, policy, std::move(assignments)));
    }
  }
  return subjects;
}

// A table that has nothing but refusals is one.
template <typename Row>
void RequireAny(const std::vector<Row>& rows) {
  const bool any =
      std::any_of(rows.begin(), rows.end(), [](const Row& row) { return row.refused.empty(); });
  if (!any) Fail("{}", rows.front().refused);
}

std::string LargestText(const std::vector<Subject>& subjects, int64_t budget_bytes, bool json) {
  std::vector<LargestRow> rows;
  for (const Subject& subject : subjects) rows.push_back(LargestThatFits(subject, budget_bytes));
  RequireAny(rows);
  return json ? ToJson(rows, budget_bytes) : ToText(rows, budget_bytes);
}

void RunPlan(const PlanFlags& flags) {
  if (!flags.chart.empty()) {
    if (!flags.chart.ends_with(".svg"))
      Fail("--chart {}: the picture is an .svg file", flags.chart);
    RequireNewOutput(flags.chart);
  }
  const std::optional<int64_t> budget_bytes = BudgetOf(flags);
  const std::vector<Subject> subjects = SubjectsOf(flags);
  UseThreads(subjects.front().config.training.threads);
  WriteNotices(subjects.front().config);
  if (!flags.chart.empty() && flags.largest) Fail("--chart draws one run, not --largest");
  if (!flags.chart.empty() && subjects.size() > 1) {
    Fail("--chart is of one run: name one policy and one sink");
  }
  if (flags.largest) {
    if (!budget_bytes) Fail("--largest needs --memory: the machine does not tell what is free");
    return WriteOutput("-", LargestText(subjects, *budget_bytes, flags.json));
  }
  if (subjects.size() > 1) {
    std::vector<PlanRow> rows;
    for (const Subject& subject : subjects) rows.push_back(MakeRow(subject));
    RequireAny(rows);
    return WriteOutput("-", flags.json ? ToJson(rows, budget_bytes) : ToText(rows, budget_bytes));
  }
  const PlanReport report = MakeReport(subjects.front(), budget_bytes);
  if (!flags.chart.empty()) {
    if (report.memory.moments.empty()) {
      Fail("--chart: {} cannot be run, so that nothing is known of its step ({})",
           report.subject.name, report.subject.hugging_face->not_runnable);
    }
    WriteOutput(flags.chart, ToSvg(report));
  }
  WriteOutput("-", flags.json ? ToJson(report) : ToText(report));
}

}  // namespace

void AddPlanCommand(CLI::App& app) {
  const auto flags = std::make_shared<PlanFlags>();
  CLI::App* command = app.add_subcommand(
      "plan", "Say what a run would take: memory to the byte, compute, and what makes it fit");
  command
      ->add_option(
          "source", flags->source,
          "A configuration, a preset, or the config.json of a Hugging Face model (Mixtral, "
          "OLMoE, Qwen3-MoE, DeepSeek-V3)")
      ->required()
      ->option_text("CONFIG.toml|PRESET|config.json");
  AddNames(*command, "--policy", flags->policies,
           "Ready-made policies (terrace policies) or files, in place of the configuration's; "
           "several give a table, without advice on what would fit")
      ->option_text("NAME|FILE.toml,...");
  AddNames(*command, "--sink", flags->sinks,
           "accumulate or release, as --set training.sink=SINK; both give a table")
      ->option_text("SINK,...");
  command
      ->add_option("--memory", flags->memory, "To fit in (default: what is free on this machine)")
      ->check(NotEmpty())
      ->option_text("24GiB");
  command
      ->add_option("--set", flags->assignments,
                   "Change a setting, e.g. --set training.micro_batch_size=2; may be repeated")
      ->allow_extra_args(false)
      ->option_text("KEY=VALUE");
  command->add_flag("--largest", flags->largest,
                    "Find the number of layers that still fits, a table by policy and sink");
  command->add_flag("--json", flags->json,
                    "The same for scripts, in bytes; a table as a list under \"plans\" or "
                    "\"largest\"");
  command
      ->add_option("--chart", flags->chart, "Write memory over one step as a picture to this file")
      ->check(NotEmpty())
      ->option_text("FILE.svg");
  command->callback([flags] { RunPlan(*flags); });
}

}  // namespace terrace
