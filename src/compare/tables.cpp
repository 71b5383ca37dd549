#include "compare/tables.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "compare/spikes.h"
#include "core/counted.h"

namespace terrace {
namespace {

constexpr double kMiB = 1 << 20;

struct Table {
  std::vector<std::string> header;
  std::vector<std::vector<std::string>> rows;
  size_t text_columns = 1;  // aligned to the left; the others hold numbers
};

// The perplexity of a bad run has hundreds of digits, or is infinite.
std::string Fixed(double value, int decimals) {
  return std::abs(value) < 1e7 ? fmt::format("{:.{}f}", value, decimals)
                               : fmt::format("{:.2e}", value);
}

std::string Cell(const MeanSpread& value, int decimals) {
  std::string text = Fixed(value.mean, decimals);
  if (value.stddev && std::isfinite(*value.stddev)) {
    text += " ± " + Fixed(*value.stddev, decimals);
  }
  return text;
}

std::string MiB(int64_t bytes) { return fmt::format("{:.1f}", static_cast<double>(bytes) / kMiB); }

// How the learning rate was found, which decides what the row is worth.
std::string RateCell(const PolicyRow& row) {
  if (!row.learning_rate) {
    if (!row.chosen.complete) return "";
    return row.base.empty() ? "all diverged" : fmt::format("{}'s all diverged", row.base);
  }
  std::string text = fmt::format("{}", *row.learning_rate);
  if (!row.chosen.complete) return text + " (best so far)";
  if (!row.base.empty()) return text + fmt::format(" ({}'s)", row.base);
  if (row.rates == 1) return text + " (not swept)";
  text += fmt::format(" (best of {})", row.rates);
  if (row.chosen.at_edge) text += ", at the edge";
  return text;
}

// Results of earlier versions do not have every count.
std::string CountCell(const std::optional<int64_t>& count) {
  return count ? fmt::format("{}", *count) : "";
}

Table PolicyTable(const Comparison& comparison) {
  Table table{.header = {"policy", "learning rate", "seeds", "validation loss", "perplexity",
                         "state MiB", "peak MiB", "bytes/parameter", "front", "tokens/s",
                         "aux loss", "busiest expert", "spikes", "diverged"},
              .rows = {},
              .text_columns = 2};
  for (const PolicyRow& row : comparison.policies) {
    std::vector<std::string> cells = {row.policy, RateCell(row), fmt::format("{}", row.seeds)};
    if (row.seeds > 0) {
      cells.push_back(Cell(row.loss, 4));
      cells.push_back(Cell(row.perplexity, 2));
      cells.push_back(MiB(row.memory.state.total));
      cells.push_back(MiB(row.memory.peak_bytes));
      cells.push_back(Fixed(row.bytes_per_parameter, 2));
      cells.push_back(row.on_front ? "yes" : "");
      cells.push_back(Cell(row.tokens_per_second, 0));
      cells.push_back(row.loads.empty() ? "" : Cell(row.aux_loss, 4));
      cells.push_back(row.loads.empty() ? "" : Cell(row.imbalance, 2) + "x");
    }
    cells.resize(table.header.size() - 2);
    cells.push_back(CountCell(row.spikes));
    cells.push_back(fmt::format("{}", row.diverged));
    table.rows.push_back(std::move(cells));
  }
  return table;
}

std::string VerdictOf(const SweepRow& row) {
  if (!row.finished) return "to be run";
  if (row.diverged) {
    return fmt::format("diverged in step {}: {}", row.diverged->step, row.diverged->reason);
  }
  std::string verdict = row.chosen ? "chosen" : "";
  if (row.at_edge) verdict += ", at the edge: a better one may lie beyond";
  if (row.worse_than_untrained()) {
    verdict += fmt::format("{}worse than untrained", verdict.empty() ? "" : "; ");
  }
  return verdict;
}

Table SweepTable(const Comparison& comparison) {
  Table table{
      .header = {"policy", "learning rate", "validation loss", "perplexity", "spikes", "verdict"},
      .rows = {}};
  for (const SweepRow& row : comparison.sweep) {
    table.rows.push_back(
        {row.policy, fmt::format("{}", row.learning_rate), row.loss ? Fixed(*row.loss, 4) : "",
         row.loss ? Fixed(std::exp(*row.loss), 2) : "", CountCell(row.spikes), VerdictOf(row)});
  }
  return table;
}

// Columns that a terminal takes: characters of UTF-8, all of which are one wide here.
size_t WidthOf(const std::string& text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

std::vector<size_t> WidthsOf(const Table& table) {
  std::vector<size_t> widths;
  for (const std::string& cell : table.header) widths.push_back(WidthOf(cell));
  for (const auto& row : table.rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], WidthOf(row[i]));
  }
  return widths;
}

std::string Aligned(const Table& table) {
  const std::vector<size_t> widths = WidthsOf(table);
  std::string text;
  const auto add = [&](const std::vector<std::string>& row) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string space(widths[i] - WidthOf(row[i]), ' ');
      const bool left = i < table.text_columns || table.header[i] == "verdict";
      if (i > 0) line += "  ";
      line += left ? row[i] + space : space + row[i];
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  };
  add(table.header);
  for (const auto& row : table.rows) add(row);
  return text;
}

std::string EscapedMarkdown(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    if (c == '|' || c == '\\' || c == '<' || c == '*' || c == '_' || c == '`') escaped += '\\';
    escaped += c;
  }
  return escaped;
}

std::string Markdown(const Table& table) {
  std::string text;
  const auto add = [&](const std::vector<std::string>& row) {
    for (const std::string& cell : row) text += fmt::format("| {} ", EscapedMarkdown(cell));
    text += "|\n";
  };
  add(table.header);
  for (size_t i = 0; i < table.header.size(); ++i) {
    text += i < table.text_columns || table.header[i] == "verdict" ? "|---" : "|---:";
  }
  text += "|\n";
  for (const auto& row : table.rows) add(row);
  return text;
}

std::string ProgressText(const Comparison& comparison) {
  return comparison.runs_done == comparison.runs_total
             ? ""
             : fmt::format("\n{} of {} {} done.\n", comparison.runs_done,
                           Counted(comparison.runs_total, "run"),
                           ForCount(comparison.runs_total, "is", "are"));
}

std::string CsvCell(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

std::string Csv(const std::vector<std::vector<std::string>>& rows) {
  std::string text;
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) {
      if (i > 0) text += ',';
      text += CsvCell(row[i]);
    }
    text += "\n";
  }
  return text;
}

std::string Number(double value) { return fmt::format("{}", value); }
std::string Number(int64_t value) { return fmt::format("{}", value); }

}  // namespace

std::string ToTerminal(const Comparison& comparison) {
  std::string text = Aligned(PolicyTable(comparison));
  if (!comparison.sweep.empty()) text += fmt::format("\n{}", Aligned(SweepTable(comparison)));
  return text + ProgressText(comparison);
}

std::string ToMarkdown(const Comparison& comparison) {
  std::string text = fmt::format("# {}\n\n", EscapedMarkdown(comparison.title));
  for (const auto& [name, value] : comparison.facts) {
    text += name == "Command" ? fmt::format("- **{}:** `{}`\n", name, value)
                              : fmt::format("- **{}:** {}\n", name, EscapedMarkdown(value));
  }
  text += fmt::format("{}\n{}", ProgressText(comparison), Markdown(PolicyTable(comparison)));
  text +=
      "\nMeans ± sample standard deviations over seeds. State is the optimizer's, peak all memory "
      "that the run counts: weights, gradients, state, activations and scratch. Bytes/parameter is "
      "the peak over the model's parameters; on the front are the policies of which no other takes "
      "as little memory with as low a loss, and is better in one. Tokens/s is the median over "
      "steps. Aux loss (with its coefficient) and the busiest expert's load over an even one are "
      "of the last tenth of the steps. Spikes are those of all runs at the rate together: ";
  text += SpikeDefinition() + ".\n";
  if (!comparison.sweep.empty()) {
    text += "\n## Learning rates\n\nFinal validation on the first seed; the lowest is chosen.\n\n" +
            Markdown(SweepTable(comparison));
  }
  return text;
}

std::string ToCsv(const Comparison& comparison) {
  std::vector<std::vector<std::string>> rows = {{"policy",
                                                 "base",
                                                 "learning_rate",
                                                 "rates_swept",
                                                 "at_edge",
                                                 "seeds",
                                                 "diverged",
                                                 "spikes",
                                                 "validation_loss_mean",
                                                 "validation_loss_std",
                                                 "perplexity_mean",
                                                 "perplexity_std",
                                                 "state_bytes",
                                                 "peak_bytes",
                                                 "tokens_per_second_mean",
                                                 "tokens_per_second_std",
                                                 "aux_loss_mean",
                                                 "aux_loss_std",
                                                 "busiest_expert_mean",
                                                 "busiest_expert_std",
                                                 "bytes_per_parameter",
                                                 "on_front"}};
  for (size_t c = 0; c < kMemoryCategories; ++c) {
    rows.front().push_back(fmt::format("{}_bytes_at_peak", NameOf(Memory(c))));
  }
  for (const PolicyRow& row : comparison.policies) {
    std::vector<std::string> cells = {row.policy,
                                      row.base,
                                      row.learning_rate ? Number(*row.learning_rate) : "",
                                      Number(row.rates),
                                      row.chosen.at_edge ? "true" : "false",
                                      Number(row.seeds),
                                      Number(row.diverged),
                                      CountCell(row.spikes)};
    if (row.seeds > 0) {
      const auto add = [&](const MeanSpread& value) {
        cells.push_back(Number(value.mean));
        cells.push_back(value.stddev ? Number(*value.stddev) : "");
      };
      add(row.loss);
      add(row.perplexity);
      cells.push_back(Number(row.memory.state.total));
      cells.push_back(Number(row.memory.peak_bytes));
      add(row.tokens_per_second);
      add(row.aux_loss);
      add(row.imbalance);
      cells.push_back(Number(row.bytes_per_parameter));
      cells.push_back(row.on_front ? "true" : "false");
      for (const int64_t bytes : row.memory.at_peak_bytes) cells.push_back(Number(bytes));
    }
    cells.resize(rows.front().size());
    rows.push_back(std::move(cells));
  }
  return Csv(rows);
}

std::string RunsToCsv(const Comparison& comparison) {
  std::vector<std::vector<std::string>> rows = {
      {"policy", "learning_rate", "seed", "threads", "steps", "tokens", "seconds",
       "tokens_per_second", "validation_loss", "perplexity", "state_bytes", "peak_bytes",
       "diverged_step", "diverged_reason", "spikes"}};
  for (const RunResult& run : comparison.runs) {
    const RunFacts& facts = run.facts;
    const bool diverged = run.diverged();
    rows.push_back(
        {facts.policy, Number(facts.learning_rate), Number(facts.seed), Number(facts.threads),
         Number(run.steps), Number(run.tokens), Number(run.seconds), Number(run.tokens_per_second),
         diverged ? "" : Number(run.final_loss()),
         diverged ? "" : Number(std::exp(run.final_loss())), Number(facts.memory.state.total),
         Number(facts.memory.peak_bytes), diverged ? Number(facts.diverged->step) : "",
         diverged ? facts.diverged->reason : "", CountCell(run.spikes)});
  }
  return Csv(rows);
}

}  // namespace terrace
