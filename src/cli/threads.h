// How many threads commands use.
#pragma once

#include <omp.h>

#include <cstdint>

namespace terrace {

// 0: as many as run at once, as OpenMP decides (OMP_NUM_THREADS).
inline void UseThreads(int64_t threads) {
  if (threads > 0) omp_set_num_threads(static_cast<int>(threads));
}

}  // namespace terrace
