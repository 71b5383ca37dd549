#include "core/nearest_name.h"

#include <algorithm>
#include <cstdint>
#include <numeric>

namespace terrace {
namespace {

size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);  // distances of a's first i characters to b's first j
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substituted = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({substituted, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::string_view NearestName(std::string_view name, const std::vector<std::string_view>& names) {
  std::string_view nearest;
  size_t least = SIZE_MAX;
  for (std::string_view candidate : names) {
    // What is left to type is no mistake: "warmup" means warmup_fraction, not width.
    const bool begun = !name.empty() && candidate.starts_with(name);
    const size_t distance = begun ? 1 : EditDistance(name, candidate);
    if (distance < least) {
      least = distance;
      nearest = candidate;
    }
  }
  return nearest;
}

}  // namespace terrace
