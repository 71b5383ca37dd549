#include "optim/rule.h"

#include "core/error.h"

namespace terrace {

UpdateReport Rule::ApplyTogether(std::span<const TensorUpdate> group) const {
  TERRACE_CHECK(group.size() == 1, "a rule without groups has one of {}", group.size());
  const TensorUpdate& update = group.front();
  return Apply(*update.parameter, update.gradient, update.state, update.context);
}

}  // namespace terrace
