// Loops over the threads of the process.
//
// The threads are a team of our own. Where another process takes a processor away, a loop of OpenMP
// waits at its end for every thread, also for one that has not had the time to begin; here the
// calling thread does what nobody else has begun, and waits for begun blocks only. Threads that
// wait spin for a moment, too short to be noticed beside a busy process, and sleep then.
//
// How many threads there are is a setting of OpenMP's all the same (OMP_NUM_THREADS,
// omp_set_num_threads): oneDNN follows it as well.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace terrace {

// Of which loops begun by the calling thread make use. Not for use inside a loop.
inline int64_t MaxThreads() { return omp_get_max_threads(); }

// Within a loop the number of the thread, in [0, MaxThreads() of the caller), which no other thread
// of the same loop has: what a body may index memory of its own by. Outside of loops 0.
int64_t ThreadNumber();

namespace internal {
void RunBlocks(int64_t blocks, void (*run)(const void* loop, int64_t block), const void* loop);
}

// Calls body(begin, end) for consecutive blocks of at most `grain` indices of [0, count), each
// block by one thread; of exceptions that of the lowest block reaches the caller. Blocks depend on
// `grain` only: a body that reduces per block gives results that do not depend on the number of
// threads. Other threads round and treat subnormal numbers as the caller does. A loop inside a
// loop, or while another thread runs one, is done by its caller alone.
template <typename Body>
void ParallelFor(int64_t count, int64_t grain, const Body& body) {
  const auto run = [&](int64_t block) {
    body(block * grain, std::min(count, (block + 1) * grain));
  };
  internal::RunBlocks(
      (count + grain - 1) / grain,
      [](const void* loop, int64_t block) { (*static_cast<const decltype(run)*>(loop))(block); },
      &run);
}

}  // namespace terrace
