// File systems that cannot do all that is asked of them: the calls of the C library that this
// program defines itself fail as they do there.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <string>

#include "core/atomic_file.h"
#include "core/error.h"
#include "data/files.h"
#include "support/temporary_folder.h"

namespace {

struct Failures {
  int sync_folder = 0;  // errno; 0: as the system has it
  int sync_file = 0;
  int mode = 0;
  int rename_to_new = 0;
};
Failures failures;  // NOLINT: what the functions below do

int Fails(int error) {
  errno = error;
  return -1;
}

}  // namespace

extern "C" {

int fsync(int descriptor) {
  struct stat status = {};
  const bool folder = fstat(descriptor, &status) == 0 && S_ISDIR(status.st_mode);
  const int error = folder ? failures.sync_folder : failures.sync_file;
  return error != 0 ? Fails(error) : static_cast<int>(syscall(SYS_fsync, descriptor));
}

int chmod(const char* path, mode_t mode) noexcept {
  if (failures.mode != 0) return Fails(failures.mode);
  return static_cast<int>(syscall(SYS_fchmodat, AT_FDCWD, path, mode));
}

int fchmod(int descriptor, mode_t mode) noexcept {
  if (failures.mode != 0) return Fails(failures.mode);
  return static_cast<int>(syscall(SYS_fchmod, descriptor, mode));
}

int renameat2(int from_folder, const char* from, int to_folder, const char* to,
              unsigned flags) noexcept {
  if (failures.rename_to_new != 0 && flags != 0) return Fails(failures.rename_to_new);
  return static_cast<int>(syscall(SYS_renameat2, from_folder, from, to_folder, to, flags));
}

}  // extern "C"

namespace terrace {
namespace {

using testing::HasSubstr;

class FileSystemTest : public testing::Test {
 protected:
  ~FileSystemTest() override { failures = {}; }

  // Every way in which files come to be there.
  void WriteAll() const {
    WriteFileAtomically(folder_ / "atomic", "a");
    WriteNewFile(folder_ / "new", "n");
    OutputFolder output(folder_ / "output");
    OutputFile file(output.temporary() / "file");
    file.Write("f");
    file.Close();
    output.Commit();
  }
  void ExpectAllThere() const {
    EXPECT_EQ(ReadFile(folder_ / "atomic"), "a");
    EXPECT_EQ(ReadFile(folder_ / "new"), "n");
    EXPECT_EQ(ReadFile(folder_ / "output" / "file"), "f");
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_.path()), {}), 3);
  }

  TemporaryFolder folder_;
};

class UnsupportedTest : public FileSystemTest, public testing::WithParamInterface<Failures> {};

TEST_P(UnsupportedTest, WhatCannotBeDoneThereIsNoError) {
  failures = GetParam();
  WriteAll();
  ExpectAllThere();
}

INSTANTIATE_TEST_SUITE_P(Errors, UnsupportedTest,
                         testing::Values(Failures{.sync_folder = EINVAL},
                                         Failures{.sync_folder = ENOTSUP},
                                         Failures{.sync_folder = ENOSYS, .sync_file = ENOSYS},
                                         Failures{.sync_file = EINVAL}, Failures{.mode = EPERM},
                                         Failures{.mode = ENOTSUP},
                                         Failures{.rename_to_new = EINVAL},
                                         Failures{.rename_to_new = ENOSYS}));

TEST_F(FileSystemTest, ALostWriteIsAnError) {
  const auto message_of = [](const auto& write) {
    try {
      write();
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  failures.sync_folder = EIO;
  EXPECT_THAT(message_of([&] { WriteFileAtomically(folder_ / "a", "a"); }),
              HasSubstr("cannot sync: Input/output error"));
  failures = {.sync_file = EIO};
  EXPECT_THAT(message_of([&] { WriteFileAtomically(folder_ / "b", "b"); }),
              HasSubstr("cannot write: Input/output error"));
  EXPECT_THAT(message_of([&] { WriteNewFile(folder_ / "c", "c"); }), HasSubstr("cannot sync"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "b"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "c"));
}

TEST_F(FileSystemTest, NothingIsReplacedWhereRenamingCannotCheck) {
  failures.rename_to_new = EINVAL;
  std::ofstream(folder_ / "new") << "first";
  EXPECT_THROW(WriteNewFile(folder_ / "new", "second"), Error);
  EXPECT_EQ(ReadFile(folder_ / "new"), "first");
}

}  // namespace
}  // namespace terrace
