// Counts in sentences.
#pragma once

#include <fmt/format.h>

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>

namespace terrace {

// The word that goes with a count: `one` for 1, else `more` ("is", "are").
template <std::integral Count>
std::string_view ForCount(Count count, std::string_view one, std::string_view more) {
  return count == 1 ? one : more;
}

// "1 token", "2 tokens", "1 batch", "0 batches": a count and its noun, given in the singular.
template <std::integral Count>
std::string Counted(Count count, std::string_view noun) {
  const bool hissing = noun.ends_with("ch") || noun.ends_with('s') || noun.ends_with('x');
  return fmt::format("{} {}{}", count, noun, ForCount(count, "", hissing ? "es" : "s"));
}

}  // namespace terrace
