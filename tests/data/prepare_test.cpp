#include "data/prepare.h"

#include <gtest/gtest.h>
#include <omp.h>
#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/error.h"
#include "data/dataset.h"
#include "data/tokenizer_files.h"
#include "support/file_size_limit.h"
#include "support/message_of.h"
#include "support/temporary_folder.h"

namespace terrace {
namespace {

const std::filesystem::path kTokenizers =
    std::filesystem::path(TERRACE_SOURCE_TEST_DATA) / "tokenizer";

std::vector<int32_t> TokensOf(const std::filesystem::path& folder, Split split) {
  const Dataset dataset(folder, split, Tokenizer::kMaxVocabSize);
  std::vector<int32_t> tokens(static_cast<size_t>(dataset.size()));
  dataset.Read(0, tokens);
  return tokens;
}

// The texts between end-of-text tokens; the last token must be one.
// What stands between end-of-text tokens, in order.
std::vector<std::string> RunsOf(const std::filesystem::path& folder, Split split) {
  const Tokenizer tokenizer = LoadTokenizer(folder.string());
  std::vector<std::string> texts;
  std::vector<int32_t> text;
  for (const int32_t token : TokensOf(folder, split)) {
    if (token == tokenizer.end_of_text()) {
      texts.push_back(tokenizer.Decode(text));
      text.clear();
    } else {
      text.push_back(token);
    }
  }
  EXPECT_TRUE(text.empty());
  return texts;
}

std::multiset<std::string> TextsOf(const std::filesystem::path& folder, Split split) {
  const std::vector<std::string> runs = RunsOf(folder, split);
  return {runs.begin(), runs.end()};
}

std::map<std::string, std::string> FilesOf(const std::filesystem::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    files[entry.path().filename()] = ReadWhole(entry.path());
  }
  return files;
}

std::string TextOf(uint32_t seed, int words) {
  std::mt19937 random(seed);
  std::string text;
  for (int i = 0; i < words; ++i) {
    text += std::to_string(random() % 1000);
    text += random() % 12 == 0 ? "\n" : " ";
  }
  return text;
}

PrepareOptions OptionsFor(std::vector<std::filesystem::path> inputs,
                          const std::filesystem::path& output) {
  PrepareOptions options;
  options.corpus.inputs = std::move(inputs);
  options.output = output;
  return options;
}

// 200 short documents in two files.
class Prepare : public testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : {"a.txt", "b.txt"}) {
      std::string text;
      for (int i = 0; i < 100; ++i) {
        documents_.insert(std::to_string(i) + name + TextOf(static_cast<uint32_t>(i), 40));
        text += std::to_string(i) + name + TextOf(static_cast<uint32_t>(i), 40) + "###";
      }
      WriteNewFile(folder_ / name, text);
    }
  }

  PrepareOptions Options(const std::vector<std::string>& inputs, const std::string& output) {
    PrepareOptions options = OptionsFor({}, folder_ / output);
    for (const std::string& name : inputs) options.corpus.inputs.push_back(folder_ / name);
    options.corpus.separator = "###";
    return options;
  }

  TemporaryFolder folder_;
  std::multiset<std::string> documents_;
};

TEST_F(Prepare, WritesEveryDocumentOnceAndSummarises) {
  const Tokenizer tokenizer = LoadTokenizer((kTokenizers / "bpe.json").string());
  const CorpusSummary summary = PrepareCorpus(Options({"a.txt", "b.txt"}, "out"), tokenizer);
  std::multiset<std::string> texts = TextsOf(folder_ / "out", Split::kTrain);
  const std::multiset<std::string> val = TextsOf(folder_ / "out", Split::kVal);
  // 5 % of 200, give or take four standard deviations.
  EXPECT_GE(val.size(), 1u);
  EXPECT_LE(val.size(), 23u);
  EXPECT_EQ(summary.val.pieces, static_cast<int64_t>(val.size()));
  texts.insert(val.begin(), val.end());
  EXPECT_EQ(texts, documents_);

  EXPECT_EQ(summary.files, 2);
  EXPECT_EQ(summary.documents, 200);
  EXPECT_EQ(summary.vocab_size, tokenizer.vocab_size());
  EXPECT_EQ(summary.train.tokens, std::ssize(TokensOf(folder_ / "out", Split::kTrain)));
  EXPECT_EQ(summary.val.tokens, std::ssize(TokensOf(folder_ / "out", Split::kVal)));
  EXPECT_EQ(
      summary.train.bytes + summary.val.bytes,
      std::accumulate(documents_.begin(), documents_.end(), int64_t{0},
                      [](int64_t sum, const std::string& text) { return sum + std::ssize(text); }));
  const Dataset dataset(folder_ / "out", Split::kVal, summary.vocab_size);
  EXPECT_DOUBLE_EQ(summary.val.entropy_nats, UnigramEntropy(dataset, dataset.size()));

  const CorpusSummary read = ReadCorpusSummary(folder_ / "out");
  EXPECT_EQ(read.vocab_size, summary.vocab_size);
  EXPECT_EQ(read.train.tokens, summary.train.tokens);
  EXPECT_EQ(read.val.entropy_nats, summary.val.entropy_nats);
}

TEST_F(Prepare, SplitDependsOnNeitherOrderNorCompany) {
  const Tokenizer bytes = Tokenizer::Bytes();
  PrepareCorpus(Options({"a.txt", "b.txt"}, "ab"), bytes);
  PrepareCorpus(Options({"b.txt", "a.txt"}, "ba"), bytes);
  PrepareCorpus(Options({"a.txt"}, "a"), bytes);
  PrepareCorpus(Options({"b.txt"}, "b"), bytes);
  const auto together = TextsOf(folder_ / "ab", Split::kVal);
  EXPECT_EQ(TextsOf(folder_ / "ba", Split::kVal), together);
  auto apart = TextsOf(folder_ / "a", Split::kVal);
  const auto of_b = TextsOf(folder_ / "b", Split::kVal);
  apart.insert(of_b.begin(), of_b.end());
  EXPECT_EQ(apart, together);
}

TEST_F(Prepare, DoesNotDependOnThreads) {
  const Tokenizer tokenizer = LoadTokenizer((kTokenizers / "bpe.json").string());
  const int threads = omp_get_max_threads();
  std::string large;
  for (uint32_t i = 0; large.size() < 2'000'000; ++i) large += TextOf(i, 1000);
  WriteNewFile(folder_ / "large.txt", large);
  for (const int count : {1, 4}) {
    omp_set_num_threads(count);
    PrepareCorpus(Options({"a.txt", "large.txt"}, std::to_string(count)), tokenizer);
  }
  omp_set_num_threads(threads);
  EXPECT_TRUE(FilesOf(folder_ / "1") == FilesOf(folder_ / "4"));
}

TEST_F(Prepare, ShardsHoldAtMostTheirSize) {
  PrepareOptions options = Options({"a.txt", "b.txt"}, "one");
  const Tokenizer bytes = Tokenizer::Bytes();
  PrepareCorpus(options, bytes);
  options.output = folder_ / "many";
  options.shard_tokens = 1000;
  const CorpusSummary summary = PrepareCorpus(options, bytes);
  EXPECT_EQ(summary.train.shards, (summary.train.tokens + 999) / 1000);
  EXPECT_EQ(TokensOf(folder_ / "many", Split::kTrain), TokensOf(folder_ / "one", Split::kTrain));
}

TEST_F(Prepare, FractionsOfZeroAndOneGiveOneSplit) {
  const Tokenizer bytes = Tokenizer::Bytes();
  PrepareOptions options = Options({"a.txt"}, "train");
  options.val_fraction = 0;
  EXPECT_EQ(PrepareCorpus(options, bytes).train.pieces, 100);
  EXPECT_THROW(Dataset(folder_ / "train", Split::kVal, 257), Error);
  options.output = folder_ / "val";
  options.val_fraction = 1;
  EXPECT_EQ(PrepareCorpus(options, bytes).val.pieces, 100);
}

TEST_F(Prepare, NothingAppearsBeforeTheEnd) {
  PrepareOptions options = Options({"a.txt"}, "out");
  int64_t reports = 0;
  PrepareCorpus(options, Tokenizer::Bytes(), [&](const ProgressReport& report) {
    ++reports;
    EXPECT_FALSE(std::filesystem::exists(options.output));
    EXPECT_LE(report.done, report.total);
  });
  EXPECT_GT(reports, 0);
  EXPECT_TRUE(std::filesystem::exists(options.output));
}

TEST_F(Prepare, ErrorsLeaveNothing) {
  const Tokenizer bytes = Tokenizer::Bytes();
  TokenizerSpec endless = bytes.spec();
  endless.added.clear();
  WriteNewFile(folder_ / "bad.jsonl", "{\"text\": \"good\"}\n{\n");
  WriteNewFile(folder_ / "empty.txt", "");
  WriteNewFile(folder_ / "tiny.txt", "tiny");
  const auto error = [&](const std::vector<std::string>& inputs, const Tokenizer& tokenizer) {
    return MessageOf([&] { PrepareCorpus(Options(inputs, "out"), tokenizer); });
  };
  EXPECT_NE(error({"a.txt", "bad.jsonl"}, bytes).find("bad.jsonl:2"), std::string::npos);
  EXPECT_NE(error({"empty.txt"}, bytes).find("no text"), std::string::npos);
  EXPECT_NE(error({"tiny.txt"}, bytes).find("too few"), std::string::npos);
  EXPECT_NE(error({"none.txt"}, bytes).find("none.txt"), std::string::npos);
  EXPECT_NE(error({"a.txt"}, Tokenizer(endless)).find("end-of-text"), std::string::npos);
  {
    const FileSizeLimit limit(10'000);
    EXPECT_NE(error({"a.txt"}, bytes).find("cannot write"), std::string::npos);
  }
  EXPECT_EQ(FilesOf(folder_.path()).size(), 5u) << "something was left behind";
}

TEST_F(Prepare, RefusesToOverwrite) {
  PrepareCorpus(Options({"a.txt"}, "out"), Tokenizer::Bytes());
  const auto before = FilesOf(folder_ / "out");
  const std::string error =
      MessageOf([&] { PrepareCorpus(Options({"b.txt"}, "out"), Tokenizer::Bytes()); });
  EXPECT_NE(error.find("exists"), std::string::npos);
  EXPECT_TRUE(FilesOf(folder_ / "out") == before);
}

TEST_F(Prepare, RefusesImpossibleOptions) {
  const auto refuses = [&](auto change) {
    PrepareOptions options = Options({"a.txt"}, "out");
    change(options);
    EXPECT_THROW(PrepareCorpus(options, Tokenizer::Bytes()), Error);
  };
  refuses([](PrepareOptions& options) { options.val_fraction = -0.1; });
  refuses([](PrepareOptions& options) { options.val_fraction = 1.1; });
  refuses([](PrepareOptions& options) { options.val_fraction = std::nan(""); });
  refuses([](PrepareOptions& options) { options.piece_bytes = 100; });
  refuses([](PrepareOptions& options) { options.shard_tokens = 0; });
}

// A licence, a template: longer than any start that a hash could be content with.
TEST_F(Prepare, DocumentsThatBeginAlikeAreSplitToo) {
  const std::string head(2000, 'l');
  std::string text;
  for (int i = 0; i < 400; ++i) text += head + std::to_string(i) + "###";
  WriteNewFile(folder_ / "licensed.txt", text);
  PrepareOptions options = Options({"licensed.txt"}, "out");
  options.val_fraction = 0.5;
  const CorpusSummary summary = PrepareCorpus(options, Tokenizer::Bytes());
  // 200, give or take five standard deviations.
  EXPECT_GT(summary.val.pieces, 150);
  EXPECT_LT(summary.val.pieces, 250);
  EXPECT_EQ(summary.piece_bytes, options.piece_bytes);
}

// Longer than a batch of the reader, so that pieces are split across batches.
TEST(PrepareLongDocument, IsCutForBothSplitsAndLosesNothing) {
  const TemporaryFolder folder;
  std::string text;
  for (uint32_t i = 0; text.size() < 18'000'000; ++i) text += TextOf(i, 1000) + "\n\n";
  WriteNewFile(folder / "book.txt", text);
  const CorpusSummary summary =
      PrepareCorpus(OptionsFor({folder / "book.txt"}, folder / "out"), Tokenizer::Bytes());
  EXPECT_EQ(summary.documents, 1);
  EXPECT_EQ(summary.piece_bytes, 16384);
  EXPECT_EQ(summary.train.bytes + summary.val.bytes, std::ssize(text));
  const double share = static_cast<double>(summary.val.bytes) / static_cast<double>(text.size());
  EXPECT_GT(share, 0.01);
  EXPECT_LT(share, 0.12);
  // Runs of pieces of the book, whole and in order.
  size_t bytes = 0;
  for (const Split split : {Split::kTrain, Split::kVal}) {
    size_t end = 0;  // of the run before
    for (const std::string& run : RunsOf(folder / "out", split)) {
      const size_t at = text.find(run, end);
      ASSERT_NE(at, std::string::npos);
      end = at + run.size();
      bytes += run.size();
    }
  }
  EXPECT_EQ(bytes, text.size());
}

TEST(PrepareMemory, DoesNotGrowWithTheText) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "AddressSanitizer takes memory of its own";
#endif
  const TemporaryFolder folder;
  std::string lines;
  while (lines.size() < 1'000'000) lines += TextOf(static_cast<uint32_t>(lines.size()), 1000);
  const auto write = [&](const char* name, int megabytes) {
    OutputFile file(folder / name);
    for (int i = 0; i < megabytes; ++i) file.Write(lines);
    file.Close();
  };
  write("small.txt", 16);
  write("large.txt", 80);
  const auto resident_after = [&](const char* name) {
    PrepareCorpus(OptionsFor({folder / name}, folder / (std::string("of-") + name)),
                  Tokenizer::Bytes());
    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return static_cast<int64_t>(usage.ru_maxrss) * 1024;
  };
  const int64_t small = resident_after("small.txt");
  EXPECT_LT(resident_after("large.txt") - small, 12'000'000);
}

TEST(PrepareLongDocument, IsCutFinerWhereASplitWouldBeEmpty) {
  const TemporaryFolder folder;
  const std::string text = TextOf(1, 3000);  // about 12 KB, a single piece by default
  WriteNewFile(folder / "small.txt", text);
  const CorpusSummary summary =
      PrepareCorpus(OptionsFor({folder / "small.txt"}, folder / "out"), Tokenizer::Bytes());
  EXPECT_LT(summary.piece_bytes, 16384);
  EXPECT_GT(summary.val.bytes, 0);
  EXPECT_GT(summary.train.bytes, 0);
  EXPECT_EQ(summary.train.bytes + summary.val.bytes, std::ssize(text));
}

TEST(PrepareLargeVocabulary, UsesFourBytesAboveSixteenBits) {
  const TemporaryFolder folder;
  WriteNewFile(folder / "text.txt", TextOf(1, 5000));
  // All pairs of bytes, and some more tokens: 65,535, 65,536, 65,537, and an odd size above.
  for (const int64_t size : {65535, 65536, 65537, 65793}) {
    TokenizerSpec spec = Tokenizer::Bytes().spec();
    spec.tokens.resize(256);
    for (int32_t left = 255; left >= 0; --left) {
      for (int32_t right = 255; right >= 0 && std::ssize(spec.tokens) + 1 < size; --right) {
        spec.merges.push_back({left, right, static_cast<int32_t>(spec.tokens.size())});
        spec.tokens.push_back(spec.tokens[left] + spec.tokens[right]);
      }
    }
    spec.added[0].id = static_cast<int32_t>(size - 1);
    const Tokenizer tokenizer(std::move(spec));
    ASSERT_EQ(tokenizer.vocab_size(), size);
    const std::filesystem::path output = folder / std::to_string(size);
    const CorpusSummary summary =
        PrepareCorpus(OptionsFor({folder / "text.txt"}, output), tokenizer);
    const auto shard_bytes = std::filesystem::file_size(output / "train-00000.bin");
    EXPECT_EQ(shard_bytes, 64 + static_cast<size_t>(summary.train.tokens) * (size > 65536 ? 4 : 2));
    const std::vector<int32_t> tokens = TokensOf(output, Split::kTrain);
    EXPECT_EQ(*std::ranges::max_element(tokens), size - 1);
    EXPECT_EQ(TextsOf(output, Split::kTrain).size() + TextsOf(output, Split::kVal).size(),
              static_cast<size_t>(std::ranges::count(tokens, size - 1) +
                                  std::ranges::count(TokensOf(output, Split::kVal), size - 1)));
  }
}

TEST(CorpusSummary, DamageIsAnError) {
  const TemporaryFolder folder;
  EXPECT_THROW(ReadCorpusSummary(folder.path()), Error);
  WriteNewFile(folder / "meta.json", "{\"vocab_size\": 3}");
  EXPECT_NE(MessageOf([&] { ReadCorpusSummary(folder.path()); }).find("meta.json"),
            std::string::npos);
}

}  // namespace
}  // namespace terrace
