// How a command that failed says so.
#pragma once

#include <exception>
#include <string>

namespace terrace {

inline constexpr int kExitError = 1;           // bad input, or surroundings that refuse
inline constexpr int kExitInternalError = 70;  // a bug: EX_SOFTWARE of sysexits.h

// "terrace: MESSAGE", one line on standard error. Returns kExitError.
int ReportError(std::string message);

// The same for an Error and for what the standard library throws of files and memory. Anything else
// is a bug: the line asks for a report, and kExitInternalError is returned.
int Report(const std::exception& exception);

}  // namespace terrace
