// A folder that is removed at the end of a test.
#pragma once

#include <filesystem>

namespace terrace {

class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(const std::filesystem::path& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

// The folder of reference data: the environment's TERRACE_TEST_DATA, or tests/data.
std::filesystem::path TestData();

}  // namespace terrace
