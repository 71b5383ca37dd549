// Files of commands, where "-" means standard input or output.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "data/files.h"

namespace terrace {

// Throws Error when the file cannot be read.
std::string ReadInput(const std::string& name);

// A file must not exist, and appears complete or not at all; a pipe or a device, such as /dev/null,
// is written to. Throws Error, for standard output too (a full disk behind it, say).
void WriteOutput(const std::string& name, std::string_view bytes);

// Standard output's last word on work that is done and saved: that nobody is there any more to read
// it (a closed pipe, a terminal that is gone) is no error. Throws Error for others.
void WriteSummary(std::string_view text);

// Throws Error where WriteOutput would because of an existing file, or of a folder that is missing
// or that nothing can be written to: for a check before anything else is done.
void RequireNewOutput(const std::string& name);

// A line on standard error.
void WriteNote(const std::string& text);

}  // namespace terrace
