#include "data/split_pattern.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "core/error.h"
#include "data/files.h"
#include "data/word_splitter.h"

namespace terrace {
namespace {

std::vector<std::string> WordsOf(const std::vector<std::string>& patterns, std::string_view text) {
  const WordSplitter splitter(patterns);
  WordIterator iterator(splitter);
  iterator.Start(text);
  std::vector<std::string> words;
  for (std::string_view word; iterator.Next(word);) words.emplace_back(word);
  return words;
}

// Well-known tokenizers, and one pattern for each construct that PCRE2 alone reads otherwise.
TEST(SplitPattern, AgreesWithHuggingFace) {
  const auto path = std::filesystem::path(TERRACE_SOURCE_TEST_DATA) / "tokenizer" / "patterns.json";
  for (const auto& entry : nlohmann::json::parse(ReadWhole(path))) {
    const auto words = entry.at("words").get<std::vector<std::string>>();
    std::string text;
    for (const std::string& word : words) text += word;
    EXPECT_EQ(WordsOf(entry.at("patterns").get<std::vector<std::string>>(), text), words)
        << entry.at("name");
  }
}

TEST(SplitPattern, RefusesTheRestByNameAndPlace) {
  const struct {
    const char* pattern;
    const char* error;  // a part of it
  } kCases[] = {
      {"a\\1", "at character 2: the escape \"\\\\1\""},
      {"(a)\\k<1>", "at character 4"},
      {"\\g<1>", "at character 1"},
      {"ab\\Kc", "at character 3: the escape \"\\\\K\""},
      {"\\Ga", "the escape \"\\\\G\""},
      {"\\X", "the escape \"\\\\X\""},
      {"\\y", "the escape"},
      {"\\Qa\\E", "the escape"},
      {"\\pL", "a property without {}"},
      {"\\p{L", "a property without its }"},
      {"\\p{Emoji}", "the property \"\\\\p{Emoji}\""},
      {"\\p{Klingon}", "the property"},
      {"\\p{Age=6.0}", "the property"},
      {"\\xe9", "the escape \"\\\\xe9\""},
      {"\\x{110000}", "the escape"},
      {"\\ud800", "the escape"},
      {"\\u12", "the escape"},
      {"\\", "the escape"},
      {"(?~ab)", "at character 1: the group \"(?~\""},
      {"(?(1)a|b)", "the group"},
      {"(?#a)", "the group"},
      {"(?'n'a)", "the group"},
      {"(?P<n>a)", "the option \"P\""},
      {"(?s:.)", "the option \"s\""},
      {"(?x: a)", "the option \"x\""},
      {"(*FAIL)", "a repetition of nothing"},
      {"(?{a})", "the group"},
      {"*a", "a repetition of nothing"},
      {"a**", "at character 3: a repetition of a repetition"},
      {"a{2}{3}", "a repetition of a repetition"},
      {"a{3,1}", "opens no valid interval"},
      {"a{x}", "opens no valid interval"},
      {"{1}", "an unescaped {"},
      {"a{100000}", "a repetition above"},
      {"(?:a*)+", "repeating what can match nothing"},
      {"^+", "repeating what matches no characters"},
      {"\\b.*", "an unbounded repetition of ."},
      {"(?<=a+)b", "look-behind of no fixed length"},
      {"(?<!a|b{1,2})b", "look-behind of no fixed length"},
      {"(a", "a group without its )"},
      {"a)", "an unmatched )"},
      {"[a", "a class without its ]"},
      {"[]a]", "an empty class"},
      {"[a&&]", "an empty class"},
      {"[a&&^b]", "this && of a class"},
      {"[a-\\d]", "this - in a class"},
      {"[\\d-z]", "this - in a class"},
      {"[a-c-e]", "this - in a class"},
      {"[z-a]", "an empty range"},
      {"[a[^b]]", "a negated class in a class"},
      {"[[^b]]", "a negated class in a class"},
      {"[a[b&&c]]", "an intersection in a class"},
      {"[[:alpha:]]", "the bracket \"[:alpha:]\""},
      {"[[:foo:]]", "the bracket"},
      {"(?i:\u00e9)", "ignoring the case of"},
      {"(?i)stop", "ignoring the case of ff, fi, fl, ss or st"},
      {"(?i:[\\p{L}])", "ignoring the case of"},
      {"(?i:[a&&b])", "ignoring the case of"},
  };
  for (const auto& [pattern, part] : kCases) {
    try {
      const std::string translated = ToPcre2(pattern);
      ADD_FAILURE() << pattern << " became " << translated;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
          << pattern << ": " << error.what();
      EXPECT_NE(std::string(error.what()).find("at character"), std::string::npos) << error.what();
    }
  }
}

TEST(SplitPattern, DeepNestingIsRefused) {
  const std::string many(100'000, '(');
  EXPECT_THROW(ToPcre2(many), Error);
  EXPECT_THROW(ToPcre2(std::string(100'000, '[')), Error);
  std::string options;
  for (int i = 0; i < 10'000; ++i) options += "(?i)";
  EXPECT_THROW(ToPcre2(options), Error);
}

// Any pattern ends in an Error of one line or in words that are the text.
TEST(SplitPattern, SurvivesRandomPatterns) {
  const std::vector<std::string> pieces = {
      "a",      "b",    "(",   ")",        "[",       "]",       "|",        "*",
      "+",      "?",    "{",   "}",        "2",       ",",       "-",        "^",
      "$",      ".",    "\\",  "&&",       "(?:",     "(?i)",    "(?<=",     "(?!",
      "\\p{L}", "\\s",  "\\W", "\\b",      "[^",      "{1,3}",   "\\R",      "é",
      "字",     "(?m:", "(?>", "[:word:]", "\\x{41}", "\\u4e00", "\\p{Han}", "\n"};
  const std::string text = "aab ba\n\xff字é2,- \r\n";
  std::mt19937 random(7);
  int accepted = 0;
  for (int i = 0; i < 20'000; ++i) {
    std::string pattern;
    for (uint32_t count = 1 + random() % 8; count > 0; --count) {
      pattern += pieces[random() % pieces.size()];
    }
    try {
      std::string joined;
      for (const std::string& word : WordsOf({pattern}, text)) {
        ASSERT_FALSE(word.empty()) << pattern;
        joined += word;
      }
      ASSERT_EQ(joined, text) << pattern;
      ++accepted;
    } catch (const Error& error) {
      ASSERT_EQ(std::string(error.what()).find('\n'), std::string::npos) << pattern;
      ASSERT_EQ(std::string(error.what()).find("internal"), std::string::npos) << error.what();
    }
  }
  EXPECT_GT(accepted, 500);
}

}  // namespace
}  // namespace terrace
