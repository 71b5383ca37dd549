// terrace train

#include <CLI/CLI.hpp>
#include <cmath>
#include <csignal>
#include <memory>

#include "cli/commands.h"
#include "cli/config_notices.h"
#include "cli/stop_signals.h"
#include "cli/streams.h"
#include "cli/threads.h"
#include "cli/train_progress.h"
#include "core/counted.h"
#include "core/error.h"
#include "train/run_folder.h"
#include "train/trainer.h"

namespace terrace {
namespace {

struct TrainFlags {
  std::filesystem::path config;
  std::filesystem::path output;
  std::vector<std::string> assignments;
  TrainOptions options;
  bool settings = false;
};

void PrintSettings(const TrainFlags& flags) {
  RunConfig config;
  if (!flags.config.empty()) config = LoadConfig(flags.config, flags.assignments);
  WriteNotices(config);
  WriteOutput("-", ToToml(FieldsOf(config)));
}

void RunTrain(TrainFlags flags) {
  const StopSignals stop("\nending after this step; once more ends at once, without saving\n");
  std::signal(SIGPIPE, SIG_IGN);  // that nobody reads the progress is no reason to stop
  const bool own = flags.config.empty();
  if (own) {
    if (!flags.options.resume || flags.output.empty())
      Fail("train: name a configuration (a .toml file)");
    flags.config = RunFolder{flags.output}.config();
  }
  if (flags.output.empty()) flags.output = std::filesystem::path("runs") / flags.config.stem();
  const RunConfig config = own ? LoadRunConfig(RunFolder{flags.output}, flags.assignments)
                               : LoadConfig(flags.config, flags.assignments);
  WriteNotices(config);
  UseThreads(config.training.threads);

  TrainResult result;
  {
    TrainProgress progress;
    result = Train(
        config, flags.output, flags.options,
        {.begin = [&](const RunSummary& summary) { progress.Begin(summary); },
         .step = [&](const StepMetrics& metrics) { progress.Step(metrics); },
         .warning = [&](std::string_view text) { progress.Note(fmt::format("warning: {}", text)); },
         .saved =
             [&](const std::filesystem::path& path) {
               progress.Note(fmt::format("saved {}", path.string()));
             },
         .stop = [&] { return stop.requested(); }});
  }
  const int64_t steps = config.training.steps;
  std::string text = fmt::format("{}: ", flags.output.string());
  text += result.step <= steps
              ? fmt::format("{} of {}", result.step, Counted(steps, "step"))
              : fmt::format("{}, more than {}", Counted(result.step, "step"), steps);
  if (result.interrupted) text += ", interrupted and saved (--resume continues)";
  if (result.evaluation) {
    const Evaluation& evaluation = *result.evaluation;
    text += fmt::format(", validation perplexity {:.2f} (unigram: {:.2f})", evaluation.perplexity,
                        std::exp(evaluation.unigram_entropy));
  }
  WriteSummary(text + "\n");
}

}  // namespace

void AddTrainCommand(CLI::App& app) {
  const auto flags = std::make_shared<TrainFlags>();
  CLI::App* command = app.add_subcommand("train", "Train a model");
  command
      ->add_option("config", flags->config,
                   "The configuration; may be left out with --resume and --output")
      ->option_text("CONFIG.toml");
  command
      ->add_option("--set", flags->assignments,
                   "Change a setting, e.g. --set training.steps=500; may be repeated")
      ->allow_extra_args(false)
      ->option_text("KEY=VALUE");
  command
      ->add_option("-o,--output", flags->output,
                   "The folder of the run (default: runs/ and the configuration's name)")
      ->option_text("FOLDER");
  command->add_flag("--resume", flags->options.resume, "Continue the run in the folder");
  command
      ->add_option_function<int64_t>(
          "--threads",
          [flags](int64_t threads) {
            flags->assignments.push_back(fmt::format("training.threads={}", threads));
          },
          "0: as many as run at once; as --set training.threads=N")
      ->option_text("N");
  command->add_flag("--overcommit", flags->options.overcommit,
                    "Start even if more memory, or room for checkpoints, is needed than is free");
  command->add_flag("--settings", flags->settings,
                    "Print every setting with its meaning and value (of CONFIG.toml, or the "
                    "default), and do nothing else");
  command->callback([flags] { flags->settings ? PrintSettings(*flags) : RunTrain(*flags); });
}

}  // namespace terrace
