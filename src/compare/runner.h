// Runs a study in a folder:
//   runs/NAME/         one training run each; result.json once it is finished
//   compare.md, .csv, .json, runs.csv, report.html     rewritten after each run
#pragma once

#include <filesystem>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "compare/comparison.h"
#include "train/trainer.h"

namespace terrace {

// A study before its first step.
struct StudyStart {
  struct Policy {
    std::string name;
    RunMemory memory;
  };
  ModelSize size;
  int64_t tokens = 0;  // a run
  std::vector<Policy> policies;
  std::vector<RunSpec> runs;  // those known so far
  std::vector<RunSpec> done;  // of them
  int64_t undecided = 0;      // further ones
  std::set<int64_t> threads;  // that the runs that are done had, as far as they say
  // Finished runs in the folder that the study does not have: they are in no report.
  std::vector<std::string> others;
};

struct StudyCallbacks {
  std::function<void(const StudyStart&)> start;
  // Before run `number` of `total`; what it returns follows that run.
  std::function<TrainCallbacks(const RunSpec&, int64_t number, int64_t total)> run;
  std::function<void(const RunSpec&, const RunResult&)> finished;
};

struct StudyOptions {
  std::string command;  // for the report
  std::string machine;  // likewise
  bool keep_checkpoints = false;
};

struct StudyOutcome {
  Comparison comparison;
  bool interrupted = false;
};

// Does what is left to do: finished runs are kept, an interrupted one goes on bit for bit, and one
// that diverges is a result like others. Ends early when the callbacks' `stop` says so.
//
// Throws Error on one line: before any run for a policy that cannot serve the model, too little
// memory, or a folder that holds another study (naming what differs); during a run as Train does.
StudyOutcome RunStudy(const Study& study, const std::filesystem::path& folder,
                      const StudyOptions& options, const StudyCallbacks& callbacks);

}  // namespace terrace
