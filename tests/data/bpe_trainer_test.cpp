#include "data/bpe_trainer.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <filesystem>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/error.h"
#include "data/files.h"
#include "data/prepare.h"
#include "data/tokenizer_files.h"
#include "support/temporary_folder.h"

namespace terrace {
namespace {

const std::filesystem::path kFolder = std::filesystem::path(TERRACE_SOURCE_TEST_DATA) / "tokenizer";

// Training as its definition has it: count all pairs anew for each merge.
std::vector<std::pair<int32_t, int32_t>> TrainNaively(const std::vector<WordCount>& counts,
                                                      int64_t vocab_size) {
  std::vector<std::vector<int32_t>> words;
  for (const WordCount& entry : counts) {
    words.emplace_back();
    for (const char byte : entry.word) words.back().push_back(static_cast<unsigned char>(byte));
  }
  std::vector<std::pair<int32_t, int32_t>> merges;
  std::map<std::string, int32_t> ids;
  std::vector<std::string> tokens;
  for (int byte = 0; byte < 256; ++byte) tokens.emplace_back(1, static_cast<char>(byte));
  while (static_cast<int64_t>(tokens.size()) + 1 < vocab_size) {
    std::map<std::pair<int32_t, int32_t>, int64_t> pairs;
    for (size_t w = 0; w < words.size(); ++w) {
      for (size_t i = 0; i + 1 < words[w].size(); ++i) {
        pairs[{words[w][i], words[w][i + 1]}] += counts[w].count;
      }
    }
    std::pair<int32_t, int32_t> best;
    int64_t best_count = 1;
    for (const auto& [pair, count] : pairs) {
      if (count > best_count) std::tie(best, best_count) = std::tie(pair, count);
    }
    if (best_count < 2) break;
    merges.push_back(best);
    const std::string bytes = tokens[best.first] + tokens[best.second];
    const auto [entry, is_new] = ids.emplace(bytes, static_cast<int32_t>(tokens.size()));
    if (is_new) tokens.push_back(bytes);
    for (auto& word : words) {
      std::vector<int32_t> merged;
      for (size_t i = 0; i < word.size(); ++i) {
        if (i + 1 < word.size() && word[i] == best.first && word[i + 1] == best.second) {
          merged.push_back(entry->second);
          ++i;
        } else {
          merged.push_back(word[i]);
        }
      }
      word = merged;
    }
  }
  return merges;
}

std::vector<std::pair<int32_t, int32_t>> MergesOf(const Tokenizer& tokenizer) {
  std::vector<std::pair<int32_t, int32_t>> merges;
  for (const auto& merge : tokenizer.spec().merges) merges.emplace_back(merge.left, merge.right);
  return merges;
}

TEST(WordCounter, CountsWords) {
  WordCounter counter;
  const std::vector<std::string_view> texts = {"a b b", " b\xff", ""};
  counter.Add(texts);
  counter.Add(std::vector<std::string_view>{"a"});
  std::map<std::string, int64_t> counts;
  for (const WordCount& entry : counter.Sorted()) counts[entry.word] = entry.count;
  EXPECT_EQ(counts, (std::map<std::string, int64_t>{{"a", 2}, {" b", 3}, {"\xff", 1}}));
}

TEST(WordCounter, CutsLongWords) {
  WordCounter counter;
  const std::string text(2 * WordCounter::kMaxWordBytes + 3, 'a');
  counter.Add(std::vector<std::string_view>{text});
  const std::vector<WordCount> words = counter.Sorted();
  ASSERT_EQ(words.size(), 2u);
  EXPECT_EQ(words[0].word, "aaa");
  EXPECT_EQ(words[1].count, 2);
}

TEST(BpeTrainer, MergesByHand) {
  // "ab" 5 times; then "abc" (3) beats "bd"; ties go to the lowest ids.
  const std::vector<WordCount> words = {{"abc", 3}, {"ab", 2}, {"xy", 2}, {"uv", 2}, {"qr", 1}};
  const Tokenizer tokenizer = TrainBpe(words, 1000);
  EXPECT_EQ(MergesOf(tokenizer), (std::vector<std::pair<int32_t, int32_t>>{
                                     {'a', 'b'}, {256, 'c'}, {'u', 'v'}, {'x', 'y'}}));
  EXPECT_EQ(tokenizer.vocab_size(), 256 + 4 + 1);
  EXPECT_EQ(tokenizer.end_of_text(), 260);
  EXPECT_EQ(tokenizer.Encode("abc"), std::vector<int32_t>{257});
}

TEST(BpeTrainer, AgreesWithTheDefinition) {
  std::mt19937 random(5);
  for (int round = 0; round < 20; ++round) {
    std::map<std::string, int64_t> counts;
    for (int i = 0; i < 60; ++i) {
      std::string word(1 + random() % 12, ' ');
      // Few letters, so that repeats such as "aaaa" and "abab" are common.
      for (char& byte : word) byte = static_cast<char>('a' + random() % (2 + round % 3));
      counts[word] += 1 + static_cast<int64_t>(random() % 5);
    }
    std::vector<WordCount> words;
    for (const auto& [word, count] : counts) words.push_back({word, count});
    EXPECT_EQ(MergesOf(TrainBpe(words, 360)), TrainNaively(words, 360)) << round;
  }
}

TEST(BpeTrainer, HitsTheVocabularyExactly) {
  CorpusOptions corpus;
  corpus.inputs = {kFolder / "training.txt"};
  for (const int64_t size : {257, 258, 301, 450}) {
    const Tokenizer tokenizer = TrainTokenizer(corpus, size);
    EXPECT_EQ(tokenizer.vocab_size(), size);
    const std::set<std::string> tokens(tokenizer.spec().tokens.begin(),
                                       tokenizer.spec().tokens.end());
    EXPECT_EQ(static_cast<int64_t>(tokens.size()), size) << "two ids spell the same token";
  }
  EXPECT_EQ(ToTokenizerJson(TrainTokenizer(corpus, 450)), ReadWhole(kFolder / "bpe.json"));
}

TEST(BpeTrainer, DoesNotDependOnThreads) {
  CorpusOptions corpus;
  corpus.inputs = {kFolder};
  corpus.extensions = {".txt", ".py", ".json"};
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  const std::string one = ToTokenizerJson(TrainTokenizer(corpus, 700));
  omp_set_num_threads(4);
  const std::string four = ToTokenizerJson(TrainTokenizer(corpus, 700));
  omp_set_num_threads(threads);
  EXPECT_EQ(one, four);
}

TEST(BpeTrainer, ReportsProgress) {
  CorpusOptions corpus;
  corpus.inputs = {kFolder / "training.txt"};
  std::set<std::string> stages;
  TrainTokenizer(corpus, 450, [&](const ProgressReport& report) {
    EXPECT_GE(report.done, 0);
    EXPECT_LE(report.done, report.total);
    stages.emplace(report.stage);
  });
  EXPECT_EQ(stages, (std::set<std::string>{"counting words", "merging pairs"}));
}

TEST(BpeTrainer, RefusesImpossibleSizesAndEmptyText) {
  const std::vector<WordCount> words = {{"ab", 2}};
  EXPECT_THROW(TrainBpe(words, 256), Error);
  EXPECT_THROW(TrainBpe(words, -1), Error);
  EXPECT_THROW(TrainBpe(words, Tokenizer::kMaxVocabSize + 1), Error);
  const TemporaryFolder folder;
  WriteNewFile(folder / "empty.txt", "");
  CorpusOptions corpus;
  corpus.inputs = {folder / "empty.txt"};
  EXPECT_THROW(TrainTokenizer(corpus, 300), Error);
}

}  // namespace
}  // namespace terrace
