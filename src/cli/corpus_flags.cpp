#include "cli/corpus_flags.h"

#include <CLI/CLI.hpp>

#include "cli/streams.h"

namespace terrace {

void AddCorpusFlags(CLI::App& command, CorpusOptions& corpus) {
  corpus.notice = WriteNote;
  command
      .add_option("inputs", corpus.inputs,
                  "Text files, .jsonl files (both also as .gz or .zst), and folders of both")
      ->required()
      ->type_name("INPUT");
  command
      .add_option("--extensions", corpus.extensions,
                  "Endings of the names to take from folders, also with .gz or .zst after them, "
                  "separated by commas")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->type_name("LIST")
      ->capture_default_str();
  command.add_option("--field", corpus.field, "The field of a JSON line that holds the text")
      ->type_name("NAME")
      ->capture_default_str();
  command
      .add_option("--separator", corpus.separator,
                  "What separates documents within a text file, e.g. '<|endoftext|>' "
                  "(default: a file is one document)")
      ->type_name("TEXT");
}

}  // namespace terrace
