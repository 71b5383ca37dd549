#include "train/measure.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <limits>
#include <string>

#include "backend/cpu/cpu_backend.h"
#include "core/arena.h"
#include "core/error.h"

namespace terrace {
namespace {

constexpr int64_t kSide = 1024;
// Of timed products: as many as fit, and two at least.
constexpr double kSeconds = 0.03;

// The best time of a product, in seconds.
double RunProducts(Arena& arena, DType dtype) {
  CpuBackend backend(arena);
  const auto matrix = [&](const char* name) {
    return arena.Allocate(Memory::kActivations, dtype, {kSide, kSide}, name);
  };
  const TensorView x = matrix("x"), w = matrix("w"), y = matrix("y");
  backend.Zero(x);
  backend.Zero(w);
  backend.Linear(x, w, y, false);  // prepares
  if (backend.dry()) return 0;
  double best_seconds = std::numeric_limits<double>::infinity();
  double all_seconds = 0;
  for (int repeat = 0; repeat < 2 || all_seconds < kSeconds; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    backend.Linear(x, w, y, false);
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    best_seconds = std::min(best_seconds, time.count());
    all_seconds += time.count();
  }
  return best_seconds;
}

}  // namespace

double MeasureProductFlops(DType dtype) {
  Arena dry = Arena::Dry();
  RunProducts(dry, dtype);
  Arena arena(dry.ledger().total_peak_bytes);
  return 2.0 * kSide * kSide * kSide / RunProducts(arena, dtype);
}

std::string ProcessorName() {
  std::ifstream processors("/proc/cpuinfo");
  std::string name;
  for (std::string line; name.empty() && std::getline(processors, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) name = line.substr(colon + 2);
  }
  return name;
}

ResidentMemory ReadResidentMemory() {
  ResidentMemory memory;
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    int64_t kibibytes = 0;
    if (word == "VmRSS:" && status >> kibibytes) memory.bytes = kibibytes * 1024;
    if (word == "VmHWM:" && status >> kibibytes) memory.peak_bytes = kibibytes * 1024;
  }
  return memory;
}

int64_t AvailableMemoryBytes() {
  int64_t available = 0;
  std::ifstream machine("/proc/meminfo");
  for (std::string word; machine >> word;) {
    int64_t kibibytes = 0;
    if ((word == "MemAvailable:" || word == "SwapFree:") && machine >> kibibytes) {
      available += kibibytes * 1024;
    }
  }
  if (available == 0) available = std::numeric_limits<int64_t>::max();
  int64_t limit = 0, used = 0;
  if (std::ifstream("/sys/fs/cgroup/memory.max") >> limit &&
      std::ifstream("/sys/fs/cgroup/memory.current") >> used) {
    std::ifstream statistics("/sys/fs/cgroup/memory.stat");
    for (std::string word; statistics >> word;) {
      int64_t bytes = 0;  // cached files, which give way
      if (word == "inactive_file" && statistics >> bytes) used -= bytes;
    }
    available = std::min(available, std::max<int64_t>(0, limit - used));
  }
  return available;
}

void RequireMemory(int64_t bytes, int64_t available_bytes, std::string_view advice) {
  constexpr double kGiB = 1 << 30;
  if (bytes <= available_bytes) return;
  Fail("memory: {:.2f} GiB are needed and {:.2f} GiB are free{}{}",
       static_cast<double>(bytes) / kGiB, static_cast<double>(available_bytes) / kGiB,
       advice.empty() ? "" : ": ", advice);
}

}  // namespace terrace
