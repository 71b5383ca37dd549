// terrace eval

#include <CLI/CLI.hpp>
#include <cmath>
#include <memory>

#include "cli/commands.h"
#include "cli/streams.h"
#include "cli/threads.h"
#include "cli/whole_number.h"
#include "core/counted.h"
#include "core/error.h"
#include "train/checkpoint.h"
#include "train/evaluate.h"
#include "train/planned_model.h"
#include "train/run_data.h"
#include "train/run_folder.h"

namespace terrace {
namespace {

struct EvalFlags {
  std::filesystem::path model;
  std::filesystem::path data;
  int64_t batches = 0;
  int64_t threads = 0;
};

void RunEval(const EvalFlags& flags) {
  UseThreads(flags.threads);
  const StoredModel stored = FindStoredModel(flags.model);
  const RunConfig& config = stored.config;
  const std::filesystem::path data =
      flags.data.empty() ? std::filesystem::path(config.data.folder) : flags.data;
  if (flags.data.empty()) {
    if (!std::filesystem::exists(data)) {
      Fail("{}: the run's data are not there any more; --data names others", data.string());
    }
    if (!std::filesystem::is_directory(data)) {
      Fail("{}: is a file that the run was trained on; --data names data to evaluate on",
           data.string());
    }
  }
  const std::optional<std::string> notice = CheckDataOfModel(stored, data);
  if (notice && !flags.data.empty()) WriteNote(*notice);
  const Dataset dataset(data, Split::kVal, config.model.vocab_size);
  EvaluationShape shape{config.training.micro_batch_size, config.training.sequence_length,
                        flags.batches};
  if (flags.batches == 0) {
    shape.max_batches = dataset.size() / (shape.sequences * shape.length) + 1;
  }
  Evaluation evaluation;
  UsePlannedModel(config.model, [&](Model& model) {
    if (model.backend().dry()) return PlanEvaluation(model, shape);
    LoadModel(stored.checkpoint, model,
              [](std::string_view text) { WriteNote(std::string(text)); });
    evaluation = Evaluate(model, dataset, shape);
  });
  WriteOutput("-", fmt::format("{}: {} of {}\n"
                               "loss             {:.4f} nats, perplexity {:.2f}\n"
                               "unigram entropy  {:.4f} nats, perplexity {:.2f}\n",
                               stored.checkpoint.string(), Counted(evaluation.tokens, "token"),
                               dataset.path().string(), evaluation.loss, evaluation.perplexity,
                               evaluation.unigram_entropy, std::exp(evaluation.unigram_entropy)));
}

}  // namespace

void AddEvalCommand(CLI::App& app) {
  const auto flags = std::make_shared<EvalFlags>();
  CLI::App* command = app.add_subcommand("eval", "Validation loss and perplexity of a model");
  command->add_option("model", flags->model, "The folder of a run, or of one of its checkpoints")
      ->option_text("RUN")
      ->required();
  command
      ->add_option("--data", flags->data,
                   "A folder of prepared data, of which val is taken, or a single file of tokens "
                   "(default: the run's folder)")
      ->option_text("PATH");
  command->add_option("--batches", flags->batches, "Evaluate on the first N batches; 0: on all")
      ->transform(WholeNumber<int64_t>(0))
      ->option_text("N");
  command->add_option("--threads", flags->threads, "0: as many as run at once")
      ->transform(WholeNumber<int64_t>(0, kMaxThreads))
      ->option_text("N");
  command->callback([flags] { RunEval(*flags); });
}

}  // namespace terrace
