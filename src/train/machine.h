// What a training run holds in its arena, and one step on it.
#pragma once

#include <cstdint>
#include <memory>

#include "backend/cpu/cpu_backend.h"
#include "core/arena.h"
#include "data/batches.h"
#include "model/model.h"
#include "optim/optimizer.h"
#include "optim/step_sink.h"
#include "train/config.h"
#include "train/step.h"

namespace terrace {

struct Machine {
  // `run` must outlive the machine. On a dry arena everything is counted and nothing computed.
  Machine(const ResolvedRun& run, Arena owned);

  // Step `step`, from 1: reads its batches (null in a dry run: none) and updates the weights.
  StepReport Step(int64_t step, const TrainBatches* batches);

  const ResolvedRun& run;
  Arena arena;
  CpuBackend backend;
  Model model;
  Optimizer optimizer;
  std::unique_ptr<StepSink> sink;
};

}  // namespace terrace
