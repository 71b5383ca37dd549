// A corpus and a configuration that train in a fraction of a second.
#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "train/config.h"

namespace terrace {

// Sentences of made-up words, always the same, with the byte tokenizer: a folder as `terrace data
// prepare` leaves it.
void PrepareSmallCorpus(const std::filesystem::path& folder);

// A MoE of 20,000 parameters on that corpus, in float32, with router noise; 20 steps of 2 x 4 x 16
// tokens, evaluated and saved every 10.
RunConfig SmallRun(const std::filesystem::path& corpus);

// What a run leaves that has to be the same in every repetition: all files of the newest checkpoint
// and metrics.jsonl without its times and memory.
std::vector<std::pair<std::string, std::string>> RepeatableParts(const std::filesystem::path& run);

// `key` of every line of a metrics.jsonl.
std::vector<double> MetricOf(const std::filesystem::path& metrics, const std::string& key);

}  // namespace terrace
