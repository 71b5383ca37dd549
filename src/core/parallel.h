// Loops over the threads of the process (OpenMP).
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <exception>

namespace terrace {

// Calls body(begin, end) for consecutive blocks of at most `grain` indices of [0, count), each
// block by one thread; exceptions reach the caller. Blocks depend on `grain` only: a body that
// reduces per block gives results that do not depend on the number of threads.
template <typename Body>
void ParallelFor(int64_t count, int64_t grain, const Body& body) {
  const int64_t blocks = (count + grain - 1) / grain;
  if (blocks <= 1 || omp_in_parallel()) {
    for (int64_t block = 0; block < blocks; ++block) {
      body(block * grain, std::min(count, (block + 1) * grain));
    }
    return;
  }
  std::exception_ptr failure;
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t block = 0; block < blocks; ++block) {
    try {
      body(block * grain, std::min(count, (block + 1) * grain));
    } catch (...) {
#pragma omp critical(terrace_parallel_for)
      failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

inline int64_t MaxThreads() { return omp_get_max_threads(); }

}  // namespace terrace
