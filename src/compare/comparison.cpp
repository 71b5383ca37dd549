#include "compare/comparison.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <set>

#include "compare/front.h"
#include "core/counted.h"
#include "core/settings.h"
#include "model/config.h"
#include "optim/schedule.h"

namespace terrace {
namespace {

using Results = std::vector<const RunResult*>;

Results FinishedRuns(const Study& study, const RunResults& results, const std::string& policy,
                     double rate) {
  Results found;
  for (int64_t i = 0; i < study.seeds; ++i) {
    const auto result = results.find(NameOf(RunSpec{policy, rate, study.first_seed() + i}));
    if (result != results.end()) found.push_back(&result->second);
  }
  return found;
}

MeanSpread Over(const Results& runs, const std::function<double(const RunResult&)>& value) {
  std::vector<double> values;
  for (const RunResult* run : runs) values.push_back(value(*run));
  return MeanSpreadOf(values);
}

// Of the last tenth of a curve.
double MeanAtEnd(const RunResult& run, double CurvePoint::*member) {
  const size_t count = run.curve.size();
  const size_t last = (count + 9) / 10;
  double sum = 0;
  for (size_t i = count - last; i < count; ++i) sum += run.curve[i].*member;
  return sum / static_cast<double>(last);
}

std::vector<MeanValidationPoint> MeanValidation(const Results& runs) {
  size_t count = runs.front()->validation.size();
  for (const RunResult* run : runs) count = std::min(count, run->validation.size());
  std::vector<MeanValidationPoint> points;
  for (size_t i = 0; i < count; ++i) {
    const auto point_of = [i](const RunResult& run) { return run.validation[i]; };
    const ValidationPoint first = point_of(*runs.front());
    points.push_back(
        {.step = first.step,
         .tokens = first.tokens,
         .seconds = Over(runs, [&](const RunResult& run) { return point_of(run).seconds; }).mean,
         .loss = Over(runs, [&](const RunResult& run) { return point_of(run).loss; }),
         .perplexity =
             Over(runs, [&](const RunResult& run) { return std::exp(point_of(run).loss); })});
  }
  return points;
}

std::vector<CurvePoint> MeanCurve(const Results& runs) {
  std::vector<CurvePoint> curve = runs.front()->curve;
  for (const RunResult* run : runs) curve.resize(std::min(curve.size(), run->curve.size()));
  for (size_t i = 0; i < curve.size(); ++i) {
    const auto mean = [&](double CurvePoint::*member) {
      return Over(runs, [&](const RunResult& run) { return run.curve[i].*member; }).mean;
    };
    curve[i].seconds = mean(&CurvePoint::seconds);
    curve[i].loss = mean(&CurvePoint::loss);
    curve[i].aux_loss = mean(&CurvePoint::aux_loss);
    curve[i].imbalance = mean(&CurvePoint::imbalance);
    for (size_t p = 0; p < kPopulations; ++p) {
      if (!curve[i].floored[p]) continue;
      curve[i].floored[p] = Over(runs, [&](const RunResult& run) {
                              return run.curve[i].floored[p].value_or(0);
                            }).mean;
    }
  }
  return curve;
}

std::vector<ExpertLoads> SumOfLoads(const Results& runs) {
  std::vector<ExpertLoads> loads = runs.front()->loads;
  for (size_t r = 1; r < runs.size(); ++r) {
    for (size_t layer = 0; layer < loads.size(); ++layer) {
      std::vector<int64_t>& counts = loads[layer].counts;
      for (size_t e = 0; e < counts.size(); ++e) counts[e] += runs[r]->loads.at(layer).counts.at(e);
    }
  }
  return loads;
}

std::optional<int64_t> SpikesOf(const Results& runs) {
  std::optional<int64_t> spikes;
  for (const RunResult* run : runs) {
    if (!run->spikes) return {};
    spikes = spikes.value_or(0) + *run->spikes;
  }
  return spikes;
}

void MarkFront(std::vector<PolicyRow>& rows) {
  std::vector<PolicyRow*> candidates;
  std::vector<FrontPoint> points;
  for (PolicyRow& row : rows) {
    if (row.seeds == 0 || row.diverged > 0) continue;
    candidates.push_back(&row);
    points.push_back({row.memory.peak_bytes, row.loss.mean});
  }
  const std::vector<bool> on_front = OnFront(points);
  for (size_t i = 0; i < candidates.size(); ++i) candidates[i]->on_front = on_front[i];
}

PolicyRow RowOf(const Study& study, const StudyPolicy& policy, const RunResults& results) {
  PolicyRow row;
  row.policy = policy.name;
  row.base = policy.base;
  row.rates = std::ssize(policy.rates);
  row.chosen = ChooseRate(study, policy.ablation() ? study.Named(policy.base) : policy, results);
  row.learning_rate = row.chosen.rate;
  if (!row.learning_rate) {
    Results all;
    for (const double rate : policy.rates) {
      for (const RunResult* run : FinishedRuns(study, results, policy.name, rate)) {
        row.diverged += run->diverged() ? 1 : 0;
        all.push_back(run);
      }
    }
    row.spikes = SpikesOf(all);
    return row;
  }
  Results runs = FinishedRuns(study, results, policy.name, *row.learning_rate);
  row.spikes = SpikesOf(runs);
  row.diverged = std::erase_if(runs, [](const RunResult* run) { return run->diverged(); });
  row.seeds = std::ssize(runs);
  if (runs.empty()) return row;
  row.loss = Over(runs, [](const RunResult& run) { return run.final_loss(); });
  row.perplexity = Over(runs, [](const RunResult& run) { return std::exp(run.final_loss()); });
  row.tokens_per_second = Over(runs, [](const RunResult& run) { return run.tokens_per_second; });
  row.aux_loss =
      Over(runs, [](const RunResult& run) { return MeanAtEnd(run, &CurvePoint::aux_loss); });
  row.imbalance =
      Over(runs, [](const RunResult& run) { return MeanAtEnd(run, &CurvePoint::imbalance); });
  row.toml = runs.front()->facts.policy_toml;
  row.memory = runs.front()->facts.memory;
  row.bytes_per_parameter = static_cast<double>(row.memory.peak_bytes) /
                            static_cast<double>(SizeOf(study.base.model).parameters);
  row.validation = MeanValidation(runs);
  row.curve = MeanCurve(runs);
  row.loads = SumOfLoads(runs);
  return row;
}

void AddSweep(const Study& study, const StudyPolicy& policy, const RunResults& results,
              std::vector<SweepRow>& rows) {
  if (policy.rates.size() < 2) return;
  const ChosenRate chosen = ChooseRate(study, policy, results);
  for (const double rate : policy.rates) {
    SweepRow row{
        .policy = policy.name, .learning_rate = rate, .loss = {}, .spikes = {}, .diverged = {}};
    const auto found = results.find(NameOf(RunSpec{policy.name, rate, study.first_seed()}));
    if (found != results.end()) {
      row.finished = true;
      row.diverged = found->second.facts.diverged;
      if (!row.diverged) row.loss = found->second.final_loss();
      row.first_loss = found->second.first_loss;
      row.spikes = found->second.spikes;
    }
    row.chosen = chosen.complete && chosen.rate == rate;
    row.at_edge = row.chosen && chosen.at_edge;
    rows.push_back(std::move(row));
  }
}

// 2924058 as "2,924,058".
std::string Grouped(int64_t number) {
  std::string text = fmt::format("{}", number);
  for (int64_t i = std::ssize(text) - 3; i > 0; i -= 3) text.insert(static_cast<size_t>(i), 1, ',');
  return text;
}

std::string ModelText(const ModelConfig& model) {
  const ModelSize size = SizeOf(model);
  std::string text = fmt::format("{:.2f} M parameters, {:.2f} M active per token; {} of width {}",
                                 static_cast<double>(size.parameters) / 1e6,
                                 static_cast<double>(size.active_parameters) / 1e6,
                                 Counted(model.layers, "layer"), model.width);
  if (model.MoeLayers() > 0) {
    text += fmt::format(", {} of them with {} of width {} (top {})", model.MoeLayers(),
                        Counted(model.experts, "expert"), model.ExpertWidth(), model.router.top_k);
  }
  return text + fmt::format("; weights {}", NameOf(model.weight_dtype));
}

std::string ScheduleText(const OptimizerConfig& optimizer) {
  std::string text =
      fmt::format("{}, {} % warm-up", NameOf(optimizer.schedule), 100 * optimizer.warmup_fraction);
  if (optimizer.schedule == ScheduleKind::kWsd) {
    text += fmt::format(", {} % decay", 100 * optimizer.decay_fraction);
  }
  if (optimizer.schedule != ScheduleKind::kConstant) {
    text += fmt::format(", to {} of the peak", optimizer.min_ratio);
  }
  text += fmt::format("; clipping {}", NameOf(optimizer.clipping.kind));
  if (optimizer.clipping.kind != ClippingKind::kNone) {
    text += fmt::format(" {}", optimizer.clipping.max_norm);
  }
  return text;
}

// What memory turns on beside the policy.
std::string GradientsText(const RunConfig& config) {
  const TrainingConfig& training = config.training;
  const bool narrow = config.model.weight_dtype == DType::kBF16;
  std::string text = fmt::format(
      "{}, sink {}", NameOf(narrow ? training.gradient_dtype : DType::kF32), NameOf(training.sink));
  if (training.activation_checkpointing) text += ", activation checkpointing";
  return text;
}

// What the configuration lays over every policy.
std::string OverridesText(RunConfig config) {
  std::vector<std::string> texts;
  for (const Field& field : FieldsOf(config)) {
    if (field.key != "optimizer.weight_decay" && !field.key.starts_with("optimizer.populations.")) {
      continue;
    }
    const std::string value = ValueText(field);
    if (!value.empty()) texts.push_back(fmt::format("{} = {}", field.key, value));
  }
  return fmt::format("{}", fmt::join(texts, ", "));
}

// "a processor, 1 or 2 threads"
std::string MachineText(const std::string& processor, const std::set<int64_t>& threads) {
  std::vector<std::string> texts;
  if (!processor.empty()) texts.push_back(processor);
  if (!threads.empty()) {
    texts.push_back(fmt::format("{} {}", fmt::join(threads, " or "),
                                ForCount(*threads.rbegin(), "thread", "threads")));
  }
  return fmt::format("{}", fmt::join(texts, ", "));
}

std::vector<std::pair<std::string, std::string>> FactsOf(const Study& study,
                                                         const RunResults& results,
                                                         const StudyContext& context) {
  const TrainingConfig& training = study.base.training;
  const int64_t evaluated =
      std::min(context.val_tokens,
               training.eval_batches * training.micro_batch_size * training.sequence_length);
  std::vector<std::pair<std::string, std::string>> facts;
  facts.emplace_back("Model", ModelText(study.base.model));
  facts.emplace_back(
      "Data",
      fmt::format("{}: {} {} to train on, {} to validate, {} of them each time",
                  std::filesystem::path(study.base.data.folder).filename().string(),
                  Grouped(context.train_tokens), ForCount(context.train_tokens, "token", "tokens"),
                  Grouped(context.val_tokens), Grouped(evaluated)));
  facts.emplace_back(
      "Each run",
      fmt::format(
          "{} {}: {} {} of {} of {}", Grouped(training.steps * training.StepTokens()),
          ForCount(training.steps * training.StepTokens(), "token", "tokens"),
          Grouped(training.steps), ForCount(training.steps, "step", "steps"),
          Counted(training.gradient_accumulation_steps * training.micro_batch_size, "sequence"),
          Counted(training.sequence_length, "token")));
  facts.emplace_back("Gradients", GradientsText(study.base));
  facts.emplace_back("Schedule", ScheduleText(study.base.optimizer));
  const std::string overrides = OverridesText(study.base);
  if (!overrides.empty()) facts.emplace_back("Over every policy", overrides);
  facts.emplace_back("Seeds",
                     study.seeds == 1
                         ? fmt::format("{}", study.first_seed())
                         : fmt::format("{} to {}; runs of one seed start from the same weights and "
                                       "see the same batches in the same order",
                                       study.first_seed(), study.first_seed() + study.seeds - 1));
  const std::string machine = MachineText(context.machine, ThreadsOf(results));
  if (!machine.empty()) facts.emplace_back("Machine", machine);
  facts.emplace_back("Command", context.command);
  return facts;
}

}  // namespace

MeanSpread MeanSpreadOf(const std::vector<double>& values) {
  MeanSpread result;
  const double count = static_cast<double>(values.size());
  for (const double value : values) result.mean += value / count;
  if (values.size() < 2) return result;
  double squares = 0;
  for (const double value : values) squares += (value - result.mean) * (value - result.mean);
  result.stddev = std::sqrt(squares / (count - 1));
  return result;
}

std::set<int64_t> ThreadsOf(const RunResults& results) {
  std::set<int64_t> threads;
  for (const auto& [name, result] : results) {
    if (result.facts.threads > 0) threads.insert(result.facts.threads);
  }
  return threads;
}

Comparison Compare(const Study& study, const RunResults& results, const StudyContext& context) {
  Comparison comparison;
  std::vector<std::string> names;
  int64_t ablations = 0;
  for (const StudyPolicy& policy : study.policies) {
    if (policy.ablation()) {
      ++ablations;
    } else {
      names.push_back(policy.name);
    }
    comparison.policies.push_back(RowOf(study, policy, results));
    AddSweep(study, policy, results, comparison.sweep);
  }
  MarkFront(comparison.policies);
  comparison.parameters = SizeOf(study.base.model).parameters;
  comparison.title = fmt::format("Comparison of {}", fmt::join(names, ", "));
  if (ablations > 0) {
    comparison.title += fmt::format(", and {}", Counted(ablations, "ablation"));
  }
  comparison.facts = FactsOf(study, results, context);
  comparison.data = context.data;
  const std::vector<RunSpec> runs = KnownRuns(study, results);
  comparison.runs_total = std::ssize(runs) + UndecidedRuns(study, results);
  for (const RunSpec& run : runs) {
    const auto found = results.find(NameOf(run));
    if (found == results.end()) continue;
    ++comparison.runs_done;
    comparison.runs.push_back(found->second);
    if (found->second.unigram_entropy > 0) {
      comparison.unigram_entropy = found->second.unigram_entropy;
    }
  }
  return comparison;
}

}  // namespace terrace
