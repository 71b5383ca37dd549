// What is left of memory, by the files of made-up machines.
#include "train/measure.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

#include "support/temporary_folder.h"

namespace terrace {
namespace {

constexpr int64_t kMiB = 1 << 20;
constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

class AvailableMemoryTest : public testing::Test {
 protected:
  void Write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = root_ / path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text << "\n";
  }
  // A machine with 8 GiB free and as much swap.
  void WriteMachine() const {
    Write(
        "proc/meminfo",
        "MemTotal: 16777216 kB\nMemFree: 1024 kB\nMemAvailable: 8388608 kB\nSwapFree: 8388608 kB");
  }
  void WriteGroup1(const std::string& path, int64_t limit, int64_t used, int64_t cached) const {
    const std::string group = "sys/fs/cgroup/memory" + path;
    Write(group + "/memory.limit_in_bytes", std::to_string(limit));
    Write(group + "/memory.usage_in_bytes", std::to_string(used));
    Write(group + "/memory.stat", "inactive_file 0\ntotal_inactive_file " + std::to_string(cached));
  }
  void WriteGroup2(const std::string& path, const std::string& limit, int64_t used,
                   int64_t cached) const {
    const std::string group = "sys/fs/cgroup" + path;
    Write(group + "/memory.max", limit);
    Write(group + "/memory.high", "max");
    Write(group + "/memory.current", std::to_string(used));
    Write(group + "/memory.stat", "anon 5\ninactive_file " + std::to_string(cached));
  }
  int64_t Available() const { return AvailableMemoryBytes(root_.path()); }

  TemporaryFolder root_;
};

TEST_F(AvailableMemoryTest, IsTheMachinesWithoutSwap) {
  EXPECT_EQ(Available(), kUnlimited);
  WriteMachine();
  EXPECT_EQ(Available(), 8192 * kMiB);
}

TEST_F(AvailableMemoryTest, ThisMachineTells) {
  EXPECT_GT(AvailableMemoryBytes(), 0);
  EXPECT_LT(AvailableMemoryBytes(), int64_t{1} << 50);
}

TEST_F(AvailableMemoryTest, EveryGroupAroundTheProcessCounts) {
  WriteMachine();
  Write("proc/self/cgroup", "0::/slurm/job_7/step_0");
  WriteGroup2("/slurm/job_7/step_0", "max", 100 * kMiB, 0);
  WriteGroup2("/slurm/job_7", std::to_string(512 * kMiB), 200 * kMiB, 50 * kMiB);
  WriteGroup2("/slurm", std::to_string(4096 * kMiB), 3000 * kMiB, 0);
  EXPECT_EQ(Available(), 362 * kMiB);
  WriteGroup2("/slurm", std::to_string(4096 * kMiB), 4000 * kMiB, 0);
  EXPECT_EQ(Available(), 96 * kMiB);
  // Above memory.high a process is only slowed down, but to a standstill.
  Write("sys/fs/cgroup/slurm/job_7/step_0/memory.high", std::to_string(110 * kMiB));
  EXPECT_EQ(Available(), 10 * kMiB);
  Write("sys/fs/cgroup/slurm/job_7/step_0/memory.high", std::to_string(90 * kMiB));
  EXPECT_EQ(Available(), 0);
}

TEST_F(AvailableMemoryTest, AContainerSeesItsGroupAsTheTop) {
  WriteMachine();
  WriteGroup2("", std::to_string(300 * kMiB), 100 * kMiB, 0);
  for (const char* path : {"/", "/docker/0123abcd", "/../job"}) {
    Write("proc/self/cgroup", std::string("0::") + path);
    EXPECT_EQ(Available(), 200 * kMiB) << path;
  }
  WriteGroup2("/worker", std::to_string(50 * kMiB), 10 * kMiB, 0);
  Write("proc/self/cgroup", "0::/docker/0123abcd/worker");
  EXPECT_EQ(Available(), 40 * kMiB);
}

TEST_F(AvailableMemoryTest, GroupsOfVersion1) {
  WriteMachine();
  constexpr int64_t kNoLimit1 = 9223372036854771712;
  // The unified hierarchy is there too, without the memory controller.
  Write("proc/self/cgroup", "11:cpu,cpuacct:/x\n4:hugetlb,memory:/job/task\n0::/job");
  WriteGroup1("", kNoLimit1, 9000 * kMiB, 0);
  EXPECT_EQ(Available(), 8192 * kMiB);
  WriteGroup1("/job", 700 * kMiB, 300 * kMiB, 20 * kMiB);
  EXPECT_EQ(Available(), 420 * kMiB);
  WriteGroup1("/job/task", 64 * kMiB, 1 * kMiB, 0);
  EXPECT_EQ(Available(), 63 * kMiB);
  Write("proc/self/cgroup", "4:memory:/docker/0123abcd");
  EXPECT_EQ(Available(), 8192 * kMiB);
  WriteGroup1("", 32 * kMiB, 1 * kMiB, 0);
  EXPECT_EQ(Available(), 31 * kMiB);
}

TEST_F(AvailableMemoryTest, ResourceLimitsCount) {
  WriteMachine();
  Write("proc/self/status", "VmPeak: 9999999 kB\nVmSize: 102400 kB\nVmData: 20480 kB");
  const auto limits = [&](const std::string& address_space, const std::string& data) {
    Write("proc/self/limits",
          "Limit                     Soft Limit           Hard Limit           Units\n"
          "Max cpu time              unlimited            unlimited            seconds\n"
          "Max data size             " +
              data +
              "            unlimited            bytes\n"
              "Max address space         " +
              address_space + "            unlimited            bytes");
  };
  limits("unlimited", "unlimited");
  EXPECT_EQ(Available(), 8192 * kMiB);
  limits(std::to_string(1000 * kMiB), "unlimited");
  EXPECT_EQ(Available(), 900 * kMiB);
  limits(std::to_string(1000 * kMiB), std::to_string(500 * kMiB));
  EXPECT_EQ(Available(), 480 * kMiB);
}

}  // namespace
}  // namespace terrace
