// Which of several choices are worth having when less of both numbers is better.
#pragma once

#include <cstdint>
#include <vector>

namespace terrace {

struct FrontPoint {
  int64_t bytes = 0;
  double loss = 0;
};

// For each point whether it is on the Pareto front: no other has at most its bytes and at most its
// loss, and less of one. Equal points are on it together or not at all. A loss that is not a
// number is never on it.
std::vector<bool> OnFront(const std::vector<FrontPoint>& points);

}  // namespace terrace
