#include "compare/front.h"

#include <algorithm>
#include <cmath>

namespace terrace {
namespace {

bool Beats(const FrontPoint& a, const FrontPoint& b) {
  return a.bytes <= b.bytes && a.loss <= b.loss && (a.bytes < b.bytes || a.loss < b.loss);
}

}  // namespace

std::vector<bool> OnFront(const std::vector<FrontPoint>& points) {
  std::vector<bool> on_front;
  for (const FrontPoint& point : points) {
    on_front.push_back(!std::isnan(point.loss) &&
                       std::none_of(points.begin(), points.end(),
                                    [&](const FrontPoint& other) { return Beats(other, point); }));
  }
  return on_front;
}

}  // namespace terrace
