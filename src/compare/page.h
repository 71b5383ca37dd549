// Texts that the build takes into the program.
#pragma once

#include <string_view>

namespace terrace {

// report.html of this folder; report.cpp fills its marks.
std::string_view PageTemplate();
// Chart.js, minified, with its licence notice.
std::string_view ChartLibrary();

}  // namespace terrace
