// Splits text into the words within which byte pairs are merged.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace terrace {

// GPT-2's pattern: English contractions, runs of letters, of digits and of other characters (each
// with one leading space), runs of white space.
extern const char* const kGpt2Pattern;

// Compiled splitting patterns, in the syntax of tokenizer.json (split_pattern.h). Immutable and
// cheap to copy; threads share it, each with a WordIterator of its own.
class WordSplitter {
 public:
  // Each pattern splits the words of the one before it, which are texts of their own to it. Without
  // a pattern the whole text is one word. Throws Error for a pattern that is invalid or
  // unsupported.
  explicit WordSplitter(const std::vector<std::string>& patterns);

 private:
  friend class WordIterator;
  std::vector<std::shared_ptr<const void>> codes_;
};

// Goes through the words of a text; concatenated, they are the text. Matches of the pattern are
// words, and so are the gaps between them; a match of nothing ends a word. Text need not be valid
// UTF-8: each run of bytes that belongs to no well-formed character is a word, and the patterns
// never see it.
class WordIterator {
 public:
  explicit WordIterator(const WordSplitter& splitter);

  // `text` must stay until the last word was taken; it lies at byte `offset` of its document, which
  // errors tell.
  void Start(std::string_view text, size_t offset = 0);
  // False at the end. Throws Error, with the place in the document, when a match takes more than
  // a hundred steps for each byte of the text and 10 million, or more than 1 GiB of scratch: about
  // 20 million repeats of a group.
  bool Next(std::string_view& word);

 private:
  // One pattern at work on one word of the pattern before it. Offsets in `text`.
  struct Level {
    std::shared_ptr<const void> code;
    std::string_view text;
    size_t position = 0;   // words before it were taken
    size_t search = 0;     // where the next match may start
    size_t match_end = 0;  // of the match found last; a word ends there
    bool has_matched = false;
  };

  bool NextRun(std::string_view& run);
  bool NextOfLevel(size_t level, std::string_view& word);
  bool NextMatch(Level& level, std::string_view& word);
  int Match(const Level& level);

  std::vector<Level> levels_;
  // Scratch of one thread.
  std::unique_ptr<void, void (*)(void*)> match_;
  std::unique_ptr<void, void (*)(void*)> context_;
  std::unique_ptr<void, void (*)(void*)> stack_;  // once a match needed one
  std::string_view text_;
  size_t offset_ = 0;
  size_t run_end_ = 0;       // in text_
  bool run_is_text_ = true;  // the run is valid UTF-8
};

}  // namespace terrace
