// Splitting patterns of tokenizer.json, in words that PCRE2 understands.
#pragma once

#include <string>
#include <string_view>

namespace terrace {

// Hugging Face's tokenizers read a splitting pattern with Oniguruma (its default syntax, on UTF-8);
// PCRE2 gives many of the same spellings another meaning. This writes a pattern of the former for
// the latter (PCRE2_UTF, newline LF, no other option), with the same matches in every text.
//
// Only what is known to mean the same is taken: literals, classes with their set operations,
// general categories and scripts, groups, look-around, anchors, repetitions, and the options i (of
// ASCII letters) and m. Anything else throws Error with the construct and its position: back
// references, calls, \K, \G, \X, absent operators, conditions, callouts, binary properties,
// look-behind of no fixed length, repeated groups that can match nothing, and case-insensitive
// matching of what has further cases than ASCII letters.
//
// Characters have the properties that PCRE2 knows (Unicode 14 for 10.42); a library with newer
// tables may class characters differently that were unassigned then.
std::string ToPcre2(std::string_view pattern);

}  // namespace terrace
