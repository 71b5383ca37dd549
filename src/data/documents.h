// The documents of a corpus: files and folders of plain text and of JSON lines.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/text_input.h"

namespace terrace {

struct CorpusOptions {
  // Files of any name, and folders, which are searched recursively.
  std::vector<std::filesystem::path> inputs;
  // Endings of the names that are taken from folders, also with .gz or .zst after them.
  std::vector<std::string> extensions = {".txt", ".md", ".rst", ".jsonl"};
  // The member of each JSON line that is the text.
  std::string field = "text";
  // What stands between documents in plain text; empty: each file is one document.
  std::string separator;
  // Told, before anything is read, what folders hold and is not read, a sentence each: files with
  // other endings (but for tokenizers and shards of this program), links that lead nowhere, folders
  // met twice. May be empty.
  std::function<void(const std::string&)> notice;
};

// The files of the inputs in the order given, those of a folder sorted by path. Hidden files are
// taken too. Links are followed, but no folder is read twice, so that links in a circle do no harm.
// Throws Error when an input is missing, or a folder cannot be read or has no matching file.
std::vector<std::filesystem::path> FindFiles(const CorpusOptions& options);

// A document, or a part of one that is longer than a piece may be.
struct Piece {
  std::string_view text;  // not empty
  bool ends_document;
  const std::filesystem::path* file = nullptr;  // that it is from; of the reader
};

// Reads documents in pieces, as FirstPieceBytes cuts them, in batches of limited size. Files named
// *.jsonl have a JSON object a line (blank lines are skipped), all others are plain text, any
// bytes; both may be compressed (TextInput), with .gz or .zst after the name. Empty documents are
// skipped. Memory does not depend on the size of files or documents: it is some batches, or some
// times the longest JSON line or piece where that is more.
class DocumentReader {
 public:
  // `files` as from FindFiles.
  DocumentReader(CorpusOptions options, std::vector<std::filesystem::path> files,
                 int64_t piece_bytes);

  // The next pieces in order, about 8 MiB. Views stay until the next call. False, and no pieces,
  // at the end. Throws Error naming the file, and the line where JSON is invalid or has no such
  // text.
  bool Next(std::vector<Piece>& pieces);

  int64_t total_bytes() const { return total_bytes_; }  // of the files; 0 for pipes
  int64_t done_bytes() const { return done_bytes_; }    // read so far

 private:
  // Each takes pieces from the front of `rest` and returns how many bytes it used. `at_end`: the
  // file has no more.
  size_t TakeText(std::string_view rest, bool at_end, std::vector<Piece>& pieces);
  size_t TakeLines(std::string_view rest, bool at_end, std::vector<Piece>& pieces);
  void AppendDocument(std::string_view document, std::vector<Piece>& pieces) const;
  // That is being read.
  const std::filesystem::path* current() const { return &files_[next_file_ - 1]; }

  CorpusOptions options_;
  std::vector<std::filesystem::path> files_;
  int64_t piece_bytes_;
  int64_t total_bytes_ = 0;
  int64_t done_bytes_ = 0;
  size_t next_file_ = 0;
  std::unique_ptr<TextInput> file_;  // being read
  bool is_lines_ = false;
  int64_t line_ = 1;  // of the next JSON line
  // Text of the current batch in [0, begin_), then what has been read beyond it, up to end_.
  std::string buffer_;
  size_t begin_ = 0;
  size_t end_ = 0;
  std::vector<std::vector<std::string>> parsed_;  // texts of the batch's JSON lines
};

}  // namespace terrace
