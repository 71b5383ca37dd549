#include "cli/streams.h"

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "core/error.h"

namespace terrace {

std::string ReadInput(const std::string& name) {
  return ReadWhole(name == "-" ? "/dev/stdin" : name);
}

void WriteOutput(const std::string& name, std::string_view bytes) {
  if (name != "-") return IsStream(name) ? WriteToStream(name, bytes) : WriteNewFile(name, bytes);
  const size_t count = std::fwrite(bytes.data(), 1, bytes.size(), stdout);
  if (count != bytes.size() || std::fflush(stdout) != 0) {
    Fail("cannot write to standard output: {}", std::strerror(errno));
  }
}

void RequireNewOutput(const std::string& name) {
  if (name != "-" && !IsStream(name)) RequireAbsent(name);
}

void WriteNote(const std::string& text) { std::fputs((text + "\n").c_str(), stderr); }

}  // namespace terrace
