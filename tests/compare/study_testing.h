// Studies and results made up for tests.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "compare/study.h"
#include "support/small_run.h"
#include "train/metrics.h"

namespace terrace {

inline Study StudyOf(StudyRequest request) {
  RunConfig base = SmallRun("corpus");
  base.training.seed = 5;
  return MakeStudy(base, request);
}

// Of a run whose validation loss falls to `final_loss` in the middle and at the end.
inline RunResult ResultOf(const RunSpec& run, double final_loss) {
  RunResult result;
  result.facts.policy = run.policy;
  result.facts.policy_toml = "learning_rate = 1\n";
  result.facts.learning_rate = run.learning_rate;
  result.facts.seed = run.seed;
  result.facts.data = "data";
  result.facts.memory.peak_bytes = 5 << 20;
  result.facts.memory.at_peak_bytes = {1 << 20, 2 << 20, 1 << 20, 1 << 19, 1 << 19};
  result.facts.memory.state.total = 3 << 19;
  result.facts.memory.state.by_population[static_cast<size_t>(Population::kExpert)] = 3 << 19;
  result.steps = 20;
  result.tokens = 2560;
  result.seconds = 2;
  result.tokens_per_second = 1280;
  result.first_loss = 5.5;
  result.spikes = 1;
  result.unigram_entropy = 3;
  result.validation = {{10, 1280, 1, final_loss + 1}, {20, 2560, 2, final_loss}};
  for (const int64_t step : {5, 10, 15, 20}) {
    CurvePoint point{
        .step = step, .tokens = 128 * step, .seconds = 0.1 * static_cast<double>(step)};
    point.loss = final_loss + 2.0 / static_cast<double>(step);
    point.aux_loss = 0.05;
    point.imbalance = 1.5;
    point.floored[static_cast<size_t>(Population::kExpert)] = 0.25;
    result.curve.push_back(point);
  }
  result.loads = {{1, {10, 20, 30, 40}}};
  return result;
}

inline RunResult DivergedResultOf(const RunSpec& run) {
  RunResult result = ResultOf(run, 9);
  result.facts.diverged = Divergence{7, "the loss is not finite, first in the head"};
  result.validation.clear();
  return result;
}

inline void AddResult(RunResults& results, const RunSpec& run, double loss) {
  results.insert_or_assign(NameOf(run), ResultOf(run, loss));
}
inline void AddDiverged(RunResults& results, const RunSpec& run) {
  results.insert_or_assign(NameOf(run), DivergedResultOf(run));
}

}  // namespace terrace
