// What tests of the commands share: the program, run in a folder of its own.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "support/program.h"
#include "support/temporary_folder.h"

namespace terrace {

class CommandTest : public ::testing::Test {
 protected:
  static std::vector<std::string> Arguments(const std::vector<std::string>& arguments) {
    std::vector<std::string> all = {TERRACE_PROGRAM};
    all.insert(all.end(), arguments.begin(), arguments.end());
    return all;
  }
  Program::Options Options() const { return {.folder = folder_.path(), .environment = {}}; }
  ProgramResult Run(const std::vector<std::string>& arguments) const {
    return Program(Arguments(arguments), Options()).Wait();
  }

  // One line on standard error, exit code 1, nothing on standard output.
  std::string ErrorOf(const std::vector<std::string>& arguments,
                      const std::vector<std::string>& environment = {}) const {
    Program::Options options = Options();
    options.environment.insert(options.environment.end(), environment.begin(), environment.end());
    const ProgramResult result = Program(Arguments(arguments), options).Wait();
    EXPECT_EQ(result.exit_code, 1) << result.signal;
    EXPECT_EQ(result.output, "");
    EXPECT_THAT(result.errors, ::testing::StartsWith("terrace: "));
    EXPECT_EQ(std::count(result.errors.begin(), result.errors.end(), '\n'), 1) << result.errors;
    return result.errors;
  }
  // The same for an error that shows after the run has said what it is going to do: the last line.
  std::string LateErrorOf(const std::vector<std::string>& arguments) const {
    const ProgramResult result = Run(arguments);
    EXPECT_EQ(result.exit_code, 1) << result.signal;
    EXPECT_EQ(result.output, "");
    const size_t last = result.errors.rfind('\n', result.errors.size() - 2) + 1;
    EXPECT_THAT(result.errors.substr(last), ::testing::StartsWith("terrace: "));
    return result.errors.substr(last);
  }

  TemporaryFolder folder_;
};

}  // namespace terrace
