// How many threads commands use.
#pragma once

#include <cstdint>

namespace terrace {

inline constexpr int64_t kMaxThreads = 4096;

// 0: as many as run at once, as OpenMP decides (OMP_NUM_THREADS). Throws Error for a number, also
// one of the environment, that is not within 0 .. kMaxThreads.
void UseThreads(int64_t threads);

}  // namespace terrace
