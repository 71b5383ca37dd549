// Plans for people.
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string_view>

#include "core/counted.h"
#include "core/parallel.h"
#include "optim/step_sink.h"
#include "plan/bytes.h"
#include "plan/report.h"

namespace terrace {
namespace {

constexpr size_t kColumns = 100;

constexpr size_t At(Memory category) { return static_cast<size_t>(category); }

// "6784.33 M", "46.70 B"
std::string Count(int64_t number) {
  const double value = static_cast<double>(number);
  if (value >= 1e10) return fmt::format("{:.2f} B", value / 1e9);
  if (value >= 1e4) return fmt::format("{:.2f} M", value / 1e6);
  return fmt::format("{}", number);
}

std::string Flops(double flops) {
  constexpr std::string_view kPrefixes[] = {"", "K", "M", "G", "T", "P", "E"};
  size_t prefix = 0;
  while (flops >= 1000 && prefix + 1 < std::size(kPrefixes)) {
    flops /= 1000;
    ++prefix;
  }
  return fmt::format("{:.3g} {}FLOPs", flops, kPrefixes[prefix]);
}

std::string Factor(double factor) {
  return factor >= 9.95 ? fmt::format("{:.0f}x", factor) : fmt::format("{:.1f}x", factor);
}

// Words in lines of kColumns, `indent` spaces before all but the first; words are never split.
std::string Wrapped(std::string_view text, size_t column, size_t indent) {
  std::string result;
  while (!text.empty()) {
    const size_t end = std::min(text.find(' '), text.size());
    if (column > indent && column + end > kColumns) {
      if (result.ends_with(' ')) result.pop_back();
      result += '\n';
      result.append(indent, ' ');
      column = indent;
    }
    result += text.substr(0, end);
    column += end;
    text.remove_prefix(end);
    if (!text.empty()) {
      result += ' ';
      ++column;
      text.remove_prefix(1);
    }
  }
  return result + "\n";
}

std::string Paragraph(std::string_view text) { return Wrapped(text, 0, 2); }

// As a shell takes it; kJoint stands for a space that ends no line.
constexpr char kJoint = '\x1f';
std::string SetFlag(std::string setting) {
  const bool plain = setting.find_first_of(" '{") == std::string::npos;
  std::replace(setting.begin(), setting.end(), ' ', kJoint);
  return plain ? fmt::format("--set{}{}", kJoint, setting)
               : fmt::format("--set{}\"{}\"", kJoint, setting);
}

std::string RunText(const Subject& subject) {
  const RunConfig& config = subject.config;
  const TrainingConfig& training = config.training;
  std::string text =
      fmt::format("run: policy {}, sink {}, weights {}, gradients {}, {} x {} x {} tokens a step",
                  subject.policy, NameOf(training.sink), NameOf(config.model.weight_dtype),
                  NameOf(training.gradient_dtype), training.gradient_accumulation_steps,
                  training.micro_batch_size, training.sequence_length);
  if (training.activation_checkpointing) text += ", activation checkpointing";
  text += fmt::format(", clipping {}", NameOf(config.optimizer.clipping.kind));
  if (!subject.hugging_face) text += fmt::format(", {}", Counted(MaxThreads(), "thread"));
  return text;
}

class Amounts {
 public:
  explicit Amounts(int64_t largest_bytes) : gib_(static_cast<double>(largest_bytes) >= 4 * kGiB) {}
  std::string_view unit() const { return gib_ ? "GiB" : "MiB"; }
  // "-" for nothing, "0.00" for little.
  std::string operator()(int64_t bytes) const {
    if (bytes == 0) return "-";
    const double number = static_cast<double>(bytes);
    return gib_ ? fmt::format("{:.2f}", number / kGiB) : fmt::format("{:.1f}", number / kMiB);
  }

 private:
  bool gib_;
};

std::string PeakText(const MemoryPlan& plan) {
  return fmt::format("in the {} (taking {})", TextOf(plan.peak_phase), plan.peak_tensor);
}

std::string MemoryTable(const PlanReport& report) {
  const MemoryPlan& plan = report.memory;
  const Amounts amount(plan.ledger.total_peak_bytes);
  std::string text = fmt::format("{:<15}{:>12}{:>11}{:>11}{:>11}{:>13}{:>10}{:>11}\n",
                                 fmt::format("at peak, {}", amount.unit()), "parameters", "weights",
                                 "gradients", "optimizer", "activations", "scratch", "total");
  const auto line = [&](std::string_view name, const std::string& parameters,
                        const CategoryBytes& bytes) {
    const int64_t total = std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
    text +=
        fmt::format("{:<15}{:>12}{:>11}{:>11}{:>11}{:>13}{:>10}{:>11}\n", name, parameters,
                    amount(bytes[At(Memory::kWeights)]), amount(bytes[At(Memory::kGradients)]),
                    amount(bytes[At(Memory::kOptimizer)]), amount(bytes[At(Memory::kActivations)]),
                    amount(bytes[At(Memory::kScratch)]), amount(total));
  };
  for (int row = 0; row < MemoryPlan::kRows; ++row) {
    const CategoryBytes& bytes = plan.at_peak[static_cast<size_t>(row)];
    const int64_t parameters = row < kPopulations ? report.parameters[static_cast<size_t>(row)] : 0;
    const bool empty = parameters == 0 && std::all_of(bytes.begin(), bytes.end(),
                                                      [](int64_t held) { return held == 0; });
    if (!empty) line(RowName(row), parameters > 0 ? Count(parameters) : "", bytes);
  }
  line("all", Count(report.subject.size().parameters), plan.ledger.at_peak_bytes);
  return text;
}

// What the release sink cannot release at once, and what its clipping costs.
std::string ReleaseText(const PlanReport& report) {
  const RunConfig& config = report.subject.config;
  if (config.training.sink != SinkKind::kRelease || report.subject.hugging_face) return "";
  std::string text = "release: one gradient at a time";
  if (const int64_t hidden_bytes = report.tensors.hidden_buffers; hidden_bytes > 0) {
    text += fmt::format(", beside {} of hidden buffers, which outlive the step",
                        BytesText(hidden_bytes));
  }
  for (const Parameter& parameter : ParametersOf(config.model)) {
    if (parameter.contributions == 1) continue;
    const DType dtype = GradientTypeOf(parameter, config.training.gradient_dtype);
    text += fmt::format(", beside that of {} ({}, {}), complete only at the end of a step",
                        parameter.name, BytesText(parameter.value.size() * BytesOf(dtype)),
                        NameOf(dtype));
  }
  if (config.optimizer.clipping.kind == ClippingKind::kGlobalNorm) {
    text += "; the global norm takes a second pass (optimizer.clipping=per_tensor does not)";
  }
  return Paragraph(text);
}

std::string CostText(const PlanReport& report) {
  const StepCost& cost = report.cost;
  std::string text =
      fmt::format("compute: {} per token of training, {} a step of {}", Flops(cost.flops_per_token),
                  Flops(cost.step_flops), Counted(cost.tokens, "token"));
  if (cost.repeated_share > 0) {
    text += fmt::format(" ({:.2f}x with what is computed again)", 1 + cost.repeated_share);
  }
  text = Paragraph(text);
  const auto moved = [](double bytes) { return BytesText(static_cast<int64_t>(bytes)); };
  text += Paragraph(fmt::format(
      "moved a step, estimated: weights {}, gradients {}, optimizer state {} (as if each use "
      "fetched a tensor once; activations left out)",
      moved(cost.weight_bytes), moved(cost.gradient_bytes), moved(cost.state_bytes)));
  return text;
}

std::string SuggestionText(const Suggestion& suggestion) {
  std::string flags;
  for (const std::string& setting : suggestion.settings) {
    if (!flags.empty()) flags += ' ';
    flags += SetFlag(setting);
  }
  const std::string start =
      fmt::format("  {:>10}  {:>5} compute  {:<13}  ", BytesText(suggestion.peak_bytes),
                  fmt::format("{:.2f}x", suggestion.relative_compute),
                  suggestion.changes_numbers ? "other numbers" : "same results");
  std::string text = start;
  text += Wrapped(flags, start.size(), start.size());
  std::replace(text.begin(), text.end(), kJoint, ' ');
  return text;
}

std::string BestPolicyText(const PlanReport& report) {
  if (!report.best_policy) {
    return Paragraph(fmt::format("best policy: none of {} fits, under either sink",
                                 fmt::join(PoliciesByLoss(), ", ")));
  }
  const BestPolicy& best = *report.best_policy;
  const Subject& subject = report.subject;
  const bool same_sink = best.sink == subject.config.training.sink;
  if (best.name == subject.policy && same_sink) {
    return fmt::format("best policy that fits: {}, as planned\n", best.name);
  }
  return Paragraph(fmt::format("best policy that fits: --policy {}{}, {}", best.name,
                               same_sink ? "" : fmt::format(" --sink {}", NameOf(best.sink)),
                               BytesText(best.peak_bytes)));
}

std::string VerdictText(const PlanReport& report) {
  if (!report.budget_bytes) return "memory: the machine does not tell what is free (--memory)\n";
  const int64_t budget = *report.budget_bytes;
  const int64_t peak = report.memory.ledger.total_peak_bytes;
  if (report.Fits()) {
    return fmt::format("memory: fits in {}, {} to spare{}\n", BytesText(budget),
                       BytesText(budget - peak),
                       report.subject.hugging_face ? " for activations and scratch" : "");
  }
  std::string text = fmt::format("memory: does not fit in {}: {} too much\n", BytesText(budget),
                                 BytesText(peak - budget));
  const Advice& advice = *report.advice;
  if (!advice.fitting.empty()) {
    text += fmt::format("what fits, least costly first ({} planned):\n",
                        Counted(advice.planned, "combination"));
    for (const Suggestion& suggestion : advice.fitting) text += SuggestionText(suggestion);
    return text;
  }
  text +=
      fmt::format("no setting makes it fit ({} planned)", Counted(advice.planned, "combination"));
  if (!advice.smallest) return text + "\n";
  return text + "; the least that was found:\n" + SuggestionText(*advice.smallest);
}

std::string DenseText(const PlanReport& report) {
  if (report.dense.empty()) return "";
  const Subject& subject = report.subject;
  const ModelSize size = subject.size();
  const int64_t peak = report.memory.ledger.total_peak_bytes;
  const double flops = report.cost.flops_per_token;
  std::string text = "\nor dense, same architecture:\n";
  const auto line = [&](std::string_view name, const std::string& parameters,
                        const std::string& width, double model_flops, int64_t bytes) {
    text += fmt::format("  {:<27}{:>12} parameters{:>15}{:>8} compute{:>12}\n", name, parameters,
                        width, Factor(model_flops / flops), BytesText(bytes));
  };
  line("this MoE", Count(size.parameters), "", flops, peak);
  const DenseModel* total = nullptr;
  const DenseModel* worth = nullptr;
  for (const DenseModel& model : report.dense) {
    if (model.kind == DenseKind::kEqualTotal) total = &model;
    if (model.kind == DenseKind::kEqualWorth) worth = &model;
    line(model.kind == DenseKind::kEqualWorth ? "equal worth (rule of thumb)" : NameOf(model.kind),
         Count(model.size.parameters), fmt::format("ffn {}", model.ffn_width),
         model.flops_per_token, model.peak_bytes);
  }
  if (total == nullptr || worth == nullptr) return text;
  const int64_t experts =
      subject.hugging_face ? subject.hugging_face->experts : subject.config.model.experts;
  const int64_t top_k =
      subject.hugging_face ? subject.hugging_face->top_k : subject.config.model.router.top_k;
  const double rows =
      static_cast<double>(report.cost.tokens * top_k) / static_cast<double>(experts);
  const std::string worth_text =
      fmt::format("{} the compute and {}", Factor(worth->flops_per_token / flops),
                  BytesText(worth->peak_bytes));
  std::string rule;
  if (worth->peak_bytes < peak) {
    rule = fmt::format(
        "Train dense where memory is short and time is not: what this MoE is worth takes a dense "
        "model {}.",
        worth_text);
  } else {
    rule = fmt::format(
        "Memory is no reason to train dense here: what this MoE is worth takes a dense model {}.",
        worth_text);
  }
  rule += fmt::format(
      " Worth is the geometric mean of active and total parameters: a rule of thumb, no law. Dense "
      "with all of the parameters learns more from each token, for {} the compute and {}. Train "
      "dense, too, where text is short: each token goes to {} of {}, so that an expert sees {} "
      "a step. Else the MoE learns more in the same time.",
      Factor(total->flops_per_token / flops), BytesText(total->peak_bytes), top_k,
      Counted(experts, "expert"), Counted(std::llround(rows), "row"));
  return text + Paragraph(rule);
}

std::string_view SinkName(const Subject& subject) { return NameOf(subject.config.training.sink); }

std::string Fitting(const MemoryPlan& memory, std::optional<int64_t> budget_bytes) {
  if (!budget_bytes) return "?";
  return memory.ledger.total_peak_bytes <= *budget_bytes ? "yes" : "no";
}

std::string HuggingFaceText(const Subject& subject) {
  if (!subject.hugging_face) return "";
  return Paragraph(
      fmt::format("This engine cannot run {}: {}. Planned from the declared tensors: activations, "
                  "scratch and alignment are left out.",
                  subject.hugging_face->family, subject.hugging_face->not_runnable));
}

// Below a table, why rows of it are empty.
template <typename Row>
std::string RefusedText(const std::vector<Row>& rows) {
  std::string text;
  for (const Row& row : rows) {
    if (row.refused.empty()) continue;
    text += Paragraph(
        fmt::format("{}, {}: {}", row.subject.policy, SinkName(row.subject), row.refused));
  }
  return text.empty() ? text : "\n" + text;
}

}  // namespace

std::string ToText(const PlanReport& report) {
  const Subject& subject = report.subject;
  const ModelSize size = subject.size();
  std::string text = fmt::format("{}: {} parameters, {} active per token\n", subject.name,
                                 Count(size.parameters), Count(size.active_parameters));
  text += Paragraph(RunText(subject));
  text += HuggingFaceText(subject);
  text += fmt::format("\n{}\n", MemoryTable(report));
  if (!subject.hugging_face) {
    text += Paragraph(fmt::format(
        "peak: {}, {}; alignment is {} of it", BytesText(report.memory.ledger.total_peak_bytes),
        PeakText(report.memory), BytesText(report.memory.alignment_bytes)));
    text += ReleaseText(report);
  }
  text += CostText(report) + VerdictText(report);
  if (report.budget_bytes) text += BestPolicyText(report);
  return text + DenseText(report);
}

std::string ToText(const std::vector<PlanRow>& rows, std::optional<int64_t> budget_bytes) {
  int64_t largest_bytes = 0;
  for (const PlanRow& row : rows) {
    if (row.memory) largest_bytes = std::max(largest_bytes, row.memory->ledger.total_peak_bytes);
  }
  const Amounts amount(largest_bytes);
  std::string text = fmt::format(
      "| policy | sink | gradient type | weights | gradients | state | activations | scratch | "
      "peak, {} | fits {} |\n|---|---|---|---:|---:|---:|---:|---:|---:|---|\n",
      amount.unit(), budget_bytes ? BytesText(*budget_bytes) : "");
  for (const PlanRow& row : rows) {
    text += fmt::format("| {} | {} | {} |", row.subject.policy, SinkName(row.subject),
                        NameOf(row.subject.config.training.gradient_dtype));
    if (!row.memory) {
      text += " - | - | - | - | - | - | refused |\n";
      continue;
    }
    const CategoryBytes& bytes = row.memory->ledger.at_peak_bytes;
    for (const Memory category : {Memory::kWeights, Memory::kGradients, Memory::kOptimizer,
                                  Memory::kActivations, Memory::kScratch}) {
      text += fmt::format(" {} |", amount(bytes[At(category)]));
    }
    text += fmt::format(" {} | {} |\n", amount(row.memory->ledger.total_peak_bytes),
                        Fitting(*row.memory, budget_bytes));
  }
  text += RefusedText(rows);
  const std::string hugging_face = HuggingFaceText(rows.front().subject);
  return hugging_face.empty() ? text : text + "\n" + hugging_face;
}

std::string ToText(const std::vector<LargestRow>& rows, int64_t budget_bytes) {
  const Amounts amount(budget_bytes);
  std::string text = fmt::format(
      "| policy | sink | gradient type | layers in {} | parameters | active | peak, {} |\n"
      "|---|---|---|---:|---:|---:|---:|\n",
      BytesText(budget_bytes), amount.unit());
  for (const LargestRow& row : rows) {
    text += fmt::format("| {} | {} | {} |", row.subject.policy, SinkName(row.subject),
                        NameOf(row.subject.config.training.gradient_dtype));
    if (!row.memory) {
      text += row.refused.empty() ? " none | - | - | - |\n" : " refused | - | - | - |\n";
      continue;
    }
    const ModelSize size = row.subject.size();
    text += fmt::format(" {} | {} | {} | {} |\n", row.subject.config.model.layers,
                        Count(size.parameters), Count(size.active_parameters),
                        amount(row.memory->ledger.total_peak_bytes));
  }
  return text + RefusedText(rows);
}

}  // namespace terrace
