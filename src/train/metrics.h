// What is known about each step, and metrics.jsonl: one JSON object a step.
#pragma once

#include <array>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/arena.h"
#include "model/parameter.h"
#include "train/balance.h"
#include "train/evaluate.h"

namespace terrace {

struct LayerLoad {
  int64_t layer = 0;
  std::vector<int64_t> counts;  // assignments of counted tokens, by expert
  Load load;
  double aux_loss = 0;  // with its coefficient
  double z_loss = 0;    // with its coefficient
  double entropy = 0;   // of the router's probabilities, mean over tokens, in nats
  std::vector<float> selection_bias = {};  // by expert, after the step; empty: the router has none
};

struct StepMetrics {
  int64_t step = 0;
  double loss = 0;           // mean cross-entropy, in nats
  double aux_loss = 0;       // sum over layers, with coefficients
  double z_loss = 0;         // likewise
  double gradient_norm = 0;  // before clipping
  double learning_rate = 0;
  int64_t tokens = 0;  // trained on since the start of the run, this step included
  double seconds = 0;  // of this step
  double tokens_per_second = 0;
  double flops_per_second = 0;  // of the model's matrix products, recomputation not counted
  double mfu = 0;  // model FLOPs utilization: flops_per_second over MeasureProductFlops
  int64_t planned_peak_bytes = 0;
  int64_t ledger_peak_bytes = 0;
  CategoryBytes ledger_at_peak_bytes{};  // the same by category
  int64_t resident_bytes = 0;
  int64_t resident_peak_bytes = 0;
  // Share of the entries of second moments on the eps floor; empty where a population has none.
  std::array<std::optional<double>, kPopulations> floored{};
  std::vector<LayerLoad> layers;  // MoE layers
  std::optional<Evaluation> evaluation;
};

// One line without its end.
std::string ToJsonLine(const StepMetrics& metrics);

// Appends to a file, each line complete on the file system before the step is over.
class MetricsFile {
 public:
  // Opens or creates the file and keeps the lines up to `last_step`: later ones belong to steps
  // that a resumed run takes again.
  MetricsFile(std::filesystem::path path, int64_t last_step);
  void Append(const StepMetrics& metrics);

  // Of later steps.
  int64_t dropped_lines() const { return dropped_lines_; }
  // Of the last line that was kept; 0 without.
  int64_t kept_step() const { return kept_step_; }
  // Nothing appended so far is lost with the machine.
  void Sync();

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::filesystem::path path_;
  int64_t dropped_lines_ = 0;
  int64_t kept_step_ = 0;
  std::unique_ptr<std::FILE, Close> file_;
};

}  // namespace terrace
