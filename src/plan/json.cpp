// Plans for scripts.
#include <nlohmann/json.hpp>

#include "core/parallel.h"
#include "plan/report.h"

namespace terrace {
namespace {

using Json = nlohmann::ordered_json;

Json ToJson(const CategoryBytes& bytes) {
  Json json = Json::object();
  for (int i = 0; i < kMemoryCategories; ++i) {
    json[std::string(NameOf(Memory(i)))] = bytes[static_cast<size_t>(i)];
  }
  return json;
}

Json RunOf(const Subject& subject) {
  const TrainingConfig& training = subject.config.training;
  return {{"policy", subject.policy},
          {"sink", NameOf(training.sink)},
          {"precision", NameOf(subject.config.model.weight_dtype)},
          {"gradient_dtype", NameOf(training.gradient_dtype)},
          {"gradient_accumulation_steps", training.gradient_accumulation_steps},
          {"micro_batch_size", training.micro_batch_size},
          {"sequence_length", training.sequence_length},
          {"activation_checkpointing", training.activation_checkpointing},
          {"clipping", NameOf(subject.config.optimizer.clipping.kind)},
          {"threads", MaxThreads()}};
}

Json ModelOf(const Subject& subject) {
  const ModelSize size = subject.size();
  Json json = {{"name", subject.name},
               {"parameters", size.parameters},
               {"active_parameters", size.active_parameters},
               {"runnable", !subject.hugging_face}};
  if (subject.hugging_face) {
    json["family"] = subject.hugging_face->family;
    json["not_runnable"] = subject.hugging_face->not_runnable;
  } else {
    json["layers"] = subject.config.model.layers;
  }
  return json;
}

Json MemoryOf(const Subject& subject, const MemoryPlan& memory, bool moments) {
  Json json = {{"peak_bytes", memory.ledger.total_peak_bytes},
               {"at_peak_bytes", ToJson(memory.ledger.at_peak_bytes)},
               {"activations_planned", !subject.hugging_face}};
  if (subject.hugging_face) return json;
  json["alignment_bytes"] = memory.alignment_bytes;
  json["peak_phase"] = TextOf(memory.peak_phase);
  json["peak_tensor"] = memory.peak_tensor;
  if (!moments) return json;
  json["moments"] = Json::array();
  for (const PlanMoment& moment : memory.moments) {
    json["moments"].push_back({{"phase", TextOf(moment.phase)}, {"bytes", ToJson(moment.bytes)}});
  }
  return json;
}

Json ToJson(const Suggestion& suggestion) {
  return {{"settings", suggestion.settings},
          {"peak_bytes", suggestion.peak_bytes},
          {"relative_compute", suggestion.relative_compute},
          {"changes_numbers", suggestion.changes_numbers}};
}

Json VerdictOf(const PlanReport& report) {
  if (!report.budget_bytes) return nullptr;
  Json json = {{"memory_bytes", *report.budget_bytes},
               {"fits", report.Fits()},
               {"spare_bytes", *report.budget_bytes - report.memory.ledger.total_peak_bytes},
               {"best_policy", nullptr}};
  if (report.best_policy) {
    json["best_policy"] = {{"policy", report.best_policy->name},
                           {"sink", NameOf(report.best_policy->sink)},
                           {"peak_bytes", report.best_policy->peak_bytes}};
  }
  if (!report.advice) return json;
  json["suggestions"] = Json::array();
  for (const Suggestion& suggestion : report.advice->fitting) {
    json["suggestions"].push_back(ToJson(suggestion));
  }
  json["smallest"] = report.advice->smallest ? ToJson(*report.advice->smallest) : Json();
  json["planned_combinations"] = report.advice->planned;
  return json;
}

std::string Text(const Json& json) {
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace

std::string ToJson(const PlanReport& report) {
  const Subject& subject = report.subject;
  Json json = {{"model", ModelOf(subject)},
               {"run", RunOf(subject)},
               {"memory", MemoryOf(subject, report.memory, true)}};
  Json& populations = json["memory"]["by_population"] = Json::object();
  for (int row = 0; row < MemoryPlan::kRows; ++row) {
    Json& population = populations[row < kPopulations ? std::string(RowName(row)) : "none"];
    population["parameters"] = row < kPopulations ? report.parameters[static_cast<size_t>(row)] : 0;
    population["at_peak_bytes"] = ToJson(report.memory.at_peak[static_cast<size_t>(row)]);
  }
  const StepCost& cost = report.cost;
  json["cost"] = {{"tokens_per_step", cost.tokens},
                  {"flops_per_token", cost.flops_per_token},
                  {"step_flops", cost.step_flops},
                  {"repeated_share", cost.repeated_share},
                  {"estimated_moved_bytes",
                   {{"weights", cost.weight_bytes},
                    {"gradients", cost.gradient_bytes},
                    {"optimizer", cost.state_bytes}}}};
  json["verdict"] = VerdictOf(report);
  json["dense"] = Json::array();
  for (const DenseModel& model : report.dense) {
    json["dense"].push_back({{"kind", NameOf(model.kind)},
                             {"parameters", model.size.parameters},
                             {"ffn_width", model.ffn_width},
                             {"flops_per_token", model.flops_per_token},
                             {"peak_bytes", model.peak_bytes}});
  }
  return Text(json);
}

std::string ToJson(const std::vector<PlanRow>& rows, std::optional<int64_t> budget_bytes) {
  Json json = {{"plans", Json::array()}};
  for (const PlanRow& row : rows) {
    Json plan = {{"model", ModelOf(row.subject)}, {"run", RunOf(row.subject)}};
    plan["memory"] = row.memory ? MemoryOf(row.subject, *row.memory, false) : Json();
    if (!row.memory) plan["refused"] = row.refused;
    if (row.memory && budget_bytes) {
      plan["fits"] = row.memory->ledger.total_peak_bytes <= *budget_bytes;
    }
    json["plans"].push_back(std::move(plan));
  }
  json["memory_bytes"] = budget_bytes ? Json(*budget_bytes) : Json();
  return Text(json);
}

std::string ToJson(const std::vector<LargestRow>& rows, int64_t budget_bytes) {
  Json json = {{"largest", Json::array()}};
  for (const LargestRow& row : rows) {
    Json largest = {{"run", RunOf(row.subject)}, {"model", nullptr}};
    if (row.memory) {
      largest["model"] = ModelOf(row.subject);
      largest["memory"] = MemoryOf(row.subject, *row.memory, false);
    }
    if (!row.refused.empty()) largest["refused"] = row.refused;
    json["largest"].push_back(std::move(largest));
  }
  json["memory_bytes"] = budget_bytes;
  return Text(json);
}

}  // namespace terrace
