// How long-running work tells its caller how far it is.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

namespace terrace {

struct ProgressReport {
  std::string_view stage;  // what is being done, e.g. "counting words"
  int64_t done = 0;
  int64_t total = 0;  // in the same unit; 0 when unknown
};

// Called from the thread that called the long-running function, some times a second at most where
// the work is heavy; may be empty.
using ProgressCallback = std::function<void(const ProgressReport&)>;

}  // namespace terrace
