#include "train/metrics.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "core/atomic_file.h"
#include "core/error.h"
#include "core/lines.h"

namespace terrace {
namespace {

// Keeps the order in which keys are added.
using Json = nlohmann::ordered_json;

struct KeptLines {
  uint64_t bytes = 0;
  int64_t dropped = 0;  // lines behind them
  int64_t step = 0;     // of the last of them
};

// Up to the last line of a step up to `last_step`: a damaged line in between costs no history. One
// line at a time, since the files of long runs are large.
KeptLines FindKept(const std::filesystem::path& path, int64_t last_step) {
  if (!std::filesystem::is_regular_file(path)) Fail("{}: is not a file", path.string());
  std::ifstream file(path, std::ios::binary);
  if (!file) Fail("{}: cannot read: {}", path.string(), std::strerror(errno));
  KeptLines kept;
  for (LineReader lines(file); lines.Next();) {
    const Json json = Json::parse(lines.line(), nullptr, false);
    ++kept.dropped;
    if (!json.is_object() || !json.contains("step")) continue;
    const Json& step = json["step"];
    if (!step.is_number_unsigned()) continue;  // as it is without a sign
    const uint64_t number = step.get<uint64_t>();
    if (number > static_cast<uint64_t>(last_step)) continue;
    kept = {lines.bytes(), 0, static_cast<int64_t>(number)};
  }
  return kept;
}

}  // namespace

std::string ToJsonLine(const StepMetrics& metrics) {
  Json json = {
      {"step", metrics.step},
      {"loss", metrics.loss},
      {"aux_loss", metrics.aux_loss},
      {"z_loss", metrics.z_loss},
      {"gradient_norm", metrics.gradient_norm},
      {"learning_rate", metrics.learning_rate},
      {"tokens", metrics.tokens},
      {"seconds", metrics.seconds},
      {"tokens_per_second", metrics.tokens_per_second},
      {"flops_per_second", metrics.flops_per_second},
      {"mfu", metrics.mfu},
      {"planned_peak_bytes", metrics.planned_peak_bytes},
      {"ledger_peak_bytes", metrics.ledger_peak_bytes},
      {"ledger_at_peak_bytes", Json::object()},
      {"resident_bytes", metrics.resident_bytes},
      {"resident_peak_bytes", metrics.resident_peak_bytes},
  };
  for (int i = 0; i < kMemoryCategories; ++i) {
    json["ledger_at_peak_bytes"][std::string(NameOf(Memory(i)))] =
        metrics.ledger_at_peak_bytes[static_cast<size_t>(i)];
  }
  for (int i = 0; i < kPopulations; ++i) {
    const std::optional<double>& share = metrics.floored[static_cast<size_t>(i)];
    if (share) json["floored"][std::string(NameOf(static_cast<Population>(i)))] = *share;
  }
  for (const LayerLoad& layer : metrics.layers) {
    json["layers"].push_back({{"layer", layer.layer},
                              {"counts", layer.counts},
                              {"max_share", layer.load.max_share},
                              {"effective_experts", layer.load.effective_experts},
                              {"entropy", layer.entropy},
                              {"aux_loss", layer.aux_loss},
                              {"z_loss", layer.z_loss}});
    if (!layer.selection_bias.empty()) {
      json["layers"].back()["selection_bias"] = layer.selection_bias;
    }
  }
  if (metrics.evaluation) {
    const Evaluation& evaluation = *metrics.evaluation;
    json["evaluation"] = {{"tokens", evaluation.tokens},
                          {"loss", evaluation.loss},
                          {"perplexity", evaluation.perplexity},
                          {"unigram_entropy", evaluation.unigram_entropy}};
  }
  return json.dump();
}

MetricsFile::MetricsFile(std::filesystem::path path, int64_t last_step) : path_(std::move(path)) {
  if (std::filesystem::exists(path_)) {
    const KeptLines kept = FindKept(path_, last_step);
    dropped_lines_ = kept.dropped;
    kept_step_ = kept.step;
    std::error_code error;
    std::filesystem::resize_file(path_, kept.bytes, error);
    if (error) Fail("{}: cannot write: {}", path_.string(), error.message());
  }
  file_.reset(std::fopen(path_.c_str(), "ae"));
  if (file_ == nullptr) Fail("{}: cannot write: {}", path_.string(), std::strerror(errno));
}

void MetricsFile::Append(const StepMetrics& metrics) {
  const std::string line = ToJsonLine(metrics) + "\n";
  const bool written = std::fwrite(line.data(), 1, line.size(), file_.get()) == line.size();
  if (!written || std::fflush(file_.get()) != 0) {
    Fail("{}: cannot write: {}", path_.string(), std::strerror(errno));
  }
}

void MetricsFile::Sync() {
  if (!SyncDescriptor(fileno(file_.get()))) {
    Fail("{}: cannot write: {}", path_.string(), std::strerror(errno));
  }
}

}  // namespace terrace
