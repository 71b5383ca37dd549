#include "cli/threads.h"

#include <omp.h>

#include "core/error.h"

namespace terrace {

void UseThreads(int64_t threads) {
  if (threads < 0 || threads > kMaxThreads) {
    Fail("{} threads are not within 0 .. {}", threads, kMaxThreads);
  }
  if (threads > 0) return omp_set_num_threads(static_cast<int>(threads));
  if (omp_get_max_threads() > kMaxThreads) {
    Fail("OMP_NUM_THREADS = {} is above {}", omp_get_max_threads(), kMaxThreads);
  }
}

}  // namespace terrace
