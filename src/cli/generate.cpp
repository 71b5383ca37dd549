// terrace generate

#include "train/generate.h"

#include <CLI/CLI.hpp>
#include <memory>

#include "cli/commands.h"
#include "cli/streams.h"
#include "cli/threads.h"
#include "cli/whole_number.h"
#include "core/counted.h"
#include "core/error.h"
#include "train/checkpoint.h"
#include "train/planned_model.h"
#include "train/run_folder.h"

namespace terrace {
namespace {

struct GenerateFlags {
  std::filesystem::path model;
  std::string prompt;
  SamplingOptions sampling;
  int64_t threads = 0;
};

void RunGenerate(const GenerateFlags& flags) {
  UseThreads(flags.threads);
  CheckSampling(flags.sampling);
  const StoredModel stored = FindStoredModel(flags.model);
  const Tokenizer tokenizer = TokenizerOf(stored);
  SamplingOptions sampling = flags.sampling;
  sampling.end_token = tokenizer.end_of_text();
  std::vector<int32_t> prompt = tokenizer.Encode(flags.prompt);
  // The end of one document is the start of the next.
  if (prompt.empty() && sampling.end_token >= 0) prompt.push_back(sampling.end_token);
  if (prompt.empty()) Fail("generate: an empty prompt, and the tokenizer has no end-of-text token");

  sampling.can_draw = [&](int32_t id) { return tokenizer.Has(id); };
  int64_t added = 0;
  UsePlannedModel(stored.config.model, [&](Model& model) {
    if (!model.backend().dry()) {
      LoadModel(stored.checkpoint, model,
                [](std::string_view text) { WriteNote(std::string(text)); });
      WriteOutput("-", flags.prompt);
    }
    Generate(model, prompt, sampling, [&](int32_t token) {
      WriteOutput("-", tokenizer.BytesOf(token));
      ++added;
    });
  });
  WriteOutput("-", "\n");
  const int64_t positions = stored.config.model.max_positions;
  if (added < sampling.max_tokens && std::ssize(prompt) + added == positions) {
    WriteNote(fmt::format("stopped after {}: model.max_positions = {} is reached",
                          Counted(added, "token"), positions));
  }
}

}  // namespace

void AddGenerateCommand(CLI::App& app) {
  const auto flags = std::make_shared<GenerateFlags>();
  SamplingOptions& sampling = flags->sampling;
  CLI::App* command = app.add_subcommand("generate", "Continue a text with a model");
  command->add_option("model", flags->model, "The folder of a run, or of one of its checkpoints")
      ->option_text("RUN")
      ->required();
  command->add_option("--prompt", flags->prompt, "The text to continue")->option_text("TEXT");
  command->add_option("--max-tokens", sampling.max_tokens, "Tokens to add at most")
      ->transform(WholeNumber<int64_t>(1))
      ->option_text(fmt::format("N={}", sampling.max_tokens));
  command->add_option("--temperature", sampling.temperature, "0: always the likeliest token")
      ->option_text(fmt::format("X={}", sampling.temperature));
  command->add_option("--top-k", sampling.top_k, "Of the K likeliest tokens only; 0: of all")
      ->transform(WholeNumber<int64_t>(0))
      ->option_text(fmt::format("K={}", sampling.top_k));
  command
      ->add_option("--top-p", sampling.top_p,
                   "Of the likeliest tokens whose probabilities reach this sum")
      ->option_text(fmt::format("P={}", sampling.top_p));
  command->add_option("--seed", sampling.seed, "Of the random draws")
      ->transform(WholeNumber<uint64_t>(0))
      ->option_text(fmt::format("N={}", sampling.seed));
  command->add_option("--threads", flags->threads, "0: as many as run at once")
      ->transform(WholeNumber<int64_t>(0, kMaxThreads))
      ->option_text("N");
  command->callback([flags] { RunGenerate(*flags); });
}

}  // namespace terrace
