#include "data/documents.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/error.h"
#include "core/parallel.h"
#include "data/quoted.h"

namespace terrace {
namespace {

constexpr int64_t kBatchBytes = int64_t{32} << 20;
// The system limits the number of mappings.
constexpr size_t kBatchFiles = 4096;
constexpr size_t kParseBytes = size_t{256} << 10;

namespace fs = std::filesystem;

void AppendFolder(const fs::path& folder, const CorpusOptions& options,
                  std::vector<fs::path>& files) {
  std::vector<fs::path> found;
  std::error_code error;
  fs::recursive_directory_iterator entry(folder, error);
  for (; !error && entry != fs::recursive_directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    const bool matches = std::ranges::any_of(options.extensions, [&](const std::string& extension) {
      return name.ends_with(extension);
    });
    std::error_code ignored;
    if (matches && entry->is_regular_file(ignored)) found.push_back(entry->path());
  }
  if (error) Fail("cannot read folder {}: {}", folder.string(), error.message());
  if (found.empty()) {
    Fail("folder {} has no files ending in {}", folder.string(),
         fmt::join(options.extensions, ", "));
  }
  std::ranges::sort(found);
  std::ranges::move(found, std::back_inserter(files));
}

// The end of the line, past its newline, that contains `position`.
size_t LineEnd(std::string_view text, size_t position) {
  const size_t newline = text.find('\n', position);
  return newline == std::string_view::npos ? text.size() : newline + 1;
}

bool IsBlank(std::string_view line) {
  return line.find_first_not_of(" \t\r\n") == std::string_view::npos;
}

// An error in a line, by its offset: the line's number is counted only when it is needed.
struct LineError {
  const char* begin;
  std::string what;
};

// The parser's reason without its prefix, and without what it read, which can be any bytes.
std::string ReasonOf(const nlohmann::json::exception& error) {
  std::string_view reason = error.what();
  const auto drop_through = [&](std::string_view end) {
    const size_t begin = reason.find(end);
    if (begin != std::string_view::npos) reason.remove_prefix(begin + end.size());
  };
  drop_through("] ");
  if (reason.starts_with("parse error")) drop_through(": ");
  reason = reason.substr(0, reason.find("; last read"));
  return std::string(reason.substr(0, reason.find(" parsing '")));
}

// The error of a line that does not parse. Only a handler of events learns where each one is.
class JsonErrorFinder : public nlohmann::json_sax<nlohmann::json> {
 public:
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(int64_t) override { return true; }
  bool number_unsigned(uint64_t) override { return true; }
  bool number_float(double, const std::string&) override { return true; }
  bool string(std::string&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override { return true; }
  bool key(std::string&) override { return true; }
  bool end_object() override { return true; }
  bool start_array(size_t) override { return true; }
  bool end_array() override { return true; }
  bool parse_error(size_t position, const std::string&,
                   const nlohmann::json::exception& error) override {
    error_ = fmt::format("not valid JSON: byte {} of the line: {}", position, ReasonOf(error));
    return false;
  }
  const std::string& error() const { return error_; }

 private:
  std::string error_;
};

std::string TextOfLine(std::string_view line, const std::string& field) {
  const auto object = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (object.is_discarded()) {
    JsonErrorFinder finder;
    nlohmann::json::sax_parse(line.substr(0, line.find('\n')), &finder);
    throw LineError{line.data(), finder.error()};
  }
  if (!object.is_object()) throw LineError{line.data(), "not a JSON object"};
  const auto found = object.find(field);
  if (found == object.end()) {
    throw LineError{line.data(), fmt::format("has no field {}", Quoted(field))};
  }
  if (!found->is_string()) {
    throw LineError{line.data(), fmt::format("field {} is not a string", Quoted(field))};
  }
  return found->get<std::string>();
}

}  // namespace

std::vector<fs::path> ListFiles(const CorpusOptions& options) {
  if (options.inputs.empty()) Fail("no input files");
  std::vector<fs::path> files;
  for (const fs::path& input : options.inputs) {
    std::error_code error;
    const fs::file_status status = fs::status(input, error);
    if (!fs::exists(status)) {
      Fail("cannot open {}: {}", input.string(),
           error ? error.message() : "No such file or directory");
    }
    if (fs::is_directory(status)) {
      AppendFolder(input, options, files);
    } else {
      files.push_back(input);
    }
  }
  return files;
}

DocumentReader::DocumentReader(CorpusOptions options)
    : options_(std::move(options)), files_(ListFiles(options_)) {
  for (const fs::path& file : files_) {
    std::error_code error;
    const auto size = fs::file_size(file, error);
    if (!error) total_bytes_ += static_cast<int64_t>(size);
  }
}

bool DocumentReader::Next(std::vector<std::string_view>& documents) {
  documents.clear();
  parsed_.clear();
  while (open_.size() > (last_is_unfinished_ ? 1u : 0u)) open_.pop_front();
  int64_t batch_bytes = 0;
  while (batch_bytes < kBatchBytes && open_.size() < kBatchFiles) {
    if (!last_is_unfinished_) {
      if (next_file_ == files_.size()) break;
      open_.emplace_back(files_[next_file_++]);
      position_ = 0;
    }
    const std::string_view rest = open_.back().bytes().substr(position_);
    const bool is_lines = open_.back().path().extension() == ".jsonl";
    const int64_t used = is_lines ? ReadLines(rest, documents) : ReadText(rest, documents);
    position_ += static_cast<size_t>(used);
    batch_bytes += used;
    done_bytes_ += used;
    last_is_unfinished_ = position_ < open_.back().bytes().size();
  }
  return !documents.empty() || last_is_unfinished_ || next_file_ < files_.size();
}

int64_t DocumentReader::ReadText(std::string_view text, std::vector<std::string_view>& documents) {
  const auto add = [&](std::string_view document) {
    if (!document.empty()) documents.push_back(document);
  };
  const std::string& separator = options_.separator;
  size_t begin = 0;
  if (!separator.empty()) {
    for (size_t end; (end = text.find(separator, begin)) != std::string_view::npos;) {
      add(text.substr(begin, end - begin));
      begin = end + separator.size();
    }
  }
  add(text.substr(begin));
  return static_cast<int64_t>(text.size());
}

int64_t DocumentReader::ReadLines(std::string_view rest, std::vector<std::string_view>& documents) {
  // Blocks of whole lines, parsed in parallel.
  std::vector<std::string_view> blocks;
  size_t begin = 0;
  while (begin < rest.size() && begin < static_cast<size_t>(kBatchBytes)) {
    const size_t end = LineEnd(rest, std::min(begin + kParseBytes, rest.size()) - 1);
    blocks.push_back(rest.substr(begin, end - begin));
    begin = end;
  }
  const size_t first = parsed_.size();
  parsed_.resize(first + blocks.size());
  std::vector<LineError> errors(blocks.size(), LineError{nullptr, {}});
  ParallelFor(static_cast<int64_t>(blocks.size()), 1, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      std::string_view block = blocks[static_cast<size_t>(i)];
      try {
        while (!block.empty()) {
          const std::string_view line = block.substr(0, LineEnd(block, 0));
          block.remove_prefix(line.size());
          if (IsBlank(line)) continue;
          parsed_[first + static_cast<size_t>(i)].push_back(TextOfLine(line, options_.field));
        }
      } catch (const LineError& error) {
        errors[static_cast<size_t>(i)] = error;
      }
    }
  });
  for (const LineError& error : errors) {
    if (error.begin == nullptr) continue;
    const std::string_view file = open_.back().bytes();
    Fail("{}:{}: {}", open_.back().path().string(), 1 + std::count(file.data(), error.begin, '\n'),
         error.what);
  }
  for (size_t i = first; i < parsed_.size(); ++i) {
    for (const std::string& text : parsed_[i]) {
      if (!text.empty()) documents.push_back(text);
    }
  }
  return static_cast<int64_t>(begin);
}

}  // namespace terrace
