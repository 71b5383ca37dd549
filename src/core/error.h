// The exceptions of the project, and how to throw them.
#pragma once

#include <fmt/format.h>

#include <source_location>
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

// A broken contract between parts of the program (a shape that a caller got wrong, say): a bug,
// which no user can act on. No Error, so that what handles a user's errors lets it pass. The
// command line asks for a report and exits with code 70.
class InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

template <typename... Args>
[[noreturn]] void FailInternally(const std::source_location& where,
                                 fmt::format_string<Args...> format, Args&&... args) {
  throw InternalError(fmt::format("{}:{}: {}", where.file_name(), where.line(),
                                  fmt::format(format, std::forward<Args>(args)...)));
}

// Throws InternalError. Checked in every build: the checks sit at operation granularity, where they
// cost nothing.
#define TERRACE_CHECK(condition, ...)                                                    \
  do {                                                                                   \
    if (!(condition)) [[unlikely]]                                                       \
      ::terrace::FailInternally(::std::source_location::current(), "{}: {}", #condition, \
                                ::fmt::format(__VA_ARGS__));                             \
  } while (false)

}  // namespace terrace
