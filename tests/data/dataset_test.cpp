#include "data/dataset.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/error.h"
#include "support/compressed.h"
#include "support/message_of.h"
#include "support/temporary_folder.h"

namespace terrace {
namespace {

void ExpectError(const std::string& part, const std::function<void()>& action) {
  const std::string error = MessageOf(action);
  EXPECT_NE(error.find(part), std::string::npos) << "'" << error << "' lacks '" << part << "'";
}

std::vector<int32_t> Count(int64_t size, int32_t first = 0) {
  std::vector<int32_t> tokens(static_cast<size_t>(size));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

void WriteShard(const std::filesystem::path& path, int64_t vocab_size,
                std::span<const int32_t> tokens) {
  ShardWriter writer(path, vocab_size);
  writer.Write(tokens);
  writer.Close();
}

template <typename T>
std::string BytesOf(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

std::string LlmcBytes(int32_t magic, int32_t version, int32_t count, const std::string& tokens) {
  std::vector<int32_t> header(256);
  header[0] = magic;
  header[1] = version;
  header[2] = count;
  return BytesOf(header) + tokens;
}

void Write(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

std::vector<int32_t> All(const Dataset& dataset) {
  std::vector<int32_t> tokens(static_cast<size_t>(dataset.size()));
  dataset.Read(0, tokens);
  return tokens;
}

TEST(TokenFile, ReadsOurShardsOfBothWidths) {
  const TemporaryFolder folder;
  for (const int64_t vocab_size : {257, 65536, 65537, 1'000'003}) {
    const std::filesystem::path path = folder / std::to_string(vocab_size);
    std::vector<int32_t> tokens = Count(255);
    tokens.push_back(static_cast<int32_t>(vocab_size - 1));
    WriteShard(path, vocab_size, tokens);
    const TokenFile file(path);
    EXPECT_EQ(file.size(), 256);
    EXPECT_EQ(file.vocab_size(), vocab_size);
    std::vector<int32_t> read(256);
    file.Read(0, vocab_size, read);
    EXPECT_EQ(read, tokens);
    file.VerifyChecksum();
  }
}

TEST(TokenFile, WritesLargeShards) {
  const TemporaryFolder folder;
  const std::vector<int32_t> tokens = Count(1'500'000);
  WriteShard(folder / "a", 2'000'000, tokens);
  std::vector<int32_t> read(tokens.size());
  const TokenFile file(folder / "a");
  file.Read(0, 2'000'000, read);
  EXPECT_TRUE(read == tokens);
  file.VerifyChecksum();
}

TEST(TokenFile, ReadsLlmcAndNanoGpt) {
  const TemporaryFolder folder;
  const std::vector<uint16_t> narrow = {1, 2, 65535};
  const std::vector<uint32_t> wide = {1, 2, 128000};
  Write(folder / "gpt2_val.bin", LlmcBytes(20240520, 1, 3, BytesOf(narrow)));
  Write(folder / "llama3_val.bin", LlmcBytes(20240801, 7, 3, BytesOf(wide)));
  Write(folder / "val.bin", BytesOf(narrow));
  std::vector<int32_t> tokens(3);
  for (const char* name : {"gpt2_val.bin", "val.bin"}) {
    TokenFile(folder / name).Read(0, 65536, tokens);
    EXPECT_EQ(tokens, (std::vector<int32_t>{1, 2, 65535})) << name;
  }
  TokenFile(folder / "llama3_val.bin").Read(0, 128256, tokens);
  EXPECT_EQ(tokens, (std::vector<int32_t>{1, 2, 128000}));
  EXPECT_EQ(TokenFile(folder / "val.bin").vocab_size(), 0);
}

TEST(TokenFile, RefusesWhatIsNone) {
  const TemporaryFolder folder;
  const auto refuses = [&](const char* name, const std::string& bytes, const char* error) {
    Write(folder / name, bytes);
    ExpectError(error, [&] { TokenFile file(folder / name); });
    ExpectError(name, [&] { TokenFile file(folder / name); });
  };
  const std::string two = BytesOf(std::vector<uint16_t>{1, 2});
  ExpectError("none.bin", [&] { TokenFile file(folder / "none.bin"); });
  refuses("empty.bin", "", "is empty");
  refuses("train.bin", "abc", "truncated");
  refuses("other.bin", "abcd", "neither");
  refuses("short.bin", LlmcBytes(20240520, 1, 3, two), "2 of 3 tokens");
  refuses("long.bin", LlmcBytes(20240520, 1, 1, two), "2 bytes after");
  refuses("old.bin", LlmcBytes(20240520, 9, 2, two), "version 9");
  refuses("cut.bin", LlmcBytes(20240520, 1, 2, two).substr(0, 500), "truncated");
  refuses("none.bin", LlmcBytes(20240520, 1, 0, ""), "no tokens");
}

TEST(TokenFile, RefusesTruncatedShardsOfAnyLength) {
  const TemporaryFolder folder;
  WriteShard(folder / "whole", 70000, Count(20));
  const std::string whole = ReadWhole(folder / "whole");
  for (size_t size = 0; size < whole.size(); ++size) {
    Write(folder / "cut", whole.substr(0, size));
    EXPECT_THROW(TokenFile(folder / "cut"), Error) << size;
  }
  Write(folder / "longer", whole + "x");
  EXPECT_THROW(TokenFile(folder / "longer"), Error);
}

// Somebody else writes it anew while it is in use.
TEST(TokenFile, TruncationMeanwhileIsAnError) {
  const TemporaryFolder folder;
  WriteShard(folder / "a.bin", 200'000, Count(200'000));
  const TokenFile file(folder / "a.bin");
  std::vector<int32_t> tokens(1000);
  file.Read(199'000, 200'000, tokens);
  std::filesystem::resize_file(folder / "a.bin", 400'000);
  file.Read(98'000, 200'000, tokens);
  ExpectError("a.bin was truncated", [&] { file.Read(99'500, 200'000, tokens); });
  ExpectError("a.bin was truncated", [&] { file.VerifyChecksum(); });
}

TEST(TokenFile, CompressedTokensAreNone) {
  const TemporaryFolder folder;
  Write(folder / "train.bin", Gzip(BytesOf(std::vector<uint16_t>(1000, 7))));
  ExpectError("train.bin is compressed by gzip", [&] { TokenFile file(folder / "train.bin"); });
}

TEST(Dataset, ReadingDoesNotMakeThemResident) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "AddressSanitizer takes memory of its own";
#endif
  const TemporaryFolder folder;
  Write(folder / "train.bin", "xx");
  std::filesystem::resize_file(folder / "train.bin", 100'000'000);
  const Dataset dataset(folder.path(), Split::kTrain, 65536);
  const auto resident = [] {
    std::ifstream statm("/proc/self/statm");
    int64_t size = 0;
    int64_t pages = 0;
    statm >> size >> pages;
    return pages * 4096;
  };
  const int64_t before = resident();
  EXPECT_EQ(UnigramEntropy(dataset, dataset.size()) > 0, true);
  EXPECT_LT(resident() - before, 10'000'000);
}

// As of a shell that lets a program open few.
TEST(Dataset, MayHaveMoreFilesThanMayBeOpenByDefault) {
  const TemporaryFolder folder;
  rlimit limit;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  if (limit.rlim_max < 256) GTEST_SKIP() << "the hard limit is " << limit.rlim_max;
  const rlimit few = {40, limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  for (int i = 0; i < 100; ++i) {
    WriteShard(folder / ("train-" + std::to_string(1000 + i) + ".bin"), 200, Count(1, i));
  }
  EXPECT_EQ(All(Dataset(folder.path(), Split::kTrain, 200)), Count(100));
  setrlimit(RLIMIT_NOFILE, &limit);
}

TEST(TokenFile, AnUnfinishedShardIsNone) {
  const TemporaryFolder folder;
  {
    ShardWriter writer(folder / "a", 257);
    writer.Write(Count(200));
  }
  EXPECT_THROW(TokenFile(folder / "a"), Error);
}

TEST(TokenFile, FlippedBytesAreErrorsOrFoundByTheChecksum) {
  const TemporaryFolder folder;
  WriteShard(folder / "whole", 70000, Count(20));
  const std::string whole = ReadWhole(folder / "whole");
  std::mt19937 random(2);
  for (size_t place = 0; place < whole.size(); ++place) {
    if (place >= 40 && place < sizeof(ShardHeader)) continue;  // reserved
    std::string flipped = whole;
    flipped[place] = static_cast<char>(flipped[place] ^ static_cast<char>(1 + random() % 255));
    Write(folder / "flipped", flipped);
    const std::string error = MessageOf([&] {
      const TokenFile file(folder / "flipped");
      std::vector<int32_t> tokens(static_cast<size_t>(file.size()));
      file.Read(0, 70000, tokens);
      file.VerifyChecksum();
    });
    const bool is_vocab_size = place >= 24 && place < 32;  // a number as good as another
    EXPECT_TRUE(is_vocab_size || error != "") << place;
  }
}

TEST(TokenFile, NamesAnIdBeyondTheVocabulary) {
  const TemporaryFolder folder;
  Write(folder / "val.bin", BytesOf(std::vector<uint16_t>{1, 2, 3, 50257, 4}));
  const TokenFile file(folder / "val.bin");
  std::vector<int32_t> tokens(4);
  ExpectError("val.bin: token 3 has the id 50257, beyond the vocabulary of 50257",
              [&] { file.Read(1, 50257, tokens); });
  file.Read(1, 50258, tokens);
  EXPECT_EQ(tokens, (std::vector<int32_t>{2, 3, 50257, 4}));
  Write(folder / "wide_val.bin",
        LlmcBytes(20240801, 7, 2, BytesOf(std::vector<uint32_t>{1, 0xfffffff0u})));
  tokens.resize(2);
  ExpectError("token 1 has the id 4294967280",
              [&] { TokenFile(folder / "wide_val.bin").Read(0, INT32_MAX, tokens); });
}

TEST(Dataset, JoinsTheFilesOfASplit) {
  const TemporaryFolder folder;
  WriteShard(folder / "train-00001.bin", 100, Count(3, 10));
  WriteShard(folder / "train-00000.bin", 100, Count(10));
  WriteShard(folder / "train-00002.bin", 100, Count(1, 13));
  WriteShard(folder / "val-00000.bin", 100, Count(5, 50));
  Write(folder / "notes.txt", "train");
  const Dataset train(folder.path(), Split::kTrain, 100);
  EXPECT_EQ(All(train), Count(14));
  for (int64_t first = 0; first <= 14; ++first) {
    for (int64_t count = 0; first + count <= 14; ++count) {
      std::vector<int32_t> tokens(static_cast<size_t>(count));
      train.Read(first, tokens);
      EXPECT_EQ(tokens, Count(count, static_cast<int32_t>(first)));
    }
  }
  EXPECT_EQ(All(Dataset(folder.path(), Split::kVal, 100)), Count(5, 50));
}

TEST(Dataset, TakesForeignFoldersAndSingleFiles) {
  const TemporaryFolder folder;
  const std::string tokens = BytesOf(std::vector<uint16_t>{5, 6});
  Write(folder / "fineweb_val_000000.bin", LlmcBytes(20240520, 1, 2, tokens));
  Write(folder / "train.bin", tokens);
  EXPECT_EQ(Dataset(folder.path(), Split::kVal, 100).size(), 2);
  EXPECT_EQ(All(Dataset(folder.path(), Split::kTrain, 100)), Count(2, 5));
  EXPECT_EQ(All(Dataset(folder / "train.bin", Split::kVal, 100)), Count(2, 5));
}

TEST(Dataset, SplitsAreWordsOfNames) {
  const TemporaryFolder folder;
  const auto write = [&](const char* name, int32_t token) {
    WriteShard(folder / name, 100, Count(2, token));
  };
  write("interval-train-0.bin", 10);
  write("trainval_val1.bin", 20);
  write("training.bin", 30);
  EXPECT_EQ(All(Dataset(folder.path(), Split::kTrain, 100)), Count(2, 10));
  EXPECT_EQ(All(Dataset(folder.path(), Split::kVal, 100)), Count(2, 20));
  write("val-of-train.bin", 40);
  for (const Split split : {Split::kTrain, Split::kVal}) {
    ExpectError("val-of-train.bin is named for both train and val",
                [&] { Dataset(folder.path(), split, 100); });
  }
}

TEST(Dataset, RefusesWhatDoesNotFit) {
  const TemporaryFolder folder;
  ExpectError("no train tokens", [&] { Dataset(folder.path(), Split::kTrain, 100); });
  ExpectError("none", [&] { Dataset(folder / "none", Split::kTrain, 100); });
  WriteShard(folder / "train-00000.bin", 101, Count(3));
  ExpectError("a vocabulary of 101, the model has 100",
              [&] { Dataset(folder.path(), Split::kTrain, 100); });
}

TEST(UnigramEntropy, IsThatOfTheDistribution) {
  EXPECT_NEAR(UnigramEntropy(std::vector<int64_t>{1, 1, 0, 2}), 1.5 * std::log(2.0), 1e-15);
  EXPECT_EQ(UnigramEntropy(std::vector<int64_t>{7, 0}), 0.0);
  const TemporaryFolder folder;
  std::vector<int32_t> tokens(200'000, 3);
  for (size_t i = 0; i < 100'000; i += 2) tokens[i] = 4;
  WriteShard(folder / "val-00000.bin", 10, tokens);
  const Dataset dataset(folder.path(), Split::kVal, 10);
  EXPECT_NEAR(UnigramEntropy(dataset, 100'000), std::log(2.0), 1e-12);
  EXPECT_NEAR(UnigramEntropy(dataset, 1'000'000), -0.25 * std::log(0.25) - 0.75 * std::log(0.75),
              1e-12);
}

}  // namespace
}  // namespace terrace
