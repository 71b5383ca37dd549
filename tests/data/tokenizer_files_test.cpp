#include "data/tokenizer_files.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "core/error.h"
#include "data/files.h"
#include "support/message_of.h"
#include "support/temporary_folder.h"

namespace terrace {
namespace {

using nlohmann::json;

const std::filesystem::path kFolder = std::filesystem::path(TERRACE_SOURCE_TEST_DATA) / "tokenizer";

std::string Contents(const std::filesystem::path& name) { return ReadWhole(kFolder / name); }

// Either an Error of one line, or a tokenizer that works.
void ExpectErrorOrTokenizer(const std::function<Tokenizer()>& parse) {
  const std::string text = "The mill's\n wheel \xff <|endoftext|>   12";
  const std::string error = MessageOf([&] {
    const Tokenizer tokenizer = parse();
    EXPECT_EQ(tokenizer.Decode(tokenizer.Encode(text)), text);
  });
  EXPECT_EQ(error.find('\n'), std::string::npos) << error;
}

void ExpectSame(const Tokenizer& a, const Tokenizer& b) {
  EXPECT_EQ(a.spec().tokens, b.spec().tokens);
  EXPECT_EQ(a.spec().patterns, b.spec().patterns);
  EXPECT_EQ(a.spec().ignore_merges, b.spec().ignore_merges);
  EXPECT_EQ(a.end_of_text(), b.end_of_text());
  ASSERT_EQ(a.spec().merges.size(), b.spec().merges.size());
  for (size_t i = 0; i < a.spec().merges.size(); ++i) {
    EXPECT_EQ(a.spec().merges[i].left, b.spec().merges[i].left);
    EXPECT_EQ(a.spec().merges[i].right, b.spec().merges[i].right);
    EXPECT_EQ(a.spec().merges[i].result, b.spec().merges[i].result);
  }
}

// A link to its own folder, say, must not be followed for ever.
TEST(TokenizerFiles, AFolderInPlaceOfTheFileIsAnError) {
  const TemporaryFolder folder;
  std::filesystem::create_directory_symlink(folder / "", folder / "tokenizer.json");
  EXPECT_NE(MessageOf([&] { LoadTokenizer((folder / "").string()); }).find("tokenizer.json"),
            std::string::npos);
}

TEST(TokenizerFiles, ComeBackAsWritten) {
  for (const char* name : {"bpe.json", "split.json", "gpt2"}) {
    const Tokenizer tokenizer = LoadTokenizer((kFolder / name).string());
    const std::string written = ToTokenizerJson(tokenizer);
    const Tokenizer again = ParseTokenizerJson(written, name);
    ExpectSame(tokenizer, again);
    EXPECT_EQ(ToTokenizerJson(again), written);
  }
  const Tokenizer bytes = LoadTokenizer("bytes");
  ExpectSame(bytes, ParseTokenizerJson(ToTokenizerJson(bytes), "bytes"));
}

TEST(TokenizerFiles, OurOwnStyleIsReproduced) {
  EXPECT_EQ(ToTokenizerJson(LoadTokenizer((kFolder / "bpe.json").string())), Contents("bpe.json"));
}

TEST(TokenizerFiles, FoldersHoldEither) {
  const TemporaryFolder folder;
  std::filesystem::copy(kFolder / "gpt2", folder.path());
  EXPECT_TRUE(LoadTokenizer(folder.path().string()).spec().merges.size() > 100);
  std::ofstream(folder / "tokenizer.json") << ToTokenizerJson(Tokenizer::Bytes());
  EXPECT_EQ(LoadTokenizer(folder.path().string()).vocab_size(), 257);
}

TEST(TokenizerFiles, NameWhatIsMissing) {
  const TemporaryFolder folder;
  EXPECT_NE(MessageOf([&] { LoadTokenizer((folder / "none.json").string()); }).find("none.json"),
            std::string::npos);
  EXPECT_NE(MessageOf([&] { LoadTokenizer(folder.path().string()); }).find("neither"),
            std::string::npos);
  std::ofstream(folder / "empty.json").flush();
  EXPECT_NE(MessageOf([&] { LoadTokenizer((folder / "empty.json").string()); }).find("is empty"),
            std::string::npos);
}

TEST(TokenizerFiles, UnsupportedKindsAreNamed) {
  const struct {
    const char* place;  // JSON pointer
    json value;
    const char* error;
  } kCases[] = {
      {"/model/type", "WordPiece", "WordPiece"},
      {"/model/byte_fallback", true, "byte fallback"},
      {"/model/continuing_subword_prefix", "##", "continuing_subword_prefix"},
      {"/model/end_of_word_suffix", "</w>", "end_of_word_suffix"},
      {"/model/dropout", 0.1, "dropout"},
      {"/model", nullptr, "no model"},
      {"/model/vocab", json::array(), "vocabulary"},
      {"/model/vocab/a", -3, "\"a\" has no id"},
      {"/model/vocab/a", 98, "id 98"},
      {"/model/vocab/\u6c34", 99999, "not byte-level"},
      {"/model/vocab/a\nb", 99999, "\"a\\nb\" is not byte-level"},
      {"/model/merges", nullptr, "merges"},
      {"/model/merges/0", "a b c", "merge 0"},
      {"/model/merges/0", "zz zz", "\"zz\""},
      {"/normalizer", {{"type", "NFC"}}, "NFC"},
      {"/pre_tokenizer", nullptr, "pre-tokenizer"},
      {"/pre_tokenizer", {{"type", "Metaspace"}}, "Metaspace"},
      {"/pre_tokenizer/add_prefix_space", true, "add_prefix_space"},
      {"/decoder", nullptr, "decoder"},
      {"/added_tokens", 3, "added_tokens"},
      {"/added_tokens/0/lstrip", true, "lstrip"},
      {"/added_tokens/0/id", "x", "added token 0"},
      {"/added_tokens/0/id", 99999, "99999 in added_tokens"},
  };
  const json good = json::parse(Contents("bpe.json"));
  for (const auto& entry : kCases) {
    json bad = good;
    bad[json::json_pointer(entry.place)] = entry.value;
    const std::string error = MessageOf([&] { ParseTokenizerJson(bad.dump(), "bad.json"); });
    EXPECT_NE(error.find(entry.error), std::string::npos) << entry.place << ": " << error;
    EXPECT_NE(error.find("bad.json"), std::string::npos) << error;
  }
}

TEST(TokenizerFiles, MergesMayBePairsToo) {
  json file = json::parse(Contents("bpe.json"));
  for (json& merge : file["model"]["merges"]) {
    const std::string text = merge;
    merge = {text.substr(0, text.find(' ')), text.substr(text.find(' ') + 1)};
  }
  ExpectSame(ParseTokenizerJson(file.dump(), "pairs"),
             ParseTokenizerJson(Contents("bpe.json"), "strings"));
}

TEST(TokenizerFiles, SurviveTruncation) {
  const std::string full = Contents("split.json");
  for (size_t size = 0; size < full.size(); size += 61) {
    EXPECT_NE(MessageOf([&] { ParseTokenizerJson(full.substr(0, size), "cut"); }), "") << size;
  }
  const std::string vocabulary = Contents("gpt2/vocab.json");
  const std::string merges = Contents("gpt2/merges.txt");
  for (size_t size = 0; size < merges.size(); size += 7) {
    ExpectErrorOrTokenizer(
        [&] { return ParseGpt2Files(vocabulary, merges.substr(0, size), "cut"); });
  }
  for (size_t size = 0; size + 1 < vocabulary.size(); size += 61) {
    EXPECT_NE(MessageOf([&] { ParseGpt2Files(vocabulary.substr(0, size), merges, "cut"); }), "");
  }
}

TEST(TokenizerFiles, SurviveFlippedBytes) {
  std::mt19937 random(3);
  const auto flip = [&](std::string bytes) {
    for (uint32_t i = 0; i <= random() % 3; ++i) {
      bytes[random() % bytes.size()] = static_cast<char>(random() & 0xff);
    }
    return bytes;
  };
  const std::string json_file = Contents("split.json");
  const std::string vocabulary = Contents("gpt2/vocab.json");
  const std::string merges = Contents("gpt2/merges.txt");
  for (int i = 0; i < 400; ++i) {
    ExpectErrorOrTokenizer([&] { return ParseTokenizerJson(flip(json_file), "flipped"); });
    ExpectErrorOrTokenizer([&] { return ParseGpt2Files(flip(vocabulary), merges, "flipped"); });
    ExpectErrorOrTokenizer([&] { return ParseGpt2Files(vocabulary, flip(merges), "flipped"); });
  }
}

// Every value outside of the vocabulary and the merges, replaced by values of every type.
TEST(TokenizerFiles, SurviveValuesOfOtherTypes) {
  const json good = json::parse(Contents("split.json"));
  const std::vector<json> values = {nullptr,       true,           -1,        1e300, "x", "", "[a(",
                                    json::array(), json::object(), 1ull << 63};
  const json places = good.flatten();
  for (const auto& [place, original] : places.items()) {
    if (place.starts_with("/model/vocab/") || place.starts_with("/model/merges/")) continue;
    for (auto pointer = json::json_pointer(place); !pointer.empty(); pointer.pop_back()) {
      for (const json& value : values) {
        json bad = good;
        bad[pointer] = value;
        ExpectErrorOrTokenizer([&] { return ParseTokenizerJson(bad.dump(), "mistyped"); });
      }
    }
  }
}

TEST(TokenizerFiles, SurviveDeepNesting) {
  EXPECT_NE(MessageOf([] { ParseTokenizerJson(std::string(1'000'000, '['), "deep"); }), "");
  EXPECT_NE(MessageOf([] {
              ParseTokenizerJson(std::string(1'000'000, '[') + std::string(1'000'000, ']'), "deep");
            }),
            "");
}

}  // namespace
}  // namespace terrace
