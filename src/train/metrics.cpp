#include "train/metrics.h"

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "core/atomic_file.h"
#include "core/error.h"

namespace terrace {
namespace {

// Keeps the order in which keys are added.
using Json = nlohmann::ordered_json;

// The bytes up to the end of the last line of a step up to `last_step`: a damaged line in between
// costs no history.
size_t KeptBytes(std::string_view text, int64_t last_step) {
  size_t kept = 0;
  size_t begin = 0;
  for (size_t end; (end = text.find('\n', begin)) != std::string_view::npos; begin = end + 1) {
    const Json line = Json::parse(text.substr(begin, end - begin), nullptr, false);
    if (line.is_object() && line.contains("step") && line["step"] <= last_step) kept = end + 1;
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
      {"share_of_peak", metrics.share_of_peak},
      {"planned_peak_bytes", metrics.planned_peak_bytes},
      {"ledger_peak_bytes", metrics.ledger_peak_bytes},
      {"resident_bytes", metrics.resident_bytes},
      {"resident_peak_bytes", metrics.resident_peak_bytes},
  };
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
    const size_t kept = KeptBytes(ReadFile(path_), last_step);
    std::error_code error;
    std::filesystem::resize_file(path_, kept, error);
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

}  // namespace terrace
