#pragma once

#include <cstdint>

namespace terrace {

// A target of this value: the token has no loss, and does not count in balance statistics.
inline constexpr int32_t kIgnoredTarget = -1;

}  // namespace terrace
