// The options that say which documents a command reads.
#pragma once

#include <CLI/App.hpp>

#include "data/documents.h"

namespace terrace {

// `corpus` must outlive the parsing.
void AddCorpusFlags(CLI::App& command, CorpusOptions& corpus);

}  // namespace terrace
