#include "plan/bytes.h"

#include <charconv>
#include <cmath>

#include "core/counted.h"
#include "core/error.h"

namespace terrace {
namespace {

struct Unit {
  std::string_view name;
  double bytes;
};
constexpr Unit kUnits[] = {
    {"B", 1},    {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40},
    {"KB", 1e3}, {"MB", 1e6},     {"GB", 1e9},     {"TB", 1e12},
};

}  // namespace

int64_t ParseBytes(std::string_view text) {
  double number = 0;
  const auto [rest, error] =
      std::from_chars(text.data(), text.data() + text.size(), number, std::chars_format::fixed);
  std::string_view name(rest, static_cast<size_t>(text.data() + text.size() - rest));
  while (name.starts_with(' ')) name.remove_prefix(1);
  for (const Unit& unit : kUnits) {
    if (error != std::errc() || name != unit.name) continue;
    const double bytes = std::floor(number * unit.bytes);
    if (!(bytes >= 1 && bytes < 0x1p62)) Fail("\"{}\" is not between 1 byte and 4 EiB", text);
    return static_cast<int64_t>(bytes);
  }
  Fail("\"{}\" is not an amount of memory such as 24GiB or 500MB", text);
}

std::string BytesText(int64_t bytes) {
  const double number = static_cast<double>(bytes);
  if (number >= kGiB) return fmt::format("{:.2f} GiB", number / kGiB);
  if (number >= kMiB / 10) return fmt::format("{:.1f} MiB", number / kMiB);
  return Counted(bytes, "byte");
}

}  // namespace terrace
