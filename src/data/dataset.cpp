#include "data/dataset.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <numeric>

#include "core/error.h"

namespace terrace {
namespace {

bool IsLetter(char byte) { return std::isalpha(static_cast<unsigned char>(byte)) != 0; }

// Whether `word` stands in `name` with no letter before or after it.
bool HasWord(std::string_view name, std::string_view word) {
  for (size_t begin = 0; (begin = name.find(word, begin)) != std::string_view::npos; ++begin) {
    const size_t end = begin + word.size();
    const bool starts = begin == 0 || !IsLetter(name[begin - 1]);
    if (starts && (end == name.size() || !IsLetter(name[end]))) return true;
  }
  return false;
}

std::vector<std::filesystem::path> FilesOf(const std::filesystem::path& folder, Split split) {
  std::vector<std::filesystem::path> files;
  const Split other = split == Split::kTrain ? Split::kVal : Split::kTrain;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (!name.ends_with(".bin") || !HasWord(name, NameOf(split))) continue;
    if (HasWord(name, NameOf(other))) {
      Fail("{} is named for both train and val", entry.path().string());
    }
    files.push_back(entry.path());
  }
  if (error) Fail("cannot read folder {}: {}", folder.string(), error.message());
  if (files.empty()) {
    Fail("{} has no {} tokens: no file {}*.bin", folder.string(), NameOf(split), NameOf(split));
  }
  std::ranges::sort(files);
  return files;
}

}  // namespace

std::string_view NameOf(Split split) { return split == Split::kTrain ? "train" : "val"; }

Dataset::Dataset(const std::filesystem::path& path, Split split, int64_t vocab_size)
    : path_(path), vocab_size_(vocab_size) {
  std::error_code ignored;
  const bool is_folder = std::filesystem::is_directory(path, ignored);
  for (const auto& file : is_folder ? FilesOf(path, split) : std::vector{path}) {
    files_.emplace_back(file);
    if (files_.back().vocab_size() > vocab_size) {
      Fail("{} was made for a vocabulary of {}, the model has {}", file.string(),
           files_.back().vocab_size(), vocab_size);
    }
    starts_.push_back(starts_.back() + files_.back().size());
  }
}

void Dataset::Read(int64_t first, std::span<int32_t> out) const {
  TERRACE_CHECK(first >= 0 && first + static_cast<int64_t>(out.size()) <= size(),
                "tokens [{}, {}) of {}", first, first + static_cast<int64_t>(out.size()), size());
  auto end = std::upper_bound(starts_.begin(), starts_.end(), first);
  while (!out.empty()) {
    const size_t file = static_cast<size_t>(end - starts_.begin()) - 1;
    const size_t count = std::min(out.size(), static_cast<size_t>(*end - first));
    files_[file].Read(first - starts_[file], vocab_size_, out.first(count));
    out = out.subspan(count);
    first = *end++;
  }
}

double UnigramEntropy(const Dataset& dataset, int64_t tokens) {
  std::vector<int64_t> counts(static_cast<size_t>(dataset.vocab_size()));
  std::vector<int32_t> block(size_t{1} << 16);
  const int64_t size = std::min(tokens, dataset.size());
  for (int64_t first = 0; first < size; first += static_cast<int64_t>(block.size())) {
    block.resize(std::min(block.size(), static_cast<size_t>(size - first)));
    dataset.Read(first, block);
    for (const int32_t token : block) ++counts[static_cast<size_t>(token)];
  }
  return UnigramEntropy(counts);
}

double UnigramEntropy(std::span<const int64_t> counts) {
  const double total =
      static_cast<double>(std::accumulate(counts.begin(), counts.end(), int64_t{0}));
  double entropy = 0;
  for (const int64_t count : counts) {
    if (count == 0) continue;
    const double probability = static_cast<double>(count) / total;
    entropy -= probability * std::log(probability);
  }
  return entropy;
}

}  // namespace terrace
