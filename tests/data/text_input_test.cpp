#include "data/text_input.h"

#include <gtest/gtest.h>
#include <zlib.h>
#include <zstd.h>

#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "core/error.h"
#include "data/prepare.h"
#include "data/token_file.h"
#include "support/compressed.h"
#include "support/temporary_folder.h"

namespace terrace {
namespace {

using namespace std::string_literals;

void Write(const std::filesystem::path& path, std::string_view bytes) {
  std::filesystem::remove(path);
  WriteNewFile(path, bytes);
}

// Read in parts of `part` bytes.
std::string TextOf(const std::filesystem::path& path, size_t part = 1 << 16) {
  TextInput input(path);
  std::string text;
  std::string block(part, '\0');
  for (;;) {
    const size_t count = input.Read(block);
    text.append(block, 0, count);
    if (count < part) break;
  }
  EXPECT_EQ(input.consumed(), static_cast<int64_t>(std::filesystem::file_size(path)));
  return text;
}

std::string ErrorOf(const std::filesystem::path& path) {
  try {
    TextOf(path);
  } catch (const Error& thrown) {
    const std::string error = thrown.what();
    EXPECT_EQ(error.find('\n'), std::string::npos) << error;
    EXPECT_NE(error.find(path.string()), std::string::npos) << error;
    return error;
  }
  return "";
}

void ExpectError(const std::filesystem::path& path, const std::string& part) {
  const std::string error = ErrorOf(path);
  EXPECT_NE(error.find(part), std::string::npos) << "'" << error << "' lacks '" << part << "'";
}

std::string RandomText(size_t size) {
  std::mt19937 random(3);
  std::string text;
  while (text.size() < size) text += std::to_string(random() % 100'000) + " ";
  return text;
}

class CompressedTest : public testing::TestWithParam<const char*> {
 protected:
  std::string Compressed(std::string_view text) const {
    return GetParam() == ".gz"s ? Gzip(text) : Zstandard(text);
  }
  std::filesystem::path Path() const { return folder_ / ("a.txt"s + GetParam()); }

  TemporaryFolder folder_;
};

TEST_P(CompressedTest, IsReadAsWhatItHolds) {
  for (const size_t size : {size_t{0}, size_t{1}, size_t{1000}, size_t{3'000'000}}) {
    const std::string text = size == 0 ? "" : RandomText(size);
    Write(Path(), Compressed(text));
    EXPECT_TRUE(TextOf(Path()) == text) << size;
    EXPECT_TRUE(size > 1000 || TextOf(Path(), 7) == text) << size;
  }
}

TEST_P(CompressedTest, MayHaveSeveralMembers) {
  const std::string text = RandomText(500'000);
  Write(Path(), Compressed(text) + Compressed("") + Compressed("more"));
  EXPECT_TRUE(TextOf(Path()) == text + "more");
}

TEST_P(CompressedTest, IsToldByItsStartAndNotByItsName) {
  Write(folder_ / "a.txt", Compressed("text"));
  EXPECT_EQ(TextOf(folder_ / "a.txt"), "text");
  Write(Path(), "text");
  ExpectError(Path(), "whatever its name says");
  Write(Path(), "");
  ExpectError(Path(), "whatever its name says");
}

TEST_P(CompressedTest, TruncationAtAnyPlaceIsAnError) {
  const std::string whole = Compressed(RandomText(200));
  for (size_t size = 5; size < whole.size(); ++size) {
    Write(Path(), whole.substr(0, size));
    ExpectError(Path(), "truncated");
  }
}

TEST_P(CompressedTest, WhatFollowsTheEndIsAnError) {
  Write(Path(), Compressed("text") + "garbage");
  ExpectError(Path(), "damaged");
}

// Deterministic: the same damage in every run.
TEST_P(CompressedTest, AnyDamageIsAnErrorOrHarmless) {
  const std::string text = RandomText(3000);
  const std::string whole = Compressed(text);
  std::mt19937 random(5);
  int64_t errors = 0;
  for (int i = 0; i < 400; ++i) {
    std::string damaged = whole;
    for (uint32_t change = 0; change <= random() % 3; ++change) {
      damaged[4 + random() % (damaged.size() - 4)] = static_cast<char>(random());
    }
    Write(Path(), damaged);
    errors += ErrorOf(Path()) != "";
  }
  EXPECT_GT(errors, 300);
}

INSTANTIATE_TEST_SUITE_P(, CompressedTest, testing::Values(".gz", ".zst"),
                         [](const auto& name) { return std::string(name.param + 1); });

TEST(TextInput, GzipMayBePaddedWithZeros) {
  const TemporaryFolder folder;
  Write(folder / "a.gz", Gzip("text") + std::string(1000, '\0'));
  EXPECT_EQ(TextOf(folder / "a.gz"), "text");
}

TEST(TextInput, SkipsWhatParallelCompressorsBeginWith) {
  const TemporaryFolder folder;
  Write(folder / "a.zst", "\x50\x2a\x4d\x18\x04\0\0\0abcd"s + Zstandard("text"));
  EXPECT_EQ(TextOf(folder / "a.zst"), "text");
}

TEST(TextInput, OtherFormatsAreRefusedByName) {
  const TemporaryFolder folder;
  std::string tar(1024, '\0');
  tar.replace(257, 8, "ustar\00000"s);
  const struct {
    std::string bytes;
    const char* name;
  } kCases[] = {{"\xfd\x37zXZ\0\0\4"s, "xz"},
                {"BZh91AY&SY\x12\x34"s, "bzip2"},
                {"PK\3\4\x14\0\0\0"s, "zip"},
                {"PAR1\x15\4\x15"s, "Parquet"},
                {"ARROW1\0\0\xff\xff\xff\xff"s, "Arrow"},
                {"\xff\xff\xff\xff\x10\1\0\0\x10\0\0\0"s, "Arrow"},
                {"%PDF-1.7\n%\xe2\xe3"s, "PDF"},
                {"7z\xbc\xaf\x27\x1c\0\4"s, "7-Zip"},
                {"\x93NUMPY\1\0v\0"s, "NumPy"},
                {"GGUF\3\0\0\0"s, "GGUF"},
                {"\xff\xfeh\0i\0"s, "UTF-16"},
                {tar, "tar"}};
  for (const auto& entry : kCases) {
    Write(folder / "a.txt", entry.bytes);
    ExpectError(folder / "a.txt", entry.name);
    Write(folder / "a.txt.gz", Gzip(entry.bytes));
    ExpectError(folder / "a.txt.gz", entry.name);
  }
  Write(folder / "a.txt.gz", Gzip(Gzip("twice")));
  ExpectError(folder / "a.txt.gz", "gzip");
  // Texts that begin like them, and any bytes that are nothing known.
  for (const std::string& text :
       {"GGUF is a format."s, "BZh"s, "\xff\0 x"s, "PK stands for Phil Katz."s, "\x1f"s, ""s}) {
    Write(folder / "a.txt", text);
    EXPECT_EQ(TextOf(folder / "a.txt"), text);
  }
}

TEST(TextInput, NamesLoseTheirSecondEnding) {
  EXPECT_EQ(UncompressedName("x/a.jsonl.gz"), "a.jsonl");
  EXPECT_EQ(UncompressedName("x/a.txt.zst"), "a.txt");
  EXPECT_EQ(UncompressedName("x/a.txt"), "a.txt");
}

// Files of tokens, and descriptions of corpora, damaged in all kinds of ways: never more than an
// Error. The same damage in every run.
TEST(ForeignFiles, DamageIsAnErrorOrHarmless) {
  const TemporaryFolder folder;
  std::mt19937 random(7);
  const auto damaged = [&](std::string bytes) {
    for (uint32_t change = 0; change <= random() % 4; ++change) {
      const size_t place = random() % bytes.size();
      switch (random() % 4) {
        case 0:
          bytes[place] = static_cast<char>(random());
          break;
        case 1:
          bytes.resize(place + 1);
          break;
        case 2:
          bytes.insert(place, std::string(random() % 9, static_cast<char>(random())));
          break;
        default:
          bytes[place] = static_cast<char>(random() % 2 == 0 ? 0xff : 0x7f);
      }
    }
    return bytes;
  };
  {
    ShardWriter writer(folder / "shard.bin", 70'000);
    writer.Write(std::vector<int32_t>{1, 2, 3, 69'999});
    writer.Close();
  }
  std::vector<int32_t> header(256);
  header[0] = 20240520;
  header[1] = 1;
  header[2] = 4;
  const std::vector<std::string> starts = {
      ReadWhole(folder / "shard.bin"),
      std::string(reinterpret_cast<const char*>(header.data()), 1024) + "abcdefgh"};
  int64_t sound = 0;
  for (int i = 0; i < 1500; ++i) {
    const std::filesystem::path path = folder / "train.bin";
    std::ofstream(path, std::ios::binary) << damaged(starts[static_cast<size_t>(i % 2)]);
    try {
      const TokenFile file(path);
      ASSERT_LE(file.size(), static_cast<int64_t>(std::filesystem::file_size(path)));
      std::vector<int32_t> tokens(static_cast<size_t>(file.size()));
      file.Read(0, 70'000, tokens);
      for (const int32_t token : tokens) ASSERT_TRUE(token >= 0 && token < 70'000);
      file.VerifyChecksum();
      ++sound;
    } catch (const Error& error) {
      ASSERT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    }
  }
  EXPECT_GT(sound, 0);
  EXPECT_LT(sound, 1400);

  const std::string split =
      R"({"tokens": 1, "bytes": 2, "pieces": 3, "shards": 4, "unigram_entropy_nats": 0.5})";
  const std::string meta = R"({"vocab_size": 3, "files": 1, "documents": 1, "piece_bytes": 256, )" +
                           ("\"train\": " + split + ", \"val\": " + split + "}");
  for (int i = 0; i < 1000; ++i) {
    std::ofstream(folder / "meta.json", std::ios::binary) << damaged(meta);
    try {
      ReadCorpusSummary(folder.path());
    } catch (const Error& error) {
      ASSERT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace terrace
