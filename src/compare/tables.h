// A comparison as text.
#pragma once

#include <string>

#include "compare/comparison.h"

namespace terrace {

// The table of policies, and that of the sweep where there was one.
std::string ToTerminal(const Comparison& comparison);
std::string ToMarkdown(const Comparison& comparison);

// One line a policy, and one line a run; a header line first. Numbers are in full, in the units
// that their column names; cells without a value are empty.
std::string ToCsv(const Comparison& comparison);
std::string RunsToCsv(const Comparison& comparison);

}  // namespace terrace
