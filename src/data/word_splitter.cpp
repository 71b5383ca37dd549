#include "data/word_splitter.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <array>

#include "core/error.h"
#include "data/utf8.h"

namespace terrace {
namespace {

// PCRE2's \s also matches U+180E, which has not been white space since Unicode 6.3.
#define SPACE                                                                                 \
  "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}" \
  "\\x{205f}\\x{3000}"

std::string MessageOf(int code) {
  std::array<char, 256> text{};
  pcre2_get_error_message(code, reinterpret_cast<PCRE2_UCHAR*>(text.data()), text.size());
  return text.data();
}

}  // namespace

const char* const kGpt2Pattern = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^" SPACE
                                 "\\p{L}\\p{N}]+|[" SPACE "]+(?![^" SPACE "])|[" SPACE "]+";
#undef SPACE

WordSplitter::WordSplitter(const std::string& pattern) : pattern_(pattern) {
  if (pattern.empty()) return;
  int error = 0;
  PCRE2_SIZE offset = 0;
  pcre2_code* code =
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                    PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error, &offset, nullptr);
  if (code == nullptr) {
    Fail("splitting pattern, at character {}: {}", offset, MessageOf(error));
  }
  // Where just-in-time compilation is not to be had, matching falls back to interpretation.
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
  code_ = std::shared_ptr<const void>(code, [](pcre2_code* owned) { pcre2_code_free(owned); });
}

WordIterator::WordIterator(const WordSplitter& splitter)
    : code_(splitter.code_), match_(pcre2_match_data_create(1, nullptr), [](void* owned) {
        pcre2_match_data_free(static_cast<pcre2_match_data*>(owned));
      }) {}

void WordIterator::Start(std::string_view text) {
  text_ = text;
  run_begin_ = run_end_ = position_ = 0;
}

bool WordIterator::Next(std::string_view& word) {
  if (position_ == text_.size()) return false;
  if (code_ == nullptr) {
    position_ = text_.size();
    word = text_;
    return true;
  }
  if (position_ == run_end_) {
    run_begin_ = position_;
    run_end_ += static_cast<size_t>(ValidUtf8Bytes(text_.substr(position_)));
    if (run_end_ == run_begin_) {
      while (run_end_ < text_.size() && Utf8Length(text_.substr(run_end_)) == 0) ++run_end_;
      position_ = run_end_;
      word = text_.substr(run_begin_, run_end_ - run_begin_);
      return true;
    }
  }
  auto* match = static_cast<pcre2_match_data*>(match_.get());
  const int result =
      pcre2_match(static_cast<const pcre2_code*>(code_.get()),
                  reinterpret_cast<PCRE2_SPTR>(text_.data() + run_begin_), run_end_ - run_begin_,
                  position_ - run_begin_, PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY, match, nullptr);
  size_t end = run_end_;
  if (result >= 0) {
    const PCRE2_SIZE* offsets = pcre2_get_ovector_pointer(match);
    const size_t match_begin = run_begin_ + offsets[0];
    // A gap before the match is a word of its own; the match is found again by the next call.
    end = match_begin > position_ ? match_begin : run_begin_ + offsets[1];
  } else if (result != PCRE2_ERROR_NOMATCH) {
    Fail("splitting pattern: {}", MessageOf(result));
  }
  TERRACE_CHECK(end > position_ && end <= run_end_, "the splitting pattern went backwards");
  word = text_.substr(position_, end - position_);
  position_ = end;
  return true;
}

}  // namespace terrace
