// terrace tokenizer train|encode|decode

#include <CLI/CLI.hpp>
#include <charconv>
#include <memory>

#include "cli/commands.h"
#include "cli/corpus_flags.h"
#include "cli/interruptible.h"
#include "cli/streams.h"
#include "cli/threads.h"
#include "cli/whole_number.h"
#include "core/error.h"
#include "data/prepare.h"
#include "data/quoted.h"
#include "data/tokenizer_files.h"

namespace terrace {
namespace {

struct TrainFlags {
  CorpusOptions corpus;
  int64_t vocab_size = 8192;
  std::string output;
};

struct CodeFlags {
  std::string tokenizer;
  std::string input = "-";
  std::string output = "-";
  bool special = false;
};

void Train(const TrainFlags& flags) {
  RequireNewOutput(flags.output);
  UseThreads(0);
  int64_t vocab_size = 0;
  RunInterruptibly([&](const ProgressCallback& progress) {
    const Tokenizer tokenizer = TrainTokenizer(flags.corpus, flags.vocab_size, progress);
    WriteOutput(flags.output, ToTokenizerJson(tokenizer));
    vocab_size = tokenizer.vocab_size();
  });
  if (vocab_size < flags.vocab_size) {
    WriteNote(fmt::format("the text has pairs for a vocabulary of {} only, not {}", vocab_size,
                          flags.vocab_size));
  }
}

void Encode(const CodeFlags& flags) {
  RequireNewOutput(flags.output);
  const Tokenizer tokenizer = LoadTokenizer(flags.tokenizer);
  const std::string input = ReadInput(flags.input);
  const auto special = flags.special ? SpecialTokens::kAsTokens : SpecialTokens::kAsText;
  fmt::memory_buffer text;
  const std::vector<int32_t> ids = [&] {
    try {
      return tokenizer.Encode(input, special);
    } catch (const Error& error) {
      Fail("{}: {}", flags.input == "-" ? "standard input" : flags.input, error.what());
    }
  }();
  for (const int32_t id : ids) {
    fmt::format_to(std::back_inserter(text), "{}{}", text.size() == 0 ? "" : " ", id);
  }
  text.push_back('\n');
  WriteOutput(flags.output, {text.data(), text.size()});
}

std::vector<int32_t> ParseIds(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n";
  std::vector<int32_t> ids;
  for (size_t begin; (begin = text.find_first_not_of(kSpace)) != std::string_view::npos;) {
    text.remove_prefix(begin);
    const std::string_view word = text.substr(0, text.find_first_of(kSpace));
    int32_t id = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), id);
    if (error != std::errc() || end != word.data() + word.size()) {
      Fail("{} (at position {}) is not a token id", Quoted(word.substr(0, 40)), ids.size());
    }
    ids.push_back(id);
    text.remove_prefix(word.size());
  }
  return ids;
}

void Decode(const CodeFlags& flags) {
  RequireNewOutput(flags.output);
  const Tokenizer tokenizer = LoadTokenizer(flags.tokenizer);
  const std::string input = ReadInput(flags.input);
  WriteOutput(flags.output, tokenizer.Decode(ParseIds(input)));
}

void AddTrain(CLI::App& parent) {
  const auto flags = std::make_shared<TrainFlags>();
  CLI::App* command = parent.add_subcommand(
      "train", "Learn a byte-level BPE vocabulary and save it as a tokenizer.json");
  command->add_option("--vocab-size", flags->vocab_size, "Tokens, including <|endoftext|>")
      ->transform(WholeNumber<int64_t>(1))
      ->type_name("N")
      ->capture_default_str();
  command->add_option("-o,--output", flags->output, "The tokenizer.json to write")
      ->type_name("FILE")
      ->required();
  AddCorpusFlags(*command, flags->corpus);
  command->callback([flags] { Train(*flags); });
}

CLI::App* AddCode(CLI::App& parent, const char* name, const char* description,
                  const std::shared_ptr<CodeFlags>& flags) {
  CLI::App* command = parent.add_subcommand(name, description);
  command
      ->add_option("-t,--tokenizer", flags->tokenizer,
                   "'bytes', a tokenizer.json, or a folder with it or with vocab.json and "
                   "merges.txt")
      ->type_name("NAME")
      ->required();
  command->add_option("input", flags->input, "The file to read; - is standard input")
      ->type_name("FILE");
  command->add_option("-o,--output", flags->output, "The file to write; - is standard output")
      ->type_name("FILE");
  return command;
}

}  // namespace

void AddTokenizerCommand(CLI::App& app) {
  CLI::App* command = app.add_subcommand("tokenizer", "Train and use tokenizers");
  command->require_subcommand(1);
  AddTrain(*command);
  const auto encode = std::make_shared<CodeFlags>();
  CLI::App* encode_command =
      AddCode(*command, "encode", "Turn text (any bytes) into token ids", encode);
  encode_command->add_flag("--special", encode->special,
                           "Special tokens spelled in the text become those tokens");
  encode_command->callback([encode] { Encode(*encode); });
  const auto decode = std::make_shared<CodeFlags>();
  AddCode(*command, "decode", "Turn token ids, separated by white space, into text", decode)
      ->callback([decode] { Decode(*decode); });
}

}  // namespace terrace
