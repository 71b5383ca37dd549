#include "cli/streams.h"

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "core/error.h"

namespace terrace {

std::string ReadInput(const std::string& name) {
  return ReadWhole(name == "-" ? "/dev/stdin" : name);
}

namespace {

// 0, or errno.
int WriteToStandardOutput(std::string_view bytes) {
  const size_t count = std::fwrite(bytes.data(), 1, bytes.size(), stdout);
  return count != bytes.size() || std::fflush(stdout) != 0 ? errno : 0;
}

[[noreturn]] void FailOfStandardOutput(int error) {
  Fail("cannot write to standard output: {}", std::strerror(error));
}

}  // namespace

void WriteOutput(const std::string& name, std::string_view bytes) {
  if (name != "-") return IsStream(name) ? WriteToStream(name, bytes) : WriteNewFile(name, bytes);
  if (const int error = WriteToStandardOutput(bytes); error != 0) FailOfStandardOutput(error);
}

void WriteSummary(std::string_view text) {
  const int error = WriteToStandardOutput(text);
  if (error != 0 && error != EPIPE && error != EIO) FailOfStandardOutput(error);
}

void RequireNewOutput(const std::string& name) {
  if (name != "-" && !IsStream(name)) RequireCreatable(name);
}

void WriteNote(const std::string& text) { std::fputs((text + "\n").c_str(), stderr); }

}  // namespace terrace
