#include "data/tokenizer.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/parallel.h"
#include "data/byte_level.h"
#include "data/files.h"
#include "data/tokenizer_files.h"
#include "data/utf8.h"
#include "data/word_splitter.h"

namespace terrace {
namespace {

const std::filesystem::path kFolder = std::filesystem::path(TERRACE_SOURCE_TEST_DATA) / "tokenizer";

const nlohmann::json& Cases() {
  static const nlohmann::json cases = nlohmann::json::parse(ReadWhole(kFolder / "cases.json"));
  return cases;
}

std::string RandomBytes(size_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random() & 0xff);
  return bytes;
}

std::vector<std::string> WordsOf(const std::string& pattern, std::string_view text) {
  const WordSplitter splitter(pattern.empty() ? std::vector<std::string>() : std::vector{pattern});
  WordIterator iterator(splitter);
  iterator.Start(text);
  std::vector<std::string> words;
  for (std::string_view word; iterator.Next(word);) words.emplace_back(word);
  return words;
}

// Encoding as its definition has it: merge the first pair of the lowest rank, again and again.
std::vector<int32_t> EncodeWordNaively(const TokenizerSpec& spec, std::string_view word) {
  std::vector<int32_t> ids;
  for (const char byte : word) ids.push_back(static_cast<unsigned char>(byte));
  for (;;) {
    size_t best_rank = spec.merges.size();
    size_t best_place = 0;
    for (size_t i = 0; i + 1 < ids.size(); ++i) {
      for (size_t rank = 0; rank < best_rank; ++rank) {
        if (spec.merges[rank].left == ids[i] && spec.merges[rank].right == ids[i + 1]) {
          best_rank = rank;
          best_place = i;
        }
      }
    }
    if (best_rank == spec.merges.size()) return ids;
    ids[best_place] = spec.merges[best_rank].result;
    ids.erase(ids.begin() + static_cast<int64_t>(best_place) + 1);
  }
}

TEST(ByteLevel, IsABijection) {
  std::string all;
  for (int byte = 0; byte < 256; ++byte) all.push_back(static_cast<char>(byte));
  const std::string text = ToByteLevel(all);
  EXPECT_EQ(ValidUtf8Bytes(text), static_cast<int64_t>(text.size()));
  EXPECT_EQ(FromByteLevel(text), all);
  EXPECT_EQ(ToByteLevel("a b\n"), "a\u0120b\u010a");
  EXPECT_EQ(ToByteLevel("\xad\xff"), "\u0143\u00ff");
}

TEST(ByteLevel, RefusesOtherCharacters) {
  for (const char* text : {" ", "\n", "\u0144", "\u00ad", "\xc4", "\xff", "\u6c34"}) {
    EXPECT_EQ(FromByteLevel(text), std::nullopt) << text;
  }
}

TEST(Utf8, KnowsWellFormedSequences) {
  for (const char* text :
       {"a", "\u00e9", "\u0800", "\ud7ff", "\ue000", "\U00010000", "\U0010ffff"}) {
    EXPECT_EQ(Utf8Length(text), static_cast<int>(std::string_view(text).size())) << text;
  }
  for (const char* text :
       {"\x80", "\xc1\xbf", "\xc3", "\xc3(", "\xe0\x9f\xbf", "\xed\xa0\x80", "\xe1\x80",
        "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80"}) {
    EXPECT_EQ(Utf8Length(text), 0);
  }
  EXPECT_EQ(Utf8Length(""), 0);
  EXPECT_EQ(ValidUtf8Bytes("0123456789\u00e9\xff"), 12);
}

TEST(WordSplitter, AgreesWithHuggingFace) {
  for (const auto& entry : Cases()) {
    const auto text = entry.at("text").get<std::string>();
    EXPECT_EQ(WordsOf(kGpt2Pattern, text), entry.at("words").get<std::vector<std::string>>())
        << text;
  }
}

TEST(WordSplitter, MakesWordsOfInvalidBytes) {
  using Words = std::vector<std::string>;
  EXPECT_EQ(WordsOf(kGpt2Pattern, "ab\xff\xfe cd\x80"), (Words{"ab", "\xff\xfe", " cd", "\x80"}));
  EXPECT_EQ(WordsOf(kGpt2Pattern, "\xe6\xb0"), (Words{"\xe6\xb0"}));
  EXPECT_EQ(WordsOf("", "ab\xff cd"), (Words{"ab\xff cd"}));
}

TEST(WordSplitter, KeepsWhatThePatternDoesNotMatch) {
  using Words = std::vector<std::string>;
  EXPECT_EQ(WordsOf("b+", "abbac"), (Words{"a", "bb", "ac"}));
  EXPECT_EQ(WordsOf("x*", "axx"), (Words{"a", "xx"}));
}

TEST(WordSplitter, EndsWordsWhereAPatternMatchesNothing) {
  using Words = std::vector<std::string>;
  EXPECT_EQ(WordsOf("(?=b)", "ab"), (Words{"a", "b"}));
  EXPECT_EQ(WordsOf("x*|a+", "aaxx"), (Words{"a", "a", "xx"}));
}

TEST(WordSplitter, LetsEachPatternSplitTheWordsOfTheOneBefore) {
  const WordSplitter splitter({"\\p{N}", "^.|b+"});
  WordIterator iterator(splitter);
  iterator.Start(
      "aabb1\xff"
      "cbb");
  std::vector<std::string> words;
  for (std::string_view word; iterator.Next(word);) words.emplace_back(word);
  EXPECT_EQ(words, (std::vector<std::string>{"a", "a", "bb", "1", "\xff", "c", "bb"}));
}

// A match of megabytes needs scratch of many times that, which no default limit grants.
TEST(WordSplitter, TakesLongMatchesOfRepeatedGroups) {
  for (const auto& [pattern, unit] :
       {std::pair{"(?:\\p{L}\\p{M}*)+|[^\\p{L}]+", "a"}, std::pair{"(?:\\r?\\n)+|[^\\r\\n]+", "\n"},
        std::pair{"[\\p{L}&&[^\\p{Han}]]+|\\p{Han}+", "a"}}) {
    const std::string text(2'000'000, unit[0]);
    EXPECT_EQ(WordsOf(pattern, text), std::vector{text}) << pattern;
  }
}

TEST(WordSplitter, EndsAPatternOfExponentialTime) {
  const std::string text = "well " + std::string(60, 'a') + "b";
  try {
    WordsOf("(?:a|a)+c|well", text);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("at byte 4"), std::string::npos) << error.what();
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
  }
}

TEST(WordSplitter, RefusesAnInvalidPattern) {
  EXPECT_THROW(WordSplitter({"(a"}), Error);
  EXPECT_THROW(WordSplitter({"[z-a]"}), Error);
}

TEST(Tokenizer, BytesAreTheirValues) {
  const Tokenizer bytes = Tokenizer::Bytes();
  EXPECT_EQ(bytes.vocab_size(), 257);
  EXPECT_EQ(bytes.end_of_text(), 256);
  EXPECT_EQ(bytes.Encode(std::string_view("a\0\xff", 3)), (std::vector<int32_t>{97, 0, 255}));
  EXPECT_EQ(bytes.Encode(""), std::vector<int32_t>());
  EXPECT_EQ(bytes.Decode(std::vector<int32_t>{104, 105, 256}), "hi<|endoftext|>");
}

TEST(Tokenizer, AgreesWithHuggingFace) {
  const Tokenizer bpe = LoadTokenizer((kFolder / "bpe.json").string());
  const Tokenizer gpt2 = LoadTokenizer((kFolder / "gpt2").string());
  const Tokenizer split = LoadTokenizer((kFolder / "split.json").string());
  for (const auto& entry : Cases()) {
    const auto text = entry.at("text").get<std::string>();
    const auto expected = entry.at("bpe").get<std::vector<int32_t>>();
    EXPECT_EQ(bpe.Encode(text, SpecialTokens::kAsTokens), expected) << text;
    EXPECT_EQ(gpt2.Encode(text, SpecialTokens::kAsTokens), expected) << text;
    EXPECT_EQ(split.Encode(text, SpecialTokens::kAsTokens),
              entry.at("split").get<std::vector<int32_t>>())
        << text;
    EXPECT_EQ(bpe.Decode(expected), text);
  }
}

TEST(Tokenizer, TextCannotForgeSpecialTokensUnlessAsked) {
  const Tokenizer bpe = LoadTokenizer((kFolder / "bpe.json").string());
  const std::string text = "a<|endoftext|>b";
  const std::vector<int32_t> plain = bpe.Encode(text);
  EXPECT_EQ(std::ranges::count(plain, bpe.end_of_text()), 0);
  EXPECT_EQ(bpe.Decode(plain), text);
  EXPECT_EQ(bpe.Encode(text, SpecialTokens::kAsTokens),
            (std::vector<int32_t>{'a', bpe.end_of_text(), 'b'}));
}

// Every way from text to an id: a word looked up whole, merges, bytes.
TEST(Tokenizer, NeitherWordsNorMergesNorBytesMakeSpecialTokens) {
  for (const bool ignore_merges : {false, true}) {
    for (const bool listed_twice : {false, true}) {
      TokenizerSpec spec = Tokenizer::Bytes().spec();
      spec.ignore_merges = ignore_merges;
      spec.tokens.insert(spec.tokens.end(), {"<s", "<s>", "xy"});
      spec.merges = {{'<', 's', 257}, {257, '>', 258}, {'x', 'y', 259}};
      spec.added.push_back({"<s>", 258, true});
      spec.added.push_back({"\n", 260, true});
      if (listed_twice) spec.added.push_back({"<s>", 258, false});
      const Tokenizer tokenizer(spec);
      EXPECT_EQ(tokenizer.Encode("<s>"), (std::vector<int32_t>{257, '>'}));
      EXPECT_EQ(tokenizer.Encode("xy"), std::vector<int32_t>{259});
      EXPECT_EQ(tokenizer.Encode("\n"), std::vector<int32_t>{'\n'});
      const std::vector<int32_t> end = tokenizer.Encode("<|endoftext|>");
      EXPECT_EQ(std::ranges::count(end, 256), 0);
      EXPECT_EQ(tokenizer.Encode("<s>\n<|endoftext|>", SpecialTokens::kAsTokens),
                (std::vector<int32_t>{258, 260, 256}));
    }
  }
}

TEST(Tokenizer, NamesThePlaceWhereThePatternFails) {
  TokenizerSpec spec = Tokenizer::Bytes().spec();
  spec.tokens.push_back("ab");
  spec.merges = {{'a', 'b', 257}};
  spec.patterns = {"(?:a|a)+c|well"};
  try {
    Tokenizer(spec).Encode("<|endoftext|>" + std::string(60, 'a'), SpecialTokens::kAsTokens);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("at byte 13"), std::string::npos) << error.what();
  }
}

TEST(Tokenizer, GivesBackAnyBytes) {
  std::string all;
  for (int byte = 0; byte < 256; ++byte) all.push_back(static_cast<char>(byte));
  std::vector<std::string> texts = {"", std::string(3, '\0'), all, "\xe6\xb0", "a\xf0\x9f\x98"};
  for (uint32_t seed = 0; seed < 50; ++seed) texts.push_back(RandomBytes(seed * 37, seed));
  for (const char* name : {"bpe.json", "split.json", "gpt2"}) {
    const Tokenizer tokenizer = LoadTokenizer((kFolder / name).string());
    for (const std::string& text : texts) {
      EXPECT_EQ(tokenizer.Decode(tokenizer.Encode(text)), text) << name;
      EXPECT_EQ(tokenizer.Decode(tokenizer.Encode(text, SpecialTokens::kAsTokens)), text) << name;
    }
  }
}

TEST(Tokenizer, MergesAsDefinedAndIndependentlyOfTheCache) {
  TokenizerSpec spec = LoadTokenizer((kFolder / "bpe.json").string()).spec();
  spec.patterns.clear();
  const Tokenizer tokenizer(spec);
  TokenEncoder encoder(tokenizer);
  std::mt19937 random(1);
  for (int i = 0; i < 1000; ++i) {
    std::string word(1 + random() % 30, ' ');
    for (char& byte : word) byte = "eth a"[random() % 5];
    std::vector<int32_t> ids;
    encoder.Append(word, ids);
    ASSERT_EQ(ids, EncodeWordNaively(spec, word)) << word;
    ASSERT_EQ(tokenizer.Encode(word), ids) << word;
  }
}

TEST(Tokenizer, TakesLongWordsInLittleTime) {
  // Quadratic work on these would take hours.
  const Tokenizer tokenizer = LoadTokenizer((kFolder / "bpe.json").string());
  for (const std::string& unit :
       {std::string("a"), std::string(" "), std::string("then"), std::string("\xff")}) {
    std::string text;
    while (text.size() < 1'000'000) text += unit;
    EXPECT_EQ(tokenizer.Decode(tokenizer.Encode(text)), text);
  }
}

TEST(Tokenizer, IsSharedByThreads) {
  const Tokenizer tokenizer = LoadTokenizer((kFolder / "bpe.json").string());
  const std::string text = ReadWhole(kFolder / "training.txt");
  const std::vector<int32_t> expected = tokenizer.Encode(text);
  std::vector<int> equal(16);
  ParallelFor(16, 1, [&](int64_t begin, int64_t) {
    equal[static_cast<size_t>(begin)] = tokenizer.Encode(text) == expected;
  });
  EXPECT_EQ(equal, std::vector<int>(16, 1));
}

TEST(Tokenizer, NamesAnIdThatDoesNotExist) {
  const Tokenizer bytes = Tokenizer::Bytes();
  for (const int32_t id : {-1, 257, INT32_MAX}) {
    EXPECT_THROW(bytes.BytesOf(id), Error);
    EXPECT_FALSE(bytes.Has(id));
    try {
      bytes.Decode(std::vector<int32_t>{1, 2, id});
      FAIL() << id;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(std::to_string(id)), std::string::npos);
      EXPECT_NE(std::string(error.what()).find("position 2"), std::string::npos);
    }
  }
}

TEST(Tokenizer, RefusesContradictions) {
  const TokenizerSpec good = Tokenizer::Bytes().spec();
  const auto refuses = [&](const char* what, auto change) {
    TokenizerSpec spec = good;
    change(spec);
    try {
      Tokenizer tokenizer(std::move(spec));
      ADD_FAILURE() << what;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(what), std::string::npos) << error.what();
    }
  };
  refuses("no token for the byte 0x41", [](TokenizerSpec& spec) { spec.tokens['A'].clear(); });
  refuses("no token for the byte 0x41", [](TokenizerSpec& spec) {
    spec.added.push_back({"A", 'A', true});
  });
  refuses("does not exist", [](TokenizerSpec& spec) { spec.merges = {{1, 2, 300}}; });
  refuses("does not exist", [](TokenizerSpec& spec) { spec.merges = {{-1, 2, 3}}; });
  refuses("not its parts", [](TokenizerSpec& spec) { spec.merges = {{1, 2, 3}}; });
  refuses("twice", [](TokenizerSpec& spec) {
    spec.tokens.push_back("ab");
    spec.merges = {{'a', 'b', 257}, {'a', 'b', 257}};
  });
  refuses("of another token", [](TokenizerSpec& spec) { spec.added.push_back({"x", 'a', false}); });
  refuses("outside of", [](TokenizerSpec& spec) { spec.added.push_back({"x", -1, false}); });
  refuses("outside of", [](TokenizerSpec& spec) { spec.added.push_back({"x", 1 << 30, false}); });
  refuses("is empty", [](TokenizerSpec& spec) { spec.added.push_back({"", 300, false}); });
  refuses("pattern", [](TokenizerSpec& spec) { spec.patterns = {"("}; });
}

TEST(Tokenizer, TakesTheFirstKnownEndOfText) {
  TokenizerSpec spec = Tokenizer::Bytes().spec();
  spec.added = {{"<eos>", 300, true}, {"</s>", 301, true}};
  EXPECT_EQ(Tokenizer(spec).end_of_text(), 301);
  spec.added.clear();
  EXPECT_EQ(Tokenizer(spec).end_of_text(), -1);
}

}  // namespace
}  // namespace terrace
