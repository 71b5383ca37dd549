#include "optim/rule.h"

#include "backend/cpu/sum_of_squares.h"
#include "core/error.h"

namespace terrace {

double Rule::Measure(const Parameter&, TensorView gradient, std::span<const TensorView>, int64_t,
                     float*) const {
  return SumOfSquares(gradient);
}

UpdateReport Rule::ApplyTogether(std::span<const TensorUpdate> group) const {
  TERRACE_CHECK(group.size() == 1, "a rule without groups has one of {}", group.size());
  const TensorUpdate& update = group.front();
  return Apply(*update.parameter, update.gradient, update.state, update.context);
}

}  // namespace terrace
