// terrace compare

#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <csignal>
#include <memory>
#include <optional>
#include <set>

#include "cli/commands.h"
#include "cli/config_notices.h"
#include "cli/stop_signals.h"
#include "cli/streams.h"
#include "cli/text_options.h"
#include "cli/threads.h"
#include "cli/train_progress.h"
#include "cli/whole_number.h"
#include "compare/runner.h"
#include "compare/study.h"
#include "compare/tables.h"
#include "core/counted.h"
#include "core/error.h"
#include "core/parallel.h"
#include "train/measure.h"

namespace terrace {
namespace {

constexpr double kMiB = 1 << 20;

struct CompareFlags {
  std::string config;
  std::string output;
  StudyRequest request;
  std::vector<std::string> assignments;
  bool keep_checkpoints = false;
};

// As a shell takes it.
std::string Quoted(const std::string& word) {
  constexpr std::string_view kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=.,:/@%";
  if (!word.empty() && word.find_first_not_of(kPlain) == std::string::npos) return word;
  std::string quoted = "'";
  for (const char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

std::string CommandOf(const CompareFlags& flags) {
  const StudyRequest& request = flags.request;
  std::string command = fmt::format("terrace compare {} --output {} --policies {}",
                                    Quoted(flags.config), Quoted(flags.output),
                                    Quoted(fmt::format("{}", fmt::join(request.policies, ","))));
  const auto add_list = [&](std::string_view name, const std::vector<std::string>& values) {
    if (values.empty()) return;
    command += fmt::format(" {} {}", name, Quoted(fmt::format("{}", fmt::join(values, ","))));
  };
  add_list("--ablations", request.ablations);
  add_list("--lr", request.learning_rates);
  command += fmt::format(" --seeds {}", request.seeds);
  for (const std::string& assignment : flags.assignments) command += " --set " + Quoted(assignment);
  return command;
}

// How long all that is left takes, from what this process has done so far.
class StudyClock {
 public:
  void BeginRun(int64_t runs_left) {
    done_ += current_;
    current_ = 0;
    runs_left_ = runs_left;
  }
  void Begin(const RunSummary& summary) { first_step_ = summary.first_step; }
  // `share`: of the current run, in this process.
  void Step(const StepMetrics& metrics, int64_t steps) {
    const double count = static_cast<double>(steps);
    current_ = static_cast<double>(metrics.step - first_step_) / count;
    left_ = static_cast<double>(runs_left_) - static_cast<double>(metrics.step) / count;
  }
  double SecondsLeft() const {
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start_;
    return elapsed.count() / (done_ + current_) * left_;
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  double done_ = 0;     // runs, before the current one
  double current_ = 0;  // of the current one
  double left_ = 0;
  int64_t runs_left_ = 0;  // with the current one
  int64_t first_step_ = 0;
};

void PrintStart(const Study& study, const StudyStart& start) {
  WriteNote(fmt::format("model: {:.2f} M parameters, {:.2f} M active per token",
                        static_cast<double>(start.size.parameters) / 1e6,
                        static_cast<double>(start.size.active_parameters) / 1e6));
  for (const StudyStart::Policy& policy : start.policies) {
    WriteNote(fmt::format("policy {}: state {:.1f} MiB, peak {:.1f} MiB", policy.name,
                          static_cast<double>(policy.memory.state.total) / kMiB,
                          static_cast<double>(policy.memory.peak_bytes) / kMiB));
  }
  WriteNote(fmt::format(
      "{} of {} each, {} of them done:", Counted(std::ssize(start.runs) + start.undecided, "run"),
      Counted(start.tokens, "token"), start.done.size()));
  for (const RunSpec& run : start.runs) {
    const bool done = std::find(start.done.begin(), start.done.end(), run) != start.done.end();
    WriteNote(fmt::format("  {}  {}", done ? "done " : "to do", NameOf(run)));
  }
  if (start.undecided > 0) {
    WriteNote(fmt::format("  to do  {} more at the best learning rates ({})", start.undecided,
                          Counted(study.seeds, "seed")));
  }
  if (!start.others.empty()) {
    WriteNote(
        fmt::format("finished runs in the folder that are not of this command, nor in its "
                    "report: {} ({}, ...); name their policies, rates and seeds as well",
                    start.others.size(), start.others.front()));
  }
  if (!start.threads.empty() && start.threads != std::set<int64_t>{MaxThreads()}) {
    WriteNote(
        fmt::format("threads of the runs that are done: {}; of further ones: {}; do not compare "
                    "the tokens/s of one with those of the other",
                    fmt::join(start.threads, " or "), MaxThreads()));
  }
  if (study.base.optimizer.learning_rate) {
    WriteNote("optimizer.learning_rate is not used: each policy has its own, or those of --lr");
  }
}

void RunCompare(const CompareFlags& flags) {
  const StopSignals stop("\nending after this step; once more ends at once, without saving\n");
  std::signal(SIGPIPE, SIG_IGN);  // that nobody reads the progress is no reason to stop
  const RunConfig base = LoadConfig(flags.config, flags.assignments);
  WriteNotices(base);
  UseThreads(base.training.threads);
  const Study study = MakeStudy(base, flags.request);
  const int64_t steps = base.training.steps;

  std::optional<TrainProgress> progress;
  std::optional<StudyClock> clock;
  StudyCallbacks callbacks;
  callbacks.start = [&](const StudyStart& start) {
    PrintStart(study, start);
    clock.emplace();
  };
  callbacks.run = [&](const RunSpec& run, int64_t number, int64_t total) {
    WriteNote(fmt::format("run {} of {}: {}, learning rate {}, seed {}", number, total, run.policy,
                          run.learning_rate, run.seed));
    clock->BeginRun(total - number + 1);
    progress.emplace([&clock, number, total](const StepMetrics&) {
      return fmt::format("run {}/{}, all in {}  ", number, total, Duration(clock->SecondsLeft()));
    });
    return TrainCallbacks{
        .begin =
            [&](const RunSummary& summary) {
              clock->Begin(summary);
              progress->Begin(summary, false);
            },
        .step =
            [&](const StepMetrics& metrics) {
              clock->Step(metrics, steps);
              progress->Step(metrics);
            },
        .warning = [&](std::string_view text) { progress->Note(fmt::format("warning: {}", text)); },
        .saved = {},
        .stop = [&] { return stop.requested(); }};
  };
  callbacks.finished = [&](const RunSpec& run, const RunResult& result) {
    progress.reset();
    if (result.diverged()) {
      WriteNote(fmt::format("{} diverged in step {}: {}", NameOf(run), result.facts.diverged->step,
                            result.facts.diverged->reason));
    }
  };
  const StudyOutcome outcome = RunStudy(study, flags.output,
                                        {.command = CommandOf(flags),
                                         .machine = ProcessorName(),
                                         .keep_checkpoints = flags.keep_checkpoints},
                                        callbacks);
  progress.reset();
  std::string text = ToTerminal(outcome.comparison);
  if (outcome.interrupted) {
    text += "\ninterrupted and saved; the same command continues\n";
  } else {
    text += fmt::format("\n{}/report.html shows it\n", flags.output);
  }
  WriteSummary(text);
}

}  // namespace

void AddCompareCommand(CLI::App& app) {
  const auto flags = std::make_shared<CompareFlags>();
  CLI::App* command = app.add_subcommand(
      "compare",
      "Train under several optimizer policies and compare them; continues what it began");
  command->add_option("config", flags->config, "The configuration of every run")
      ->required()
      ->option_text("BASE.toml");
  command->add_option("-o,--output", flags->output, "The folder of the comparison")
      ->required()
      ->check(NotEmpty())
      ->option_text("FOLDER");
  AddNames(*command, "--policies", flags->request.policies,
           "Ready-made policies (terrace policies) or files")
      ->required()
      ->option_text("NAME|FILE.toml,...");
  AddNames(*command, "--ablations", flags->request.ablations,
           "Policies that run at the best learning rate of the one that is their base")
      ->option_text("NAME|FILE.toml,...");
  AddNames(*command, "--lr", flags->request.learning_rates,
           "Learning rates (3e-3), or multiples of each policy's own (0.3x); several are tried on "
           "the first seed, and the best goes on (default: 1x)")
      ->option_text("RATE,...");
  command->add_option("--seeds", flags->request.seeds, "Runs of each policy (default: 1)")
      ->transform(WholeNumber<int64_t>(1, 1000))
      ->option_text("N");
  command
      ->add_option("--set", flags->assignments,
                   "Change a setting, e.g. --set training.steps=500; may be repeated")
      ->allow_extra_args(false)
      ->option_text("KEY=VALUE");
  command->add_flag("--keep-checkpoints", flags->keep_checkpoints,
                    "Keep those of finished runs, which are deleted otherwise");
  command->callback([flags] { RunCompare(*flags); });
}

}  // namespace terrace
