// The documents of a corpus: files and folders of plain text and of JSON lines.
#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "data/files.h"

namespace terrace {

struct CorpusOptions {
  // Files of any name, and folders, which are searched recursively.
  std::vector<std::filesystem::path> inputs;
  // Endings of the names that are taken from folders.
  std::vector<std::string> extensions = {".txt", ".md", ".rst", ".jsonl"};
  // The member of each JSON line that is the text.
  std::string field = "text";
  // What stands between documents in plain text; empty: each file is one document.
  std::string separator;
};

// The files of the inputs, in the order given; those of a folder sorted by path. Hidden files are
// taken too; links to folders are not followed. Throws Error when an input is missing or
// a folder has no matching file.
std::vector<std::filesystem::path> ListFiles(const CorpusOptions& options);

// Reads documents in batches of limited size. Files named *.jsonl have a JSON object a line
// (blank lines are skipped), all others are plain text, any bytes. Empty documents are skipped.
class DocumentReader {
 public:
  explicit DocumentReader(CorpusOptions options);

  // The next documents in order, about 32 MiB, or more where a single document is larger: it is
  // a mapping, not a copy. Views stay until the next call. False, and no documents, at the end.
  // Throws Error naming the file, and the line where JSON is invalid or has no such text.
  bool Next(std::vector<std::string_view>& documents);

  int64_t files() const { return static_cast<int64_t>(files_.size()); }
  int64_t total_bytes() const { return total_bytes_; }  // 0 for pipes
  int64_t done_bytes() const { return done_bytes_; }    // handed out so far

 private:
  int64_t ReadText(std::string_view text, std::vector<std::string_view>& documents);
  int64_t ReadLines(std::string_view rest, std::vector<std::string_view>& documents);

  CorpusOptions options_;
  std::vector<std::filesystem::path> files_;
  int64_t total_bytes_ = 0;
  int64_t done_bytes_ = 0;
  size_t next_file_ = 0;
  // Files of the current batch; the last may have more to give, from position_ on.
  std::deque<MappedFile> open_;
  bool last_is_unfinished_ = false;
  size_t position_ = 0;
  std::vector<std::vector<std::string>> parsed_;  // texts of JSON lines
};

}  // namespace terrace
