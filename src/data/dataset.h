// The tokens of a split, over all its files, as one sequence.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>
#include <vector>

#include "data/token_file.h"

namespace terrace {

enum class Split : uint8_t { kTrain, kVal };
std::string_view NameOf(Split split);  // "train", "val"

class Dataset {
 public:
  // `path` is a folder, of which the *.bin files with the split's name as a word in theirs are
  // taken, sorted by name (train-00000.bin, train.bin, fineweb_train_000001.bin); or a single file,
  // taken whatever the split. `vocab_size` is the reader's: ids are checked against it as they are
  // read. Throws Error when there is no such file, when one is named for both splits or is damaged
  // (TokenFile), or when one was written for a larger vocabulary than the reader's.
  Dataset(const std::filesystem::path& path, Split split, int64_t vocab_size);

  int64_t size() const { return starts_.back(); }  // tokens
  int64_t vocab_size() const { return vocab_size_; }
  const std::filesystem::path& path() const { return path_; }
  const std::vector<TokenFile>& files() const { return files_; }

  // Copies the tokens [first, first + out.size()), across files. Safe for several threads. Throws
  // Error naming the file and the index for an id that is not below vocab_size().
  void Read(int64_t first, std::span<int32_t> out) const;

 private:
  std::filesystem::path path_;
  int64_t vocab_size_;
  std::vector<TokenFile> files_;
  std::vector<int64_t> starts_ = {0};  // of each file; and the end
};

// Entropy of the distribution of single tokens, in nats per token: the loss of the best model that
// ignores context. Of the first `tokens` of a dataset, or of counts by id.
double UnigramEntropy(const Dataset& dataset, int64_t tokens);
double UnigramEntropy(std::span<const int64_t> counts);

}  // namespace terrace
