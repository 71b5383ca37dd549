#include "data/bpe_trainer.h"

#include <algorithm>
#include <queue>
#include <utility>

#include "core/error.h"
#include "core/parallel.h"

namespace terrace {
namespace {

constexpr int64_t kByteTokens = 256;
constexpr int64_t kMinFrequency = 2;

// (left id, right id) as one word whose order is that of the pair.
using PairKey = uint64_t;
PairKey KeyOf(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

struct PairStatistics {
  int64_t count = 0;
  std::vector<uint32_t> words;  // where it occurs, or did
};

struct Candidate {
  int64_t count;
  PairKey pair;
  bool operator<(const Candidate& other) const {
    return count != other.count ? count < other.count : pair > other.pair;
  }
};

// The words as tokens so far, and the counts of their pairs, kept up to date merge by merge.
class PairCounts {
 public:
  explicit PairCounts(std::span<const WordCount> words);

  // The pair to merge next; count 0 when no pair is left.
  Candidate Best();
  void Merge(PairKey pair, int32_t result);

 private:
  void Change(int32_t left, int32_t right, int64_t count, uint32_t word);
  void MergeInWord(uint32_t word, int32_t left, int32_t right, int32_t result);

  std::vector<std::vector<int32_t>> words_;
  std::vector<int64_t> word_counts_;
  std::unordered_map<PairKey, PairStatistics> pairs_;
  // Every pair is there with a count that is not below its current one.
  std::priority_queue<Candidate> candidates_;
  std::vector<PairKey> grown_;  // pairs whose count a merge raised
};

PairCounts::PairCounts(std::span<const WordCount> words) {
  for (const auto& [word, count] : words) {
    if (word.size() < 2) continue;
    const uint32_t index = static_cast<uint32_t>(words_.size());
    std::vector<int32_t> tokens;
    tokens.reserve(word.size());
    for (const char byte : word) tokens.push_back(static_cast<unsigned char>(byte));
    word_counts_.push_back(count);
    for (size_t i = 0; i + 1 < tokens.size(); ++i) Change(tokens[i], tokens[i + 1], count, index);
    words_.push_back(std::move(tokens));
  }
  grown_.clear();
  std::vector<Candidate> all;
  all.reserve(pairs_.size());
  for (const auto& [pair, statistics] : pairs_) all.push_back({statistics.count, pair});
  candidates_ = std::priority_queue<Candidate>({}, std::move(all));
}

Candidate PairCounts::Best() {
  while (!candidates_.empty()) {
    const Candidate best = candidates_.top();
    const auto found = pairs_.find(best.pair);
    const int64_t count = found == pairs_.end() ? 0 : found->second.count;
    if (count == best.count) return best;
    candidates_.pop();
    if (count > 0 && count < best.count) candidates_.push({count, best.pair});
  }
  return {0, 0};
}

void PairCounts::Change(int32_t left, int32_t right, int64_t count, uint32_t word) {
  const PairKey key = KeyOf(left, right);
  PairStatistics& statistics = pairs_[key];
  statistics.count += count;
  if (count < 0) return;
  if (statistics.words.empty() || statistics.words.back() != word) statistics.words.push_back(word);
  grown_.push_back(key);
}

void PairCounts::MergeInWord(uint32_t word, int32_t left, int32_t right, int32_t result) {
  std::vector<int32_t>& tokens = words_[word];
  const int64_t count = word_counts_[word];
  size_t size = 0;  // of the merged word, which is built in place
  for (size_t i = 0; i < tokens.size(); ++size) {
    const bool matches = i + 1 < tokens.size() && tokens[i] == left && tokens[i + 1] == right;
    if (!matches) {
      tokens[size] = tokens[i++];
      continue;
    }
    if (size > 0) {
      Change(tokens[size - 1], left, -count, word);
      Change(tokens[size - 1], result, count, word);
    }
    if (i + 2 < tokens.size()) {
      Change(right, tokens[i + 2], -count, word);
      Change(result, tokens[i + 2], count, word);
    }
    tokens[size] = result;
    i += 2;
  }
  tokens.resize(size);
}

void PairCounts::Merge(PairKey pair, int32_t result) {
  const int32_t left = static_cast<int32_t>(pair >> 32);
  const int32_t right = static_cast<int32_t>(pair & UINT32_MAX);
  const std::vector<uint32_t> affected = std::move(pairs_[pair].words);
  for (const uint32_t word : affected) MergeInWord(word, left, right, result);
  pairs_.erase(pair);
  std::sort(grown_.begin(), grown_.end());
  grown_.erase(std::unique(grown_.begin(), grown_.end()), grown_.end());
  for (const PairKey key : grown_) {
    const auto found = pairs_.find(key);
    if (found != pairs_.end() && found->second.count > 0) {
      candidates_.push({found->second.count, key});
    }
  }
  grown_.clear();
}

}  // namespace

WordCounter::WordCounter() : splitter_({kGpt2Pattern}) {}

void WordCounter::Add(std::span<const std::string_view> texts) {
  const auto count = [&](Counts& counts, std::string_view word) {
    const auto found = counts.find(word);
    if (found != counts.end()) {
      ++found->second;
    } else {
      counts.emplace(word, 1);
    }
  };
  counts_.resize(std::max(counts_.size(), static_cast<size_t>(MaxThreads())));
  ParallelFor(static_cast<int64_t>(texts.size()), 1, [&](int64_t begin, int64_t end) {
    Counts& counts = counts_[static_cast<size_t>(ThreadNumber())];
    WordIterator words(splitter_);
    for (int64_t i = begin; i < end; ++i) {
      words.Start(texts[static_cast<size_t>(i)]);
      std::string_view word;
      while (words.Next(word)) {
        for (; word.size() > kMaxWordBytes; word.remove_prefix(kMaxWordBytes)) {
          count(counts, word.substr(0, kMaxWordBytes));
        }
        count(counts, word);
      }
    }
  });
}

std::vector<WordCount> WordCounter::Sorted() const {
  std::vector<WordCount> sorted;
  for (const Counts& counts : counts_) {
    for (const auto& [word, count] : counts) sorted.push_back({word, count});
  }
  std::sort(sorted.begin(), sorted.end(),
            [](const WordCount& a, const WordCount& b) { return a.word < b.word; });
  // Threads that met the same word have neighbouring entries now.
  size_t size = 0;
  for (WordCount& entry : sorted) {
    if (size > 0 && sorted[size - 1].word == entry.word) {
      sorted[size - 1].count += entry.count;
    } else {
      if (&sorted[size] != &entry) sorted[size] = std::move(entry);
      ++size;
    }
  }
  sorted.resize(size);
  return sorted;
}

Tokenizer TrainBpe(std::span<const WordCount> words, int64_t vocab_size,
                   const ProgressCallback& progress) {
  if (vocab_size <= kByteTokens || vocab_size > Tokenizer::kMaxVocabSize) {
    Fail("a vocabulary of {} is outside of [{}, {}]", vocab_size, kByteTokens + 1,
         Tokenizer::kMaxVocabSize);
  }
  TokenizerSpec spec = Tokenizer::Bytes().spec();
  spec.tokens.resize(kByteTokens);
  spec.patterns = {kGpt2Pattern};
  // Different pairs can spell the same token, which then exists once.
  std::unordered_map<std::string, int32_t> ids;
  PairCounts pairs(words);
  while (std::cmp_less(spec.tokens.size() + 1, vocab_size)) {
    const Candidate best = pairs.Best();
    if (best.count < kMinFrequency) break;
    const int32_t left = static_cast<int32_t>(best.pair >> 32);
    const int32_t right = static_cast<int32_t>(best.pair & UINT32_MAX);
    const auto [entry, is_new] = ids.try_emplace(spec.tokens[left] + spec.tokens[right],
                                                 static_cast<int32_t>(spec.tokens.size()));
    const int32_t result = entry->second;
    if (is_new) spec.tokens.push_back(entry->first);
    spec.merges.push_back({left, right, result});
    pairs.Merge(best.pair, result);
    if (progress && result % 64 == 0) {
      progress({"merging pairs", result - kByteTokens, vocab_size - kByteTokens - 1});
    }
  }
  spec.added = {{spec.added[0].text, static_cast<int32_t>(spec.tokens.size()), true}};
  return Tokenizer(std::move(spec));
}

}  // namespace terrace
