// What the machine does: its speed at matrix products, and the memory that the process holds.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "core/dtype.h"

namespace terrace {

// Operations per second of a product of two 1024 x 1024 matrices, the best of a few. Takes some
// hundredths of a second and memory of its own, given back at the end.
double MeasureProductFlops(DType dtype);

// "Intel(R) Xeon(R) CPU @ 2.50GHz"; empty where it is not known.
std::string ProcessorName();

// Of this process, from the kernel; 0 where it does not tell.
struct ResidentMemory {
  int64_t bytes = 0;
  int64_t peak_bytes = 0;
};
ResidentMemory ReadResidentMemory();

// What the process could still take without swapping: the least that is left of the machine's
// memory, of its control group and of each group around that one (version 1 or 2: memory.max,
// memory.high, memory.limit_in_bytes; cached files that are not in use give way and count as free),
// and of the resource limits of address space and data (ulimit -v and -d). INT64_MAX where nothing
// tells. The files of /proc and /sys are looked for under `root`.
int64_t AvailableMemoryBytes(const std::filesystem::path& root = "/");
// Throws Error, with advice at its end, when that many bytes are less than `bytes`: a machine that
// runs out of memory ends processes without a word.
void RequireMemory(int64_t bytes, int64_t available_bytes, std::string_view advice = {});

}  // namespace terrace
