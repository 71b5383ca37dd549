// "Did you mean ...?"
#pragma once

#include <string_view>
#include <vector>

namespace terrace {

// The name that takes the fewest insertions, deletions and substitutions of characters to reach,
// where all that is missing at the end counts as one; the first of equals, empty when there are
// none.
std::string_view NearestName(std::string_view name, const std::vector<std::string_view>& names);

}  // namespace terrace
