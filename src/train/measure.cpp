#include "train/measure.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <fstream>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <sstream>
#include <string>
#include <system_error>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "core/arena.h"
#include "core/error.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;

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

// --- Memory that is left -------------------------------------------------------------------------

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();
constexpr int64_t kKiB = 1024;

int64_t Left(int64_t limit_bytes, int64_t used_bytes) {
  if (limit_bytes == kUnlimited) return kUnlimited;
  return std::max<int64_t>(0, limit_bytes - std::max<int64_t>(0, used_bytes));
}

// The number behind a word, as in "MemAvailable: 1024 kB"; 0 without.
int64_t ValueOf(const fs::path& path, std::string_view name) {
  std::ifstream file(path);
  int64_t value = 0;
  for (std::string word; file >> word;) {
    if (word == name && file >> value) return value;
  }
  return 0;
}

// A file with nothing but a number, or "max"; `absent` for anything else.
int64_t NumberIn(const fs::path& path, int64_t absent) {
  int64_t value = 0;
  return std::ifstream(path) >> value ? value : absent;
}

// Of /proc/self/limits: "Max data size     1048576     unlimited     bytes".
int64_t SoftLimit(const fs::path& limits, std::string_view name) {
  std::ifstream file(limits);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(name)) continue;
    int64_t value = 0;
    return std::istringstream(line.substr(name.size())) >> value ? value : kUnlimited;
  }
  return kUnlimited;
}

// How a version of control groups keeps its books.
struct GroupVersion {
  const char* mount;
  std::vector<const char*> limits;
  const char* used;
  const char* cached;  // in memory.stat, with the groups below
};
const GroupVersion kGroups1{"sys/fs/cgroup/memory",
                            {"memory.limit_in_bytes"},
                            "memory.usage_in_bytes",
                            "total_inactive_file"};
const GroupVersion kGroups2{
    "sys/fs/cgroup", {"memory.max", "memory.high"}, "memory.current", "inactive_file"};

struct Groups {
  std::optional<std::string> path1;  // of the memory controller
  std::optional<std::string> path2;
};

// Lines of /proc/self/cgroup: "4:memory:/job", "0::/system.slice/job".
Groups GroupsIn(const fs::path& path) {
  Groups groups;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = fmt::format(",{},", line.substr(first + 1, second - first - 1));
    if (line.starts_with("0::")) groups.path2 = line.substr(second + 1);
    if (controllers.find(",memory,") != std::string::npos) groups.path1 = line.substr(second + 1);
  }
  return groups;
}

// The least that a group and those around it have left.
int64_t LeftOf(const GroupVersion& version, const fs::path& root, const fs::path& path) {
  const fs::path mount = root / version.mount;
  // A container often sees its own group as the top, while the path is that of the machine: what is
  // visible of it are its last parts, or none.
  std::deque<fs::path> parts;
  for (const fs::path& part : path.relative_path()) parts.push_back(part);
  // It is in a group beside that of the container.
  if (!parts.empty() && parts.front() == "..") parts.clear();
  const auto joined = [&] {
    return std::accumulate(parts.begin(), parts.end(), fs::path(), std::divides<>());
  };
  std::error_code error;
  while (!parts.empty() && !fs::is_directory(mount / parts.front(), error)) parts.pop_front();
  int64_t left = kUnlimited;
  for (;; parts.pop_back()) {
    const fs::path group = mount / joined();
    int64_t limit = kUnlimited;
    for (const char* name : version.limits) {
      limit = std::min(limit, NumberIn(group / name, kUnlimited));
    }
    const int64_t cached = ValueOf(group / "memory.stat", version.cached);
    left = std::min(left, Left(limit, NumberIn(group / version.used, 0) - cached));
    if (parts.empty()) return left;
  }
}

int64_t LeftOfGroups(const fs::path& root, const Groups& groups) {
  int64_t left = kUnlimited;
  if (groups.path1) left = std::min(left, LeftOf(kGroups1, root, *groups.path1));
  if (groups.path2) left = std::min(left, LeftOf(kGroups2, root, *groups.path2));
  return left;
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

int64_t AvailableMemoryBytes(const fs::path& root) {
  const fs::path process = root / "proc/self";
  int64_t available = ValueOf(root / "proc/meminfo", "MemAvailable:") * kKiB;
  if (available == 0) available = kUnlimited;
  available = std::min(available, LeftOfGroups(root, GroupsIn(process / "cgroup")));
  const fs::path limits = process / "limits", status = process / "status";
  available = std::min(
      available, Left(SoftLimit(limits, "Max address space"), ValueOf(status, "VmSize:") * kKiB));
  return std::min(available,
                  Left(SoftLimit(limits, "Max data size"), ValueOf(status, "VmData:") * kKiB));
}

void RequireMemory(int64_t bytes, int64_t available_bytes, std::string_view advice) {
  constexpr double kGiB = 1 << 30;
  if (bytes <= available_bytes) return;
  Fail("memory: {:.2f} GiB are needed and {:.2f} GiB are free{}{}",
       static_cast<double>(bytes) / kGiB, static_cast<double>(available_bytes) / kGiB,
       advice.empty() ? "" : ": ", advice);
}

}  // namespace terrace
