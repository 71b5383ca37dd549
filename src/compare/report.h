// A comparison as data and as a page.
#pragma once

#include <string>
#include <string_view>

#include "compare/comparison.h"

namespace terrace {

// All that the page shows.
std::string ToJson(const Comparison& comparison);

// One file that needs nothing else: charts, data and styles are inside.
std::string ToHtml(const Comparison& comparison);

}  // namespace terrace
