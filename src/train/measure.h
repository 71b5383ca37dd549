// What the machine does: its speed at matrix products, and the memory that the process holds.
#pragma once

#include <cstdint>
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

// What the machine, or the control group of the process, could still give; INT64_MAX where neither
// tells.
int64_t AvailableMemoryBytes();
// Throws Error, with advice at its end, when that many bytes are less than `bytes`: a machine that
// runs out of memory ends processes without a word.
void RequireMemory(int64_t bytes, int64_t available_bytes, std::string_view advice = {});

}  // namespace terrace
