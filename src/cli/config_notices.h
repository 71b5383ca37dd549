// What the reading of a configuration has to tell.
#pragma once

#include "cli/streams.h"
#include "train/config.h"

namespace terrace {

inline void WriteNotices(const RunConfig& config) {
  for (const std::string& notice : config.notices) WriteNote("notice: " + notice);
}

}  // namespace terrace
