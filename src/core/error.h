// The one exception type of the project, and how to throw it.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace terrace {

// An error that a user can act on: the text is one line that names what is wrong and where.
// The command line prints it and exits with code 1; nothing below `cli` prints or exits.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <typename... Args>
[[noreturn]] void Fail(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(fmt::format(format, std::forward<Args>(args)...));
}

// A broken contract between parts of the program (a shape that a caller got wrong, say).
// Checked in every build: the checks sit at operation granularity, where they cost nothing.
#define TERRACE_CHECK(condition, ...)                                            \
  do {                                                                           \
    if (!(condition)) [[unlikely]]                                               \
      ::terrace::Fail("internal: {}:{}: {}: {}", __FILE__, __LINE__, #condition, \
                      ::fmt::format(__VA_ARGS__));                               \
  } while (false)

}  // namespace terrace
