#include "cli/failure.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <new>
#include <system_error>
#include <utility>

#include "core/error.h"

namespace terrace {

int ReportError(std::string message) {
  std::replace(message.begin(), message.end(), '\n', ' ');
  std::fprintf(stderr, "terrace: %s\n", message.c_str());
  return kExitError;
}

int Report(const std::exception& exception) {
  const bool known = dynamic_cast<const Error*>(&exception) != nullptr ||
                     dynamic_cast<const std::system_error*>(&exception) != nullptr;
  if (known) return ReportError(exception.what());
  if (dynamic_cast<const std::bad_alloc*>(&exception) != nullptr) {
    return ReportError("out of memory");
  }
  ReportError(
      fmt::format("internal error: {} (a bug of terrace; please report it with the command)",
                  exception.what()));
  return kExitInternalError;
}

}  // namespace terrace
