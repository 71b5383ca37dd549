// terrace data prepare|check

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "cli/commands.h"
#include "cli/corpus_flags.h"
#include "cli/interruptible.h"
#include "cli/streams.h"
#include "cli/threads.h"
#include "cli/whole_number.h"
#include "core/counted.h"
#include "core/error.h"
#include "data/dataset.h"
#include "data/prepare.h"
#include "data/tokenizer_files.h"

namespace terrace {
namespace {

struct PrepareFlags {
  PrepareOptions options;
  std::string tokenizer = "bytes";
};

std::string LineOf(Split split, const SplitSummary& summary, int64_t all_bytes) {
  return fmt::format(
      "{:<5}  {} from {} ({:.1f} %), unigram entropy {:.4f} nats (perplexity {:.1f})\n",
      NameOf(split), Counted(summary.tokens, "token"), Counted(summary.bytes, "byte"),
      100 * static_cast<double>(summary.bytes) / static_cast<double>(all_bytes),
      summary.entropy_nats, std::exp(summary.entropy_nats));
}

// What came out otherwise than it was asked for.
std::string Deviations(const PrepareOptions& options, const CorpusSummary& summary) {
  std::string text;
  if (summary.piece_bytes < options.piece_bytes) {
    text += fmt::format(
        "documents were cut into pieces of at most {} bytes, not {}: in larger ones there were too "
        "few for both train and val\n",
        summary.piece_bytes, options.piece_bytes);
  }
  const double all_bytes = static_cast<double>(summary.train.bytes + summary.val.bytes);
  const double share = static_cast<double>(summary.val.bytes) / all_bytes;
  const double asked = options.val_fraction;
  // A quarter of what was asked for is what a thousand pieces rarely exceed.
  if (std::abs(share - asked) > std::min(asked, 1 - asked) / 4) {
    text += fmt::format(
        "val has {:.1f} % of the text, not the {:.1f} % asked for: pieces go to it by chance, and "
        "there {} {} of them; smaller ones (--piece-bytes) come closer\n",
        100 * share, 100 * asked, ForCount(summary.train.pieces + summary.val.pieces, "is", "are"),
        summary.train.pieces + summary.val.pieces);
  }
  return text;
}

void Prepare(const PrepareFlags& flags) {
  UseThreads(0);
  CorpusSummary summary;
  RunInterruptibly([&](const ProgressCallback& progress) {
    summary = PrepareCorpus(flags.options, LoadTokenizer(flags.tokenizer), progress);
  });
  const int64_t all_bytes = summary.train.bytes + summary.val.bytes;
  WriteOutput("-", fmt::format("{}: {} of {}, vocabulary {}\n", flags.options.output.string(),
                               Counted(summary.documents, "document"),
                               Counted(summary.files, "file"), summary.vocab_size) +
                       LineOf(Split::kTrain, summary.train, all_bytes) +
                       LineOf(Split::kVal, summary.val, all_bytes) +
                       Deviations(flags.options, summary));
}

// Verifies a file and describes it.
std::string CheckFile(const TokenFile& file) {
  file.VerifyChecksum();
  const int64_t limit = file.vocab_size() > 0 ? file.vocab_size() : INT32_MAX;
  int32_t largest = 0;
  std::vector<int32_t> block;
  for (int64_t first = 0; first < file.size(); first += static_cast<int64_t>(block.size())) {
    block.resize(static_cast<size_t>(std::min<int64_t>(file.size() - first, 1 << 20)));
    file.Read(first, limit, block);
    largest = std::max(largest, *std::ranges::max_element(block));
  }
  return fmt::format(
      "{}: {}, largest id {}{}\n", file.path().string(), Counted(file.size(), "token"), largest,
      file.vocab_size() > 0 ? fmt::format(", vocabulary {}", file.vocab_size()) : "");
}

void Check(const std::filesystem::path& path) {
  std::error_code ignored;
  if (!std::filesystem::is_directory(path, ignored)) {
    return WriteOutput("-", CheckFile(TokenFile(path)));
  }
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    if (entry.path().extension() == ".bin") files.push_back(entry.path());
  }
  if (files.empty()) Fail("{} has no token files (*.bin)", path.string());
  std::ranges::sort(files);
  std::string text;
  for (const auto& file : files) text += CheckFile(TokenFile(file));
  WriteOutput("-", text);
}

void AddPrepare(CLI::App& parent) {
  const auto flags = std::make_shared<PrepareFlags>();
  PrepareOptions& options = flags->options;
  CLI::App* command =
      parent.add_subcommand("prepare", "Turn text into shards of tokens for train and val");
  command
      ->add_option("-t,--tokenizer", flags->tokenizer,
                   "'bytes', a tokenizer.json, or a folder with it or with vocab.json and "
                   "merges.txt")
      ->type_name("NAME")
      ->capture_default_str();
  command->add_option("-o,--output", options.output, "The folder to write; must not exist")
      ->type_name("FOLDER")
      ->required();
  command
      ->add_option("--val-fraction", options.val_fraction,
                   "Share of the documents for validation, chosen by a hash of their bytes")
      ->type_name("X")
      ->capture_default_str();
  command
      ->add_option("--piece-bytes", options.piece_bytes,
                   "Longer documents are cut before that choice, at line ends")
      ->transform(WholeNumber<int64_t>(1))
      ->type_name("N")
      ->capture_default_str();
  AddCorpusFlags(*command, options.corpus);
  command->callback([flags] { Prepare(*flags); });
}

}  // namespace

void AddDataCommand(CLI::App& app) {
  CLI::App* command = app.add_subcommand("data", "Prepare training data");
  command->require_subcommand(1);
  AddPrepare(*command);
  const auto path = std::make_shared<std::filesystem::path>();
  CLI::App* check = command->add_subcommand(
      "check", "Read token files (Terrace, llm.c, nanoGPT) whole and verify them");
  check->add_option("path", *path, "A folder of .bin files, or a single one")
      ->type_name("PATH")
      ->required();
  check->callback([path] { Check(*path); });
}

}  // namespace terrace
