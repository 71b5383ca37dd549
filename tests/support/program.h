// Runs a program as a user does.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace terrace {

struct ProgramResult {
  int exit_code = -1;  // -1: ended by a signal
  int signal = 0;
  std::string output;  // standard output
  std::string errors;  // standard error
  int64_t peak_resident_bytes = 0;
};

// Ends the program, if it still runs, when it goes out of scope.
class Program {
 public:
  struct Options {
    std::filesystem::path folder;          // to run in; empty: the current one
    std::vector<std::string> environment;  // "NAME=value", added
    int64_t max_file_bytes = -1;           // a write beyond fails, as on a full disk; -1: no limit
    int pending_signal = 0;                // sent, and held back, before the program begins
  };
  // arguments[0] is the program's path.
  Program(std::vector<std::string> arguments, const Options& options);
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  void Send(int signal) const;
  ProgramResult Wait();

 private:
  pid_t pid_ = -1;
  std::filesystem::path output_;
  std::filesystem::path errors_;
};

}  // namespace terrace
