#include "compare/page.h"

namespace terrace {

// The build writes each file as a string literal (CMakeLists.txt).
std::string_view PageTemplate() {
  static constexpr char kText[] =
#include "report.html.inc"
      ;
  return std::string_view(kText, sizeof(kText) - 1);
}

std::string_view ChartLibrary() {
  static constexpr char kText[] =
#include "chart.min.js.inc"
      ;
  return std::string_view(kText, sizeof(kText) - 1);
}

}  // namespace terrace
