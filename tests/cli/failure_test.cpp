#include "cli/failure.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>
#include <new>
#include <string>
#include <system_error>

#include "core/error.h"
#include "train/step.h"

namespace terrace {
namespace {

using testing::AllOf;
using testing::EndsWith;
using testing::HasSubstr;
using testing::StartsWith;

struct Said {
  int exit_code;
  std::string text;
};

Said Of(const std::exception& exception) {
  testing::internal::CaptureStderr();
  const int exit_code = Report(exception);
  return {exit_code, testing::internal::GetCapturedStderr()};
}

TEST(FailureTest, ErrorsOfUsersAndOfTheirFilesExitWithOne) {
  const Said error = Of(Error("a.toml:7: width = x\nhas to be a number"));
  EXPECT_EQ(error.exit_code, 1);
  EXPECT_EQ(error.text, "terrace: a.toml:7: width = x has to be a number\n");
  EXPECT_EQ(Of(NotFiniteError("the loss is not finite")).exit_code, 1);
  EXPECT_EQ(Of(std::bad_alloc()).text, "terrace: out of memory\n");
  const auto denied = std::make_error_code(std::errc::permission_denied);
  const Said file = Of(std::filesystem::filesystem_error("cannot open", "folder", denied));
  EXPECT_EQ(file.exit_code, 1);
  EXPECT_THAT(file.text, AllOf(StartsWith("terrace: "), HasSubstr("folder")));
}

TEST(FailureTest, BrokenContractsAskForAReport) {
  const auto message = AllOf(StartsWith("terrace: internal error: "), HasSubstr("please report it"),
                             EndsWith(")\n"));
  try {
    TERRACE_CHECK(1 + 1 == 3, "{} and {}", "one", "one");
    FAIL();
  } catch (const std::exception& exception) {
    const Said said = Of(exception);
    EXPECT_EQ(said.exit_code, 70);
    EXPECT_THAT(said.text, message);
    EXPECT_THAT(said.text, HasSubstr("internal error: tests/cli/failure_test.cpp:"));
    EXPECT_THAT(said.text, HasSubstr("1 + 1 == 3: one and one"));
  }
  // What nobody meant to throw is a bug as well.
  const Said other = Of(std::out_of_range("vector::_M_range_check"));
  EXPECT_EQ(other.exit_code, 70);
  EXPECT_THAT(other.text, message);
}

}  // namespace
}  // namespace terrace
