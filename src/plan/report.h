// All that `terrace plan` says about one run, and its comparisons of several.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "plan/advice.h"
#include "plan/best_policy.h"
#include "plan/dense.h"
#include "plan/estimate.h"
#include "plan/memory_plan.h"
#include "plan/subject.h"

namespace terrace {

struct PlanReport {
  Subject subject;
  std::array<int64_t, kPopulations> parameters{};  // by population
  MemoryPlan memory;
  TensorBytes tensors;
  StepCost cost;
  std::optional<int64_t> budget_bytes;    // empty: the machine does not tell
  std::optional<Advice> advice;           // for what does not fit
  std::optional<BestPolicy> best_policy;  // that fits; empty: none, or no budget
  std::vector<DenseModel> dense;

  bool Fits() const { return !budget_bytes || memory.ledger.total_peak_bytes <= *budget_bytes; }
};
PlanReport MakeReport(const Subject& subject, std::optional<int64_t> budget_bytes);

// One run among several.
struct PlanRow {
  Subject subject;
  std::optional<MemoryPlan> memory;
  std::string refused;  // why there is no plan: what the policy or the sink cannot do
};
PlanRow MakeRow(const Subject& subject);

// The model with as many layers as fit.
struct LargestRow {
  Subject subject;
  std::optional<MemoryPlan> memory;  // of subject's layers; empty: not even one fits, or refused
  std::string refused;               // as in PlanRow
};
// Throws Error for a model that this engine cannot run.
LargestRow LargestThatFits(const Subject& subject, int64_t budget_bytes);

// --- As text (text.cpp): at most 100 columns -----------------------------------------------------
std::string ToText(const PlanReport& report);
// A table in Markdown, one row a run.
std::string ToText(const std::vector<PlanRow>& rows, std::optional<int64_t> budget_bytes);
std::string ToText(const std::vector<LargestRow>& rows, int64_t budget_bytes);

// --- As JSON (json.cpp): bytes as whole numbers --------------------------------------------------
std::string ToJson(const PlanReport& report);
std::string ToJson(const std::vector<PlanRow>& rows, std::optional<int64_t> budget_bytes);
std::string ToJson(const std::vector<LargestRow>& rows, int64_t budget_bytes);

// --- As a picture (chart.cpp) --------------------------------------------------------------------
// Memory over a step by category: an SVG that needs nothing else, for light and dark backgrounds.
std::string ToSvg(const PlanReport& report);

}  // namespace terrace
