#include "data/documents.h"

#include <sys/stat.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "core/counted.h"
#include "core/error.h"
#include "core/parallel.h"
#include "data/pieces.h"
#include "data/quoted.h"

namespace terrace {
namespace {

constexpr size_t kBatchBytes = size_t{8} << 20;
constexpr size_t kParseBytes = size_t{64} << 10;

namespace fs = std::filesystem;

// "3 links that lead nowhere are skipped: a, b and 1 more"
std::string Listed(std::string_view what, const std::vector<std::string>& names) {
  constexpr size_t kNamed = 8;
  std::string text = fmt::format("{}: ", what);
  for (size_t i = 0; i < std::min(names.size(), kNamed); ++i) {
    text += fmt::format("{}{}", i == 0 ? "" : ", ", names[i]);
  }
  if (names.size() > kNamed) text += fmt::format(" and {} more", names.size() - kNamed);
  return text;
}

// A name that is one printable line.
std::string Shown(std::string_view name) {
  const std::string quoted = Quoted(name);
  return quoted.size() == name.size() + 2 ? std::string(name) : quoted;
}

// Finds the files of folders.
class FolderSearch {
 public:
  explicit FolderSearch(const CorpusOptions& options) : options_(options) {}

  void Append(const fs::path& folder, std::vector<fs::path>& files) {
    const size_t before = files.size();
    const int64_t others_before = others_;
    const size_t repeated_before = repeated_.size();
    Visit(folder, files);
    if (files.size() > before || repeated_.size() > repeated_before) return;
    std::string text = fmt::format("folder {} has no files ending in {}", folder.string(),
                                   fmt::join(options_.extensions, ", "));
    if (others_ > others_before) text += "; " + OthersLine();
    Fail("{}", text);
  }

  std::vector<std::string> Notices() const {
    std::vector<std::string> notices;
    if (others_ > 0) notices.push_back(OthersLine());
    if (!dangling_.empty()) {
      notices.push_back(
          Listed(fmt::format("{} that {} nowhere {} skipped", Counted(dangling_.size(), "link"),
                             ForCount(dangling_.size(), "leads", "lead"),
                             ForCount(dangling_.size(), "is", "are")),
                 dangling_));
    }
    if (!repeated_.empty()) {
      notices.push_back(Listed(
          fmt::format("{} met a second time {} read once", Counted(repeated_.size(), "folder"),
                      ForCount(repeated_.size(), "is", "are")),
          repeated_));
    }
    return notices;
  }

 private:
  std::string OthersLine() const {
    std::vector<std::pair<int64_t, std::string>> kinds;
    for (const auto& [kind, count] : kinds_) kinds.emplace_back(-count, kind);
    std::ranges::sort(kinds);
    std::vector<std::string> names;
    for (const auto& [count, kind] : kinds) names.push_back(fmt::format("{} ({})", kind, -count));
    return Listed(fmt::format("{} of other kinds {} left out", Counted(others_, "file"),
                              ForCount(others_, "is", "are")),
                  names);
  }

  bool Matches(const fs::path& path) const {
    const std::string name = path.filename().string();
    const std::string uncompressed = UncompressedName(path);
    return std::ranges::any_of(options_.extensions, [&](const std::string& extension) {
      return name.ends_with(extension) || uncompressed.ends_with(extension);
    });
  }

  // What `terrace tokenizer train` and `terrace data prepare` leave: no text, and no surprise that
  // it is not read. `entries` are those of its folder.
  static bool IsOwn(const fs::path& path, const std::vector<fs::path>& entries) {
    const std::string name = path.filename().string();
    if (name == "tokenizer.json") return true;
    const bool prepared = std::ranges::binary_search(entries, path.parent_path() / "meta.json");
    const bool shard = name.starts_with("train-") || name.starts_with("val-");
    return prepared && (name == "meta.json" || (shard && name.ends_with(".bin")));
  }

  void CountOther(const fs::path& path) {
    ++others_;
    const std::string name = path.filename().string();
    const std::string uncompressed = UncompressedName(path);
    const std::string kind =
        fs::path(uncompressed).extension().string() + name.substr(uncompressed.size());
    ++kinds_[kind.empty() ? "no ending" : Shown(kind)];
  }

  // Entries sorted by name within each folder are sorted by path as a whole.
  void Visit(const fs::path& folder, std::vector<fs::path>& files) {
    struct stat status;
    if (stat(folder.c_str(), &status) == 0 &&
        !visited_.insert({status.st_dev, status.st_ino}).second) {
      repeated_.push_back(Shown(folder.string()));
      return;
    }
    std::error_code error;
    std::vector<fs::path> entries;
    fs::directory_iterator entry(folder, error);
    for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
      entries.push_back(entry->path());
    }
    if (error) Fail("cannot read folder {}: {}", folder.string(), error.message());
    std::ranges::sort(entries);
    for (const fs::path& path : entries) {
      const fs::file_status target = fs::status(path, error);
      if (fs::is_directory(target)) {
        Visit(path, files);
      } else if (fs::is_regular_file(target)) {
        if (Matches(path)) {
          files.push_back(path);
        } else if (!IsOwn(path, entries)) {
          CountOther(path);
        }
      } else if (fs::is_symlink(fs::symlink_status(path, error)) && !fs::exists(target)) {
        dangling_.push_back(Shown(path.string()));
      } else {
        CountOther(path);
      }
    }
  }

  const CorpusOptions& options_;
  std::set<std::pair<dev_t, ino_t>> visited_;
  std::map<std::string, int64_t> kinds_;  // of the files that are left out, by ending
  int64_t others_ = 0;
  std::vector<std::string> dangling_;
  std::vector<std::string> repeated_;
};

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

std::vector<fs::path> FindFiles(const CorpusOptions& options) {
  if (options.inputs.empty()) Fail("no input files");
  std::vector<fs::path> files;
  FolderSearch search(options);
  for (const fs::path& input : options.inputs) {
    std::error_code error;
    const fs::file_status status = fs::status(input, error);
    if (!fs::exists(status)) {
      Fail("cannot open {}: {}", input.string(),
           error ? error.message() : "No such file or directory");
    }
    if (fs::is_directory(status)) {
      search.Append(input, files);
    } else {
      files.push_back(input);
    }
  }
  for (const std::string& notice : search.Notices()) {
    if (options.notice) options.notice(notice);
  }
  return files;
}

DocumentReader::DocumentReader(CorpusOptions options, std::vector<fs::path> files,
                               int64_t piece_bytes)
    : options_(std::move(options)),
      files_(std::move(files)),
      piece_bytes_(piece_bytes),
      buffer_(kBatchBytes, '\0') {
  for (const fs::path& file : files_) {
    std::error_code error;
    const auto size = fs::file_size(file, error);
    if (!error) total_bytes_ += static_cast<int64_t>(size);
  }
}

bool DocumentReader::Next(std::vector<Piece>& pieces) {
  pieces.clear();
  parsed_.clear();
  std::copy(buffer_.begin() + static_cast<int64_t>(begin_),
            buffer_.begin() + static_cast<int64_t>(end_), buffer_.begin());
  end_ -= std::exchange(begin_, 0);
  for (;;) {
    if (file_ == nullptr) {
      if (next_file_ == files_.size()) break;
      const fs::path& path = files_[next_file_++];
      file_ = std::make_unique<TextInput>(path);
      done_bytes_ += file_->consumed();
      is_lines_ = UncompressedName(path).ends_with(".jsonl");
      line_ = 1;
    }
    if (end_ == buffer_.size()) {
      if (begin_ > 0) break;               // the next call makes room
      buffer_.resize(2 * buffer_.size());  // for a single line or piece
    }
    const int64_t consumed = file_->consumed();
    const size_t count = file_->Read(std::span(buffer_).subspan(end_));
    done_bytes_ += file_->consumed() - consumed;
    const bool at_end = count < buffer_.size() - end_;
    end_ += count;
    const std::string_view rest(buffer_.data() + begin_, end_ - begin_);
    begin_ += is_lines_ ? TakeLines(rest, at_end, pieces) : TakeText(rest, at_end, pieces);
    if (at_end) file_.reset();
  }
  return !pieces.empty() || file_ != nullptr;
}

void DocumentReader::AppendDocument(std::string_view document, std::vector<Piece>& pieces) const {
  while (!document.empty()) {
    const size_t size = static_cast<size_t>(FirstPieceBytes(document, piece_bytes_));
    pieces.push_back({document.substr(0, size), size == document.size(), current()});
    document.remove_prefix(size);
  }
}

size_t DocumentReader::TakeText(std::string_view rest, bool at_end, std::vector<Piece>& pieces) {
  const std::string& separator = options_.separator;
  size_t begin = 0;
  if (!separator.empty()) {
    for (size_t end; (end = rest.find(separator, begin)) != std::string_view::npos;) {
      AppendDocument(rest.substr(begin, end - begin), pieces);
      begin = end + separator.size();
    }
  }
  if (at_end) {
    AppendDocument(rest.substr(begin), pieces);
    return rest.size();
  }
  // Pieces can be cut as long as more than one is there that no separator can reach into.
  const size_t unsafe = separator.empty() ? 0 : separator.size() - 1;
  const size_t safe = rest.size() - std::min(rest.size(), unsafe);
  while (safe > begin && std::cmp_greater(safe - begin, piece_bytes_)) {
    const size_t size =
        static_cast<size_t>(FirstPieceBytes(rest.substr(begin, safe - begin), piece_bytes_));
    pieces.push_back({rest.substr(begin, size), false, current()});
    begin += size;
  }
  return begin;
}

size_t DocumentReader::TakeLines(std::string_view rest, bool at_end, std::vector<Piece>& pieces) {
  // Whole lines only, in blocks that are parsed in parallel.
  if (!at_end) rest = rest.substr(0, rest.rfind('\n') + 1);
  std::vector<std::string_view> blocks;
  for (size_t begin = 0; begin < rest.size();) {
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
    Fail("{}:{}: {}", file_->path().string(), line_ + std::count(rest.data(), error.begin, '\n'),
         error.what);
  }
  line_ += std::ranges::count(rest, '\n');
  for (size_t i = first; i < parsed_.size(); ++i) {
    for (const std::string& text : parsed_[i]) AppendDocument(text, pieces);
  }
  return rest.size();
}

}  // namespace terrace
