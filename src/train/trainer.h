// A training run, from a configuration to checkpoints.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "core/arena.h"
#include "core/error.h"
#include "train/config.h"
#include "train/metrics.h"

namespace terrace {

// What a run is before its first step.
struct RunSummary {
  ModelSize size;
  Ledger plan;               // of the dry run: the memory that the run takes, to the byte
  int64_t free_bytes = 0;    // what the machine could give now
  double peak_flops = 0;     // of matrix products, as measured
  int64_t train_tokens = 0;  // of the data
  int64_t val_tokens = 0;    // 0: no evaluation
  std::string policy;        // as the configuration names it
  double learning_rate = 0;  // peak
  int64_t first_step = 0;    // resumed after this many
  int64_t last_step = 0;
};

struct TrainOptions {
  bool resume = false;
  // Start even where the plan exceeds the free memory, or checkpoints the room on the disk.
  bool overcommit = false;
};

struct TrainCallbacks {
  // Before memory is taken and filled, which takes a while for a large model, or refused.
  std::function<void(const RunSummary&)> begin;
  std::function<void(const StepMetrics&)> step;
  std::function<void(std::string_view)> warning;
  std::function<void(const std::filesystem::path&)> saved;
  // Asked before the first step, which then is not taken, and after every step: true saves and ends
  // the run.
  std::function<bool()> stop;
};

struct TrainResult {
  int64_t step = 0;                      // steps done in total
  bool interrupted = false;              // by `stop`, before the last step
  std::optional<Evaluation> evaluation;  // of the last one made
};

// A loss or gradient is not finite, or all gradients are 0. The run's last checkpoint is as it was.
class DivergedError : public Error {
 public:
  DivergedError(int64_t step, std::string reason, const std::string& text)
      : Error(text), step_(step), reason_(std::move(reason)) {}

  int64_t step() const { return step_; }
  // Names the tensor, without step or folder.
  const std::string& reason() const { return reason_; }

 private:
  int64_t step_;
  std::string reason_;
};

// Trains `config` in `run_folder`: a new one, or, with options.resume, one that holds a run of the
// same model, data, seed and shapes, which goes on from its newest checkpoint bit for bit as if it
// had not stopped. Finds its memory by a dry run first and takes no more.
//
// Throws Error on one line: when the folder holds a run already, the data or the configuration is
// at fault, memory or room for checkpoints is short, or the disk is full; DivergedError, naming
// step and tensor.
TrainResult Train(const ResolvedRun& run, const std::filesystem::path& run_folder,
                  const TrainOptions& options, const TrainCallbacks& callbacks);

// The ledger of a step and an evaluation of `config`, from a run without data, which `watcher` may
// follow. Nothing of the data that `config` names is looked at.
Ledger PlanTraining(const ResolvedRun& run, ArenaWatcher* watcher = nullptr);

}  // namespace terrace
