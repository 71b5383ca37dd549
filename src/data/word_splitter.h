// Splits text into the words within which byte pairs are merged.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace terrace {

// GPT-2's pattern: English contractions, runs of letters, of digits and of other characters (each
// with one leading space), runs of white space. White space is Unicode's property White_Space.
extern const char* const kGpt2Pattern;

// A compiled regular expression (Perl syntax, UTF-8, Unicode properties). Immutable and cheap to
// copy; threads share it, each with a WordIterator of its own.
class WordSplitter {
 public:
  // An empty pattern makes the whole text one word. Throws Error for an invalid pattern.
  explicit WordSplitter(const std::string& pattern);

  const std::string& pattern() const { return pattern_; }

 private:
  friend class WordIterator;
  std::string pattern_;
  std::shared_ptr<const void> code_;
};

// Goes through the words of a text; concatenated, they are the text. Matches of the pattern are
// words, and so are the gaps between them. Text need not be valid UTF-8: each run of bytes that
// belongs to no well-formed character is a word, and the pattern never sees it.
class WordIterator {
 public:
  explicit WordIterator(const WordSplitter& splitter);

  // `text` must stay until the last word was taken.
  void Start(std::string_view text);
  // False at the end. Throws Error when the pattern needs too many resources.
  bool Next(std::string_view& word);

 private:
  std::shared_ptr<const void> code_;
  std::unique_ptr<void, void (*)(void*)> match_;  // scratch of one thread
  std::string_view text_;
  // The well-formed run being matched, and the position in it; offsets in text_.
  size_t run_begin_ = 0;
  size_t run_end_ = 0;
  size_t position_ = 0;
};

}  // namespace terrace
