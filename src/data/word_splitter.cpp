#include "data/word_splitter.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <array>

#include "core/error.h"
#include "data/quoted.h"
#include "data/split_pattern.h"
#include "data/utf8.h"

namespace terrace {
namespace {

// Of one match. Enough for a word of megabytes, and a pattern of exponential time ends in seconds.
constexpr uint64_t kMinSteps = 10'000'000;
constexpr uint64_t kStepsPerByte = 100;
constexpr size_t kMaxStackBytes = size_t{1} << 30;
constexpr size_t kMinStackBytes = size_t{1} << 16;

std::string MessageOf(int code) {
  std::array<char, 256> text{};
  pcre2_get_error_message(code, reinterpret_cast<PCRE2_UCHAR*>(text.data()), text.size());
  return text.data();
}

std::shared_ptr<const void> Compiled(const std::string& pattern) {
  const std::string translated = ToPcre2(pattern);
  const std::unique_ptr<pcre2_compile_context, void (*)(pcre2_compile_context*)> context(
      pcre2_compile_context_create(nullptr), pcre2_compile_context_free);
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE offset = 0;
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()),
                                   translated.size(), PCRE2_UTF, &error, &offset, context.get());
  if (code == nullptr) Fail("splitting pattern {}: {}", Quoted(pattern), MessageOf(error));
  // Where just-in-time compilation is not to be had, matching falls back to interpretation.
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
  return {code, [](pcre2_code* owned) { pcre2_code_free(owned); }};
}

}  // namespace

const char* const kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

WordSplitter::WordSplitter(const std::vector<std::string>& patterns) {
  for (const std::string& pattern : patterns) codes_.push_back(Compiled(pattern));
}

WordIterator::WordIterator(const WordSplitter& splitter)
    : match_(pcre2_match_data_create(1, nullptr),
             [](void* owned) { pcre2_match_data_free(static_cast<pcre2_match_data*>(owned)); }),
      context_(
          pcre2_match_context_create(nullptr),
          [](void* owned) { pcre2_match_context_free(static_cast<pcre2_match_context*>(owned)); }),
      stack_(nullptr,
             [](void* owned) { pcre2_jit_stack_free(static_cast<pcre2_jit_stack*>(owned)); }) {
  auto* context = static_cast<pcre2_match_context*>(context_.get());
  pcre2_set_heap_limit(context, kMaxStackBytes >> 10);  // of interpretation, in KiB
  for (const auto& code : splitter.codes_) levels_.push_back({code, {}, 0, 0, 0, false});
}

void WordIterator::Start(std::string_view text, size_t offset) {
  text_ = text;
  offset_ = offset;
  run_end_ = 0;
  const uint64_t steps = kMinSteps + kStepsPerByte * text.size();
  pcre2_set_match_limit(static_cast<pcre2_match_context*>(context_.get()),
                        static_cast<uint32_t>(std::min<uint64_t>(steps, UINT32_MAX)));
  for (Level& level : levels_) level = {std::move(level.code), {}, 0, 0, 0, false};
}

bool WordIterator::Next(std::string_view& word) {
  if (!levels_.empty()) return NextOfLevel(levels_.size() - 1, word);
  if (run_end_ == text_.size()) return false;
  run_end_ = text_.size();
  word = text_;
  return true;
}

// The next run of well-formed characters, or of bytes that belong to none.
bool WordIterator::NextRun(std::string_view& run) {
  if (run_end_ == text_.size()) return false;
  const size_t begin = run_end_;
  run_end_ += static_cast<size_t>(ValidUtf8Bytes(text_.substr(begin)));
  run_is_text_ = run_end_ > begin;
  if (!run_is_text_) {
    while (run_end_ < text_.size() && Utf8Length(text_.substr(run_end_)) == 0) ++run_end_;
  }
  run = text_.substr(begin, run_end_ - begin);
  return true;
}

bool WordIterator::NextOfLevel(size_t index, std::string_view& word) {
  Level& level = levels_[index];
  while (level.position == level.text.size()) {
    std::string_view text;
    if (!(index == 0 ? NextRun(text) : NextOfLevel(index - 1, text))) return false;
    level = {std::move(level.code), text, 0, 0, 0, false};
  }
  if (!run_is_text_) {
    word = level.text;
    level.position = level.text.size();
    return true;
  }
  return NextMatch(level, word);
}

bool WordIterator::NextMatch(Level& level, std::string_view& word) {
  size_t end = level.text.size();
  if (level.match_end > level.position) {
    end = level.match_end;  // the gap before this match was the word before
  } else {
    while (level.search < level.text.size()) {
      if (Match(level) < 0) break;
      const PCRE2_SIZE* offsets =
          pcre2_get_ovector_pointer(static_cast<pcre2_match_data*>(match_.get()));
      const bool is_empty = offsets[0] == offsets[1];
      // A match of nothing right after another counts for nothing.
      if (is_empty && level.has_matched && offsets[1] == level.match_end) {
        level.search += static_cast<size_t>(Utf8Length(level.text.substr(level.search)));
        continue;
      }
      level.has_matched = true;
      level.search = level.match_end = offsets[1];
      if (offsets[1] == level.position) continue;
      end = offsets[0] > level.position ? offsets[0] : offsets[1];
      break;
    }
  }
  TERRACE_CHECK(end > level.position && end <= level.text.size(),
                "the splitting pattern went backwards");
  word = level.text.substr(level.position, end - level.position);
  level.position = end;
  return true;
}

// At or after level.search; negative when there is no match.
int WordIterator::Match(const Level& level) {
  auto* context = static_cast<pcre2_match_context*>(context_.get());
  uint32_t options = PCRE2_NO_UTF_CHECK;
  const auto match = [&] {
    return pcre2_match(static_cast<const pcre2_code*>(level.code.get()),
                       reinterpret_cast<PCRE2_SPTR>(level.text.data()), level.text.size(),
                       level.search, options, static_cast<pcre2_match_data*>(match_.get()),
                       context);
  };
  int result = match();
  if (result == PCRE2_ERROR_JIT_STACKLIMIT && stack_ == nullptr) {
    // Memory is taken as it is needed; where none can be reserved, interpretation does without.
    stack_.reset(pcre2_jit_stack_create(kMinStackBytes, kMaxStackBytes, nullptr));
    pcre2_jit_stack_assign(context, nullptr, stack_.get());
    if (stack_ == nullptr) options |= PCRE2_NO_JIT;
    result = match();
  }
  if (result >= 0 || result == PCRE2_ERROR_NOMATCH) return result;
  const size_t begin = static_cast<size_t>(level.text.data() - text_.data()) + level.search;
  Fail("the splitting pattern fails at byte {} of the text, {}...: {}", offset_ + begin,
       Quoted(text_.substr(begin, 24)), MessageOf(result));
}

}  // namespace terrace
