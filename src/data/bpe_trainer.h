// Learns a byte-level BPE vocabulary from text.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "data/progress.h"
#include "data/tokenizer.h"

namespace terrace {

struct WordCount {
  std::string word;
  int64_t count;
};

// Counts the words (by GPT-2's pattern) of texts, over the threads of the process.
class WordCounter {
 public:
  // Words longer than this are counted in pieces: a vocabulary gains nothing from longer ones.
  static constexpr size_t kMaxWordBytes = 256;

  WordCounter();
  void Add(std::span<const std::string_view> texts);
  // In order of bytes, whatever the order of adding.
  std::vector<WordCount> Sorted() const;

 private:
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view word) const { return std::hash<std::string_view>()(word); }
  };
  using Counts = std::unordered_map<std::string, int64_t, Hash, std::equal_to<>>;

  WordSplitter splitter_;
  std::vector<Counts> counts_;  // one a thread
};

// Ids: the 256 bytes by value, then merges in order, then <|endoftext|>. Each merge is of the most
// frequent neighbouring pair, among equals of the lowest (left id, right id); the result depends
// on the counts alone. Pairs that occur once are not merged, so little text can give fewer tokens
// than `vocab_size`, which must be at least 257.
Tokenizer TrainBpe(std::span<const WordCount> words, int64_t vocab_size,
                   const ProgressCallback& progress = {});

}  // namespace terrace
