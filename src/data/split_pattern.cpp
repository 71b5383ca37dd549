#include "data/split_pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdint>
#include <vector>

#include "core/error.h"
#include "data/quoted.h"
#include "data/utf8.h"

namespace terrace {
namespace {

constexpr int kMaxDepth = 100;
constexpr int64_t kMaxRepeat = 65535;  // of PCRE2
constexpr int64_t kUnbounded = INT64_MAX;
constexpr char32_t kMaxCodePoint = 0x10ffff;
constexpr const char* kAnything = "(?s:.)";
constexpr const char* kNoNewline = "[^\\x{a}]";

// Characters of Unicode's property White_Space. PCRE2's \s has U+180E too.
#define SPACE                                                                                 \
  "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}" \
  "\\x{205f}\\x{3000}"
#define NOT_SPACE                                                                          \
  "\\x{0}-\\x{8}\\x{e}-\\x{1f}\\x{21}-\\x{84}\\x{86}-\\x{9f}\\x{a1}-\\x{167f}"             \
  "\\x{1681}-\\x{1fff}\\x{200b}-\\x{2027}\\x{202a}-\\x{202e}\\x{2030}-\\x{205e}\\x{2060}-" \
  "\\x{2fff}\\x{3001}-\\x{10ffff}"
#define WORD "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}"

// A set of characters as the inside of a class of PCRE2, and its complement where that has such a
// form too (else empty).
struct Characters {
  std::string inside;
  std::string complement;
};

const Characters kSpace = {SPACE, NOT_SPACE};
const Characters kDigit = {"\\p{Nd}", "\\P{Nd}"};
const Characters kHexDigit = {"0-9A-Fa-f",
                              "\\x{0}-\\x{2f}\\x{3a}-\\x{40}\\x{47}-\\x{60}\\x{67}-"
                              "\\x{10ffff}"};
const Characters kWord = {WORD, ""};
// Oniguruma's \w outside of a class, and its \b, take six signs of Latin-1 that \w in a class and
// Unicode do not: superscript 1 to 3 and the fractions.
const Characters kWordOutsideOfClass = {WORD "\\x{b2}\\x{b3}\\x{b9}\\x{bc}-\\x{be}", ""};

#undef SPACE
#undef NOT_SPACE
#undef WORD

struct NamedCharacters {
  std::string_view name;
  Characters characters;
};

// The POSIX brackets on whose characters all versions of Oniguruma agree.
const NamedCharacters kPosixBrackets[] = {
    {"ascii", {"\\x{0}-\\x{7f}", "\\x{80}-\\x{10ffff}"}},
    {"blank", {"\\x{9}\\p{Zs}", ""}},
    {"cntrl", {"\\p{Cc}", "\\P{Cc}"}},
    {"digit", kDigit},
    {"space", kSpace},
    {"word", kWord},
    {"xdigit", kHexDigit},
};

struct Category {
  std::string_view name;  // without spaces, hyphens and underscores, in lower case
  std::string_view short_name;
};

constexpr Category kCategories[] = {
    {"other", "C"},
    {"control", "Cc"},
    {"format", "Cf"},
    {"unassigned", "Cn"},
    {"privateuse", "Co"},
    {"surrogate", "Cs"},
    {"letter", "L"},
    {"casedletter", "L&"},
    {"lowercaseletter", "Ll"},
    {"modifierletter", "Lm"},
    {"otherletter", "Lo"},
    {"titlecaseletter", "Lt"},
    {"uppercaseletter", "Lu"},
    {"mark", "M"},
    {"spacingmark", "Mc"},
    {"enclosingmark", "Me"},
    {"nonspacingmark", "Mn"},
    {"number", "N"},
    {"decimalnumber", "Nd"},
    {"letternumber", "Nl"},
    {"othernumber", "No"},
    {"punctuation", "P"},
    {"connectorpunctuation", "Pc"},
    {"dashpunctuation", "Pd"},
    {"closepunctuation", "Pe"},
    {"finalpunctuation", "Pf"},
    {"initialpunctuation", "Pi"},
    {"otherpunctuation", "Po"},
    {"openpunctuation", "Ps"},
    {"symbol", "S"},
    {"currencysymbol", "Sc"},
    {"modifiersymbol", "Sk"},
    {"mathsymbol", "Sm"},
    {"othersymbol", "So"},
    {"separator", "Z"},
    {"lineseparator", "Zl"},
    {"paragraphseparator", "Zp"},
    {"spaceseparator", "Zs"},
};

std::string Lower(std::string_view text) {
  std::string lower(text);
  for (char& c : lower) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return lower;
}

// Whether PCRE2 knows a script of this name.
bool IsScript(const std::string& name) {
  const std::string pattern = "\\p{sc:" + name + "}";
  int error = 0;
  PCRE2_SIZE offset = 0;
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                                   PCRE2_UTF, &error, &offset, nullptr);
  pcre2_code_free(code);
  return code != nullptr;
}

// As a property of PCRE2; empty when it is neither a general category nor a script.
std::string PropertyOf(const std::string& name) {
  for (const Category& category : kCategories) {
    const bool is_cased_letter = name == "lc" && category.short_name == "L&";
    if (name == category.name || name == Lower(category.short_name) || is_cased_letter) {
      return std::string(category.short_name);
    }
  }
  return IsScript(name) ? "sc:" + name : "";
}

std::u32string Decoded(std::string_view text) {
  std::u32string decoded;
  while (!text.empty()) {
    const int length = Utf8Length(text);
    if (length == 0) Fail("the splitting pattern is not UTF-8");
    const auto byte = [&](int i) { return static_cast<char32_t>(static_cast<uint8_t>(text[i])); };
    char32_t code = length == 1 ? byte(0) : byte(0) & (0x7fu >> length);
    for (int i = 1; i < length; ++i) code = code << 6 | (byte(i) & 0x3f);
    decoded.push_back(code);
    text.remove_prefix(static_cast<size_t>(length));
  }
  return decoded;
}

bool IsDigit(char32_t c) { return c >= '0' && c <= '9'; }
bool IsLetter(char32_t c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

// One character, outside of a class or in it.
std::string Literal(char32_t c) {
  if (IsLetter(c) || IsDigit(c)) return std::string(1, static_cast<char>(c));
  return fmt::format("\\x{{{:x}}}", static_cast<uint32_t>(c));
}

std::string Range(char32_t first, char32_t last) {
  return first == last ? Literal(first) : Literal(first) + "-" + Literal(last);
}

// The other characters that an ASCII character stands for when case is ignored.
std::string OtherCases(char32_t c) {
  if (!IsLetter(c)) return "";
  std::string cases(1, static_cast<char>(c ^ 0x20));
  const char32_t lower = c | 0x20;
  if (lower == 'k') cases += "\\x{212a}";  // the Kelvin sign
  if (lower == 's') cases += "\\x{17f}";   // the long s
  return cases;
}

// General punctuation has no case: curly quotes appear in patterns that ignore it.
bool HasAsciiCases(char32_t c) { return c < 0x80 || (c >= 0x2000 && c <= 0x206f); }

// A part of the translation with how many characters it matches, at least and at most.
struct Part {
  std::string text;
  int64_t min = 0;
  int64_t max = 0;
};

int64_t Sum(int64_t a, int64_t b) {
  return a == kUnbounded || b == kUnbounded ? kUnbounded : std::min(a + b, kUnbounded / 2);
}

int64_t Product(int64_t a, int64_t b) {
  if (a == 0 || b == 0) return 0;
  if (a == kUnbounded || b == kUnbounded) return kUnbounded;
  return a > kUnbounded / 2 / b ? kUnbounded / 2 : a * b;
}

class Translator {
 public:
  explicit Translator(std::string_view pattern) : pattern_(Decoded(pattern)) {}

  std::string Translate() {
    std::string text = Joined(Alternatives());
    if (!AtEnd()) Refuse(at_, "an unmatched )");
    // With atomic groups PCRE2 10.42 goes wrong twice: it takes x+(?>y?)x for x++(?>y?)x, which
    // matches nothing, and its just-in-time code can go back into such a group.
    return is_atomic_ ? "(*NO_AUTO_POSSESS)(*NO_JIT)" + text : text;
  }

 private:
  struct Options {
    bool ignore_case = false;
    bool dot_takes_newline = false;
  };

  // A class: what all operands of && have in common, or the complement of that.
  struct Operand {
    std::string inside;                   // of a class of PCRE2
    std::vector<std::string> assertions;  // further members, as tests of the next character
    bool empty() const { return inside.empty() && assertions.empty(); }
  };
  struct Class {
    bool negated = false;
    std::vector<Operand> operands;
  };

  [[noreturn]] void Refuse(size_t position, std::string_view what) const {
    Fail("splitting pattern, at character {}: {} is not supported", position + 1, what);
  }

  bool AtEnd() const { return at_ == pattern_.size(); }
  char32_t Peek(size_t ahead = 0) const {
    return at_ + ahead < pattern_.size() ? pattern_[at_ + ahead] : U'\0';
  }
  bool Starts(std::u32string_view text) const {
    return std::u32string_view(pattern_).substr(at_).starts_with(text);
  }
  bool Take(std::u32string_view text) {
    if (!Starts(text)) return false;
    at_ += text.size();
    return true;
  }
  std::string Spelling(size_t begin, size_t end) const {
    std::string text;
    for (const char32_t c : pattern_.substr(begin, end - begin)) {
      if (c < 0x80) {
        text.push_back(static_cast<char>(c));
      } else {
        text += fmt::format("\\u{{{:x}}}", static_cast<uint32_t>(c));
      }
    }
    return Quoted(text);
  }

  static std::string Joined(const std::vector<Part>& branches) {
    std::string text;
    for (size_t i = 0; i < branches.size(); ++i) text += (i == 0 ? "" : "|") + branches[i].text;
    return text;
  }

  static Part Group(const char* opening, const std::vector<Part>& branches) {
    Part group = {opening + Joined(branches) + ")", kUnbounded, 0};
    for (const Part& branch : branches) {
      group.min = std::min(group.min, branch.min);
      group.max = std::max(group.max, branch.max);
    }
    return group;
  }

  // Up to the end of the group, whose options end there as well.
  std::vector<Part> Alternatives() {
    if (++depth_ > kMaxDepth) Refuse(at_, fmt::format("nesting of more than {} groups", kMaxDepth));
    const Options outer = options_;
    std::vector<Part> branches = {Sequence()};
    while (Take(U"|")) {
      previous_ = 0;
      branches.push_back(Sequence());
    }
    options_ = outer;
    --depth_;
    return branches;
  }

  Part Sequence() {
    Part sequence;
    while (!AtEnd() && Peek() != '|' && Peek() != ')') {
      const size_t position = at_;
      assertion_ = false;
      Part item = TakeOptions() ? Group("(?:", Alternatives()) : Repeated(Atom(), position);
      sequence.text += item.text;
      sequence.min = Sum(sequence.min, item.min);
      sequence.max = Sum(sequence.max, item.max);
    }
    return sequence;
  }

  // (?i), (?m-i) and so on, which hold for all that is left of the group, alternatives included.
  bool TakeOptions() {
    const size_t begin = at_;
    Options options = options_;
    if (!TakeOptionLetters(options)) return false;
    if (!Take(U")")) {
      at_ = begin;
      return false;
    }
    options_ = options;
    return true;
  }

  // (?i without what follows; false when this is no change of options.
  bool TakeOptionLetters(Options& options) {
    if (!Starts(U"(?")) return false;
    const char32_t first = Peek(2);
    if (!IsLetter(first) && first != '-') return false;
    at_ += 2;
    bool on = true;
    for (; Peek() != ')' && Peek() != ':'; ++at_) {
      if (Peek() == '-' && on) {
        on = false;
      } else if (Peek() == 'i') {
        options.ignore_case = on;
      } else if (Peek() == 'm') {
        options.dot_takes_newline = on;
      } else {
        Refuse(at_, fmt::format("the option {}", Spelling(at_, at_ + 1)));
      }
    }
    return true;
  }

  struct Repeat {
    int64_t lower;
    int64_t upper;
    std::string text;
    bool is_interval;
  };

  bool TakeRepeat(Repeat& repeat) {
    const size_t begin = at_;
    if (Peek() == '{') return TakeInterval(repeat);
    if (Peek() != '?' && Peek() != '*' && Peek() != '+') return false;
    repeat.lower = Peek() == '+' ? 1 : 0;
    repeat.upper = Peek() == '?' ? 1 : kUnbounded;
    repeat.is_interval = false;
    ++at_;
    if (Peek() == '?' || Peek() == '+') ++at_;  // lazy, possessive
    for (size_t i = begin; i < at_; ++i) repeat.text.push_back(static_cast<char>(pattern_[i]));
    return true;
  }

  int64_t TakeNumber() {
    const size_t begin = at_;
    int64_t number = 0;
    for (; IsDigit(Peek()); ++at_) {
      number = number * 10 + (Peek() - '0');
      if (number > kMaxRepeat) Refuse(begin, fmt::format("a repetition above {}", kMaxRepeat));
    }
    return at_ == begin ? -1 : number;
  }

  // Oniguruma knows {,n}, and neither a lazy {n} nor a possessive interval: what follows those
  // repeats the repetition.
  bool TakeInterval(Repeat& repeat) {
    const size_t begin = at_;
    ++at_;
    const int64_t lower = TakeNumber();
    int64_t upper = lower;
    if (Take(U",")) {
      upper = TakeNumber();
      if (upper < 0 && lower >= 0) upper = kUnbounded;
    }
    const bool is_fixed = lower == upper;
    if (!Take(U"}") || upper <= 0 || upper < lower) {
      Refuse(begin, "a { that opens no valid interval");
    }
    repeat.lower = std::max<int64_t>(lower, 0);
    repeat.upper = upper;
    repeat.is_interval = true;
    repeat.text = is_fixed
                      ? fmt::format("{{{}}}", lower)
                      : fmt::format("{{{},{}}}", repeat.lower,
                                    upper == kUnbounded ? std::string() : std::to_string(upper));
    if (!is_fixed && Take(U"?")) repeat.text += "?";
    return true;
  }

  Part Repeated(Part part, size_t position) {
    const bool is_assertion = assertion_;
    bool was_interval = true;
    for (int count = 0;; ++count) {
      const size_t begin = at_;
      Repeat repeat;
      if (!TakeRepeat(repeat)) return part;
      if (is_assertion) Refuse(begin, "repeating what matches no characters");
      if (!was_interval || count > 1 || (count == 1 && repeat.is_interval)) {
        Refuse(begin, "a repetition of a repetition");
      }
      if (part.min == 0 && repeat.upper > 1) {
        Refuse(position, "repeating what can match nothing");
      }
      const bool is_dot = part.text == kAnything || part.text == kNoNewline;
      if (is_dot && repeat.upper == kUnbounded && has_assertion_) {
        // Oniguruma takes the dots for all that decides where a match may start.
        Refuse(position, "an unbounded repetition of . after a test of the place");
      }
      if (count > 0) part.text = "(?:" + part.text + ")";
      const bool is_possessive = repeat.text.size() > 1 && repeat.text.ends_with('+');
      if (is_possessive && part.text[0] == '(' && part.text != kAnything) is_atomic_ = true;
      part = {part.text + repeat.text, Product(part.min, repeat.lower),
              Product(part.max, repeat.upper)};
      was_interval = repeat.is_interval;
    }
  }

  Part Assertion(std::string text) {
    assertion_ = has_assertion_ = true;
    previous_ = 0;
    return {std::move(text), 0, 0};
  }

  Part Character(std::string text) {
    previous_ = 0;
    return {std::move(text), 1, 1};
  }

  Part Character(const Characters& characters, bool negated) {
    // A single property is faster alone than in a class.
    if (characters.inside.starts_with("\\p") && !characters.complement.empty()) {
      return Character(negated ? characters.complement : characters.inside);
    }
    return Character((negated ? "[^" : "[") + characters.inside + "]");
  }

  Part Atom() {
    const size_t begin = at_;
    const char32_t c = Peek();
    switch (c) {
      case '(':
        return AtomOfGroup();
      case '[': {
        ++at_;
        return Character(Consuming(TakeClass()));
      }
      case '\\':
        return AtomOfEscape();
      case '.':
        ++at_;
        return Character(options_.dot_takes_newline ? kAnything : kNoNewline);
      case '^':  // at the start of any line, but not after the newline that ends the text
        ++at_;
        return Assertion("(?m:^)");
      case '$':
        ++at_;
        return Assertion("(?m:$)");
      case '?':
      case '*':
      case '+':
        Refuse(begin, "a repetition of nothing");
      case '{':
        Refuse(begin, "an unescaped {");
      default:
        ++at_;
        return One(c, begin);
    }
  }

  Part One(char32_t c, size_t begin) {
    if (!options_.ignore_case) return Character(Literal(c));
    if (!HasAsciiCases(c)) {
      Refuse(begin, fmt::format("ignoring the case of {}", Spelling(begin, at_)));
    }
    // Some pairs of letters are another case of one character, such as ss of U+00DF.
    const char32_t lower = IsLetter(c) ? c | 0x20 : c;
    for (const std::u32string_view pair : {U"ff", U"fi", U"fl", U"ss", U"st"}) {
      if (previous_ == pair[0] && lower == pair[1]) {
        Refuse(begin, "ignoring the case of ff, fi, fl, ss or st");
      }
    }
    const std::string cases = OtherCases(c);
    Part part = Character(cases.empty() ? Literal(c) : fmt::format("[{}{}]", Literal(c), cases));
    previous_ = lower;
    return part;
  }

  Part AtomOfGroup() {
    const size_t begin = at_;
    const Options outer = options_;
    Options inner = options_;
    const char* opening = "(?:";
    enum { kPlain, kLookAhead, kLookBehind } kind = kPlain;
    if (TakeOptionLetters(inner)) {
      if (!Take(U":")) Refuse(begin, "this group");
      options_ = inner;
    } else if (Take(U"(?:")) {
    } else if (Take(U"(?>")) {
      opening = "(?>";
      is_atomic_ = true;
    } else if (Take(U"(?=")) {
      opening = "(?=";
      kind = kLookAhead;
    } else if (Take(U"(?!")) {
      opening = "(?!";
      kind = kLookAhead;
    } else if (Take(U"(?<=")) {
      opening = "(?<=";
      kind = kLookBehind;
    } else if (Take(U"(?<!")) {
      opening = "(?<!";
      kind = kLookBehind;
    } else if (Take(U"(?<")) {
      if (!IsLetter(Peek())) Refuse(begin, "this group");
      while (IsLetter(Peek()) || IsDigit(Peek()) || Peek() == '_') ++at_;
      if (!Take(U">")) Refuse(begin, "this name of a group");
    } else if (Starts(U"(?")) {
      Refuse(begin, fmt::format("the group {}", Spelling(at_, at_ + 3)));
    } else {
      ++at_;  // what a group captured is of no use here
    }
    const std::vector<Part> branches = Alternatives();
    if (!Take(U")")) Refuse(begin, "a group without its )");
    options_ = outer;
    assertion_ = false;
    Part group = Group(opening, branches);
    if (kind == kPlain) return group;
    if (kind == kLookBehind) {
      for (const Part& branch : branches) {
        if (branch.min != branch.max) Refuse(begin, "look-behind of no fixed length");
      }
    }
    return Assertion(std::move(group.text));
  }

  Part AtomOfEscape() {
    const size_t begin = at_;
    const char32_t c = Peek(1);
    const auto word = [](const char* format) {
      return fmt::format(fmt::runtime(format), kWordOutsideOfClass.inside);
    };
    Characters characters;
    bool negated = false;
    if (TakeCharacters(characters, negated, kWordOutsideOfClass)) {
      return Character(characters, negated);
    }
    at_ += 2;
    switch (c) {
      case 'A':
        return Assertion("\\A");
      case 'z':
        return Assertion("\\z");
      case 'Z':
        return Assertion("\\Z");
      case 'b':
        return Assertion(word("(?:(?<=[{0}])(?![{0}])|(?<![{0}])(?=[{0}]))"));
      case 'B':
        return Assertion(word("(?:(?<=[{0}])(?=[{0}])|(?<![{0}])(?![{0}]))"));
      case 'N':
        return Character(kNoNewline);
      case 'O':
        return Character(kAnything);
      case 'R':
        previous_ = 0;
        return {"(?:\\x{d}(?:\\x{a}|(?!\\x{a}))|[\\x{a}-\\x{c}\\x{85}\\x{2028}\\x{2029}])", 1, 2};
      default:
        at_ = begin;
        return One(TakeEscapedCharacter(), begin);
    }
  }

  // \d, \s, \w, \h, \p{...} and their opposites; false, and nothing taken, for others.
  bool TakeCharacters(Characters& characters, bool& negated, const Characters& word) {
    const size_t begin = at_;
    if (Peek() != '\\') return false;
    const char32_t c = Peek(1);
    negated = c >= 'A' && c <= 'Z';
    switch (c) {
      case 'd':
      case 'D':
        characters = kDigit;
        break;
      case 's':
      case 'S':
        characters = kSpace;
        break;
      case 'h':
      case 'H':
        characters = kHexDigit;
        break;
      case 'w':
      case 'W':
        characters = word;
        break;
      case 'p':
      case 'P': {
        at_ += 2;
        if (!Take(U"{")) Refuse(begin, "a property without {}");
        if (Take(U"^")) negated = !negated;
        std::string name;
        for (; !AtEnd() && Peek() != '}'; ++at_) {
          const char32_t letter = Peek();
          if (letter == ' ' || letter == '-' || letter == '_') continue;
          if (!IsLetter(letter)) {
            Refuse(begin, fmt::format("the property {}", Spelling(begin, at_ + 1)));
          }
          name.push_back(static_cast<char>(letter | 0x20));
        }
        if (!Take(U"}")) Refuse(begin, "a property without its }");
        const std::string property = PropertyOf(name);
        if (property.empty()) {
          Refuse(begin, fmt::format("the property {} (neither a general category nor a script)",
                                    Spelling(begin, at_)));
        }
        characters = {"\\p{" + property + "}", "\\P{" + property + "}"};
        return true;
      }
      default:
        return false;
    }
    at_ += 2;
    return true;
  }

  char32_t TakeHex(size_t max_digits) {
    char32_t code = 0;
    for (size_t i = 0; i < max_digits; ++i, ++at_) {
      const char32_t c = Peek();
      const bool is_hex = c < 0x80 && std::isxdigit(static_cast<int>(c)) != 0;
      if (!is_hex) break;
      code = code * 16 + (IsDigit(c) ? c - '0' : (c | 0x20) - 'a' + 10);
    }
    return code;
  }

  // What a backslash makes one character.
  char32_t TakeEscapedCharacter() {
    const size_t begin = at_;
    const char32_t c = Peek(1);
    at_ = std::min(at_ + 2, pattern_.size());
    switch (c) {
      case 't':
        return '\t';
      case 'n':
        return '\n';
      case 'r':
        return '\r';
      case 'f':
        return '\f';
      case 'v':
        return '\v';
      case 'a':
        return '\a';
      case 'e':
        return 0x1b;
      case 'u':
      case 'x': {
        const bool braces = c == 'x' && Take(U"{");
        const size_t digits = at_;
        const char32_t code = TakeHex(braces ? 6 : c == 'u' ? 4 : 2);
        const size_t count = at_ - digits;
        // \xhh is a byte: a character only below 0x80.
        const bool is_valid = braces     ? count > 0 && Take(U"}") && code <= kMaxCodePoint
                              : c == 'u' ? count == 4
                                         : count == 2 && code < 0x80;
        if (!is_valid || (code >= 0xd800 && code <= 0xdfff)) {
          Refuse(begin, fmt::format("the escape {}", Spelling(begin, at_)));
        }
        return code;
      }
      default:
        if (c >= 0x80 || c <= ' ' || IsLetter(c) || IsDigit(c)) {
          Refuse(begin, fmt::format("the escape {}", Spelling(begin, at_)));
        }
        return c;
    }
  }

  // Zero-width: whether the next character belongs to it.
  static std::string Test(const Operand& operand) {
    std::vector<std::string> tests = operand.assertions;
    if (!operand.inside.empty()) tests.push_back("(?=[" + operand.inside + "])");
    if (tests.size() == 1) return tests[0];
    std::string text = "(?:";
    for (size_t i = 0; i < tests.size(); ++i) text += (i == 0 ? "" : "|") + tests[i];
    return text + ")";
  }

  static std::string Test(const Class& set) {
    std::string text;
    for (const Operand& operand : set.operands) text += Test(operand);
    return (set.negated ? "(?!" : "(?=") + text + ")";
  }

  // What matches one character of it, in one way only.
  static std::string Consuming(const Class& set) {
    const std::vector<Operand>& operands = set.operands;
    if (operands.size() == 1 && operands[0].assertions.empty()) {
      return (set.negated ? "[^" : "[") + operands[0].inside + "]";
    }
    if (set.negated) return "(?:" + Test(set) + kAnything + ")";
    // One operand that is a plain class takes the character, the others test it.
    const auto plain = std::ranges::find_if(
        operands, [](const Operand& operand) { return operand.assertions.empty(); });
    std::string text = "(?:";
    for (auto operand = operands.begin(); operand != operands.end(); ++operand) {
      if (operand != plain) text += Test(*operand);
    }
    return text + (plain == operands.end() ? kAnything : "[" + plain->inside + "]") + ")";
  }

  static void Add(Operand& operand, const Characters& characters, bool negated) {
    if (!negated) {
      operand.inside += characters.inside;
    } else if (!characters.complement.empty()) {
      operand.inside += characters.complement;
    } else {
      operand.assertions.push_back("(?![" + characters.inside + "])");
    }
  }

  void AddRange(Operand& operand, char32_t first, char32_t last, size_t begin) {
    operand.inside += Range(first, last);
    if (!options_.ignore_case) return;
    for (const char32_t c : {first, last}) {
      if (!HasAsciiCases(c)) {
        Refuse(begin, fmt::format("ignoring the case of {}", Spelling(begin, at_)));
      }
    }
    if (last >= 0x80 && first < 0x80) Refuse(begin, "ignoring the case of this range");
    for (char32_t c = first; c <= last; ++c) operand.inside += OtherCases(c);
  }

  static void Add(Operand& operand, Class inner) {
    if (!inner.negated && inner.operands.size() == 1) {
      operand.inside += inner.operands[0].inside;
      for (std::string& test : inner.operands[0].assertions) {
        operand.assertions.push_back(std::move(test));
      }
    } else {
      operand.assertions.push_back(Test(inner));
    }
  }

  // After its [, up to and with its ].
  Class TakeClass() {
    const size_t begin = at_ - 1;
    if (++depth_ > kMaxDepth) Refuse(begin, fmt::format("nesting of more than {}", kMaxDepth));
    Class set;
    set.negated = Take(U"^");
    set.operands.emplace_back();
    bool had_negated = false;  // class within
    for (;;) {
      if (AtEnd()) Refuse(begin, "a class without its ]");
      Operand& operand = set.operands.back();
      if (Starts(U"]") || Starts(U"&&")) {
        if (operand.empty()) Refuse(at_, "an empty class, or a ] or && as its first character,");
        if (Take(U"]")) {
          if (set.operands.size() == 1 && had_negated) {
            Refuse(begin, "a negated class in a class, but as one side of &&,");
          }
          break;
        }
        if (Starts(U"&&&") || Starts(U"&&^")) Refuse(at_, "this && of a class");
        if (options_.ignore_case) Refuse(at_, "ignoring the case of an intersection");
        at_ += 2;
        set.operands.emplace_back();
      } else {
        had_negated = had_negated || Starts(U"[^");
        TakeMember(operand);
      }
    }
    --depth_;
    return set;
  }

  void TakeMember(Operand& operand) {
    const size_t begin = at_;
    if (Starts(U"[:")) return TakePosixBracket(operand);
    if (Take(U"[")) {
      Class inner = TakeClass();
      if (options_.ignore_case) Refuse(begin, "ignoring the case of a class in a class");
      // Oniguruma goes wrong where sets within sets come out empty.
      if (inner.operands.size() > 1) Refuse(begin, "an intersection in a class of a class");
      const bool is_alone = operand.empty() && (Starts(U"]") || Starts(U"&&"));
      if (inner.negated && (!is_alone || !inner.operands[0].assertions.empty())) {
        Refuse(begin, "a negated class in a class, but as one side of &&,");
      }
      return Add(operand, std::move(inner));
    }
    if (Peek() == '-' && !operand.empty() && Peek(1) != ']') Refuse(begin, "this - in a class");
    Characters characters;
    bool negated = false;
    if (TakeCharacters(characters, negated, kWord)) {
      const char32_t kind = pattern_[begin + 1] | 0x20;
      if (options_.ignore_case && kind != 'd' && kind != 's') {
        Refuse(begin, "ignoring the case of " + Spelling(begin, at_) + " in a class");
      }
      Add(operand, characters, negated);
      if (Peek() == '-' && Peek(1) != ']') Refuse(at_, "this - in a class");
      return;
    }
    const auto take_one = [&] { return Peek() == '\\' ? TakeEscapedCharacter() : pattern_[at_++]; };
    const char32_t first = take_one();
    char32_t last = first;
    if (Peek() == '-' && Peek(1) != ']' && at_ + 1 < pattern_.size()) {
      ++at_;
      const char32_t next = Peek();
      const char32_t kind = Peek(1);
      const bool is_escaped_set =
          next == '\\' && kind < 0x80 &&
          std::string_view("dDsShHwWpP").find(static_cast<char>(kind)) != std::string_view::npos;
      if (next == '[' || next == '-' || Starts(U"&&") || is_escaped_set) {
        Refuse(at_ - 1, "this - in a class");
      }
      last = take_one();
      if (last < first) Refuse(begin, "an empty range");
      if (Peek() == '-' && Peek(1) != ']') Refuse(at_, "this - in a class");
    }
    AddRange(operand, first, last, begin);
  }

  void TakePosixBracket(Operand& operand) {
    const size_t begin = at_;
    at_ += 2;
    const bool negated = Take(U"^");
    std::string name;
    while (IsLetter(Peek())) name.push_back(static_cast<char>(pattern_[at_++]));
    const auto* found = std::ranges::find(kPosixBrackets, name, &NamedCharacters::name);
    if (!Take(U":]") || found == std::end(kPosixBrackets) || options_.ignore_case) {
      Refuse(begin, fmt::format("the bracket {}", Spelling(begin, at_)));
    }
    Add(operand, found->characters, negated);
  }

  std::u32string pattern_;
  size_t at_ = 0;
  int depth_ = 0;
  Options options_;
  bool assertion_ = false;      // the last atom matches no characters
  bool has_assertion_ = false;  // some atom so far does
  bool is_atomic_ = false;      // there is an atomic or possessive group
  char32_t previous_ = 0;       // the literal before this one, in lower case, where case is ignored
};

}  // namespace

std::string ToPcre2(std::string_view pattern) { return Translator(pattern).Translate(); }

}  // namespace terrace
