#include "plan/report.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "plan/declared_plan.h"
#include "train/trainer.h"

namespace terrace {
namespace {

constexpr int64_t kMaxLayers = 4096;

MemoryPlan PlanOf(const Subject& subject) {
  return subject.hugging_face ? PlanDeclared(*subject.hugging_face, subject.config)
                              : PlanMemory(subject.config);
}

}  // namespace

PlanRow MakeRow(const Subject& subject) {
  PlanRow row{subject, std::nullopt, ""};
  try {
    row.memory = PlanOf(subject);
  } catch (const Error& error) {
    row.refused = error.what();
  }
  return row;
}

PlanReport MakeReport(const Subject& subject, std::optional<int64_t> budget_bytes) {
  PlanReport report;
  report.subject = subject;
  report.budget_bytes = budget_bytes;
  const ResolvedRun run(subject.config);
  const RunConfig& config = run.config;
  if (subject.hugging_face) {
    for (const DeclaredTensor& tensor : subject.hugging_face->tensors) {
      report.parameters[static_cast<size_t>(tensor.population)] +=
          tensor.count * tensor.shape.size();
    }
  } else {
    for (const Parameter& parameter : ParametersOf(config.model)) {
      report.parameters[static_cast<size_t>(parameter.population)] += parameter.value.size();
    }
  }
  report.memory = PlanOf(subject);
  report.tensors =
      subject.hugging_face ? BytesOfTensors(*subject.hugging_face, run) : BytesOfTensors(run);
  report.cost = CostOf(subject.size(), report.tensors, config);
  report.dense = DenseModelsOf(subject);
  if (!budget_bytes) return report;
  const Planner planner = [&](const ResolvedRun& changed) {
    return subject.hugging_face
               ? PlanDeclared(*subject.hugging_face, changed).ledger.total_peak_bytes
               : PlanTraining(changed).total_peak_bytes;
  };
  report.best_policy = FindBestPolicy(run, *budget_bytes, planner);
  if (!report.Fits()) report.advice = Advise(run, *budget_bytes, planner, !subject.hugging_face);
  return report;
}

LargestRow LargestThatFits(const Subject& subject, int64_t budget_bytes) {
  if (subject.hugging_face) {
    Fail("{}: the largest that fits is found for models that can be run (this one has {})",
         subject.name, subject.hugging_face->not_runnable);
  }
  LargestRow row{subject, std::nullopt, ""};
  RunConfig& config = row.subject.config;
  const auto fits = [&](int64_t layers) {
    config.model.layers = layers;
    return PlanTraining(config).total_peak_bytes <= budget_bytes;
  };
  try {
    if (!fits(1)) return row;
    int64_t most = 1, too_many = 2;
    while (too_many <= kMaxLayers && fits(too_many)) {
      most = too_many;
      too_many *= 2;
    }
    while (too_many - most > 1) {
      const int64_t middle = most + (too_many - most) / 2;
      (fits(middle) ? most : too_many) = middle;
    }
    config.model.layers = most;
    row.memory = PlanMemory(config);
  } catch (const Error& error) {
    row.refused = error.what();
  }
  return row;
}

}  // namespace terrace
