#include "cli/train_progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>
#include <vector>

#include "core/counted.h"

namespace terrace {
namespace {

constexpr const char* kClearLine = "\r\x1b[K";
constexpr int64_t kBarCells = 24;
constexpr double kMiB = 1 << 20;

// The busiest expert's load over the even one, in the least balanced layer.
double ImbalanceOf(const StepMetrics& metrics) {
  double worst = 0;
  for (const LayerLoad& layer : metrics.layers) {
    worst = std::max(worst, layer.load.max_share * static_cast<double>(layer.counts.size()));
  }
  return worst;
}

}  // namespace

std::string Duration(double seconds) {
  const int64_t whole = static_cast<int64_t>(seconds + 0.5);
  return whole < 3600 ? fmt::format("{}:{:02}", whole / 60, whole % 60)
                      : fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
}

TrainProgress::TrainProgress(Prefix prefix)
    : terminal_(isatty(STDERR_FILENO) == 1), prefix_(std::move(prefix)) {}

TrainProgress::~TrainProgress() {
  if (terminal_) std::fputs(kClearLine, stderr);
}

void TrainProgress::Begin(const RunSummary& summary, bool described) {
  summary_ = summary;
  if (described) Describe(summary);
  if (summary.first_step > 0) Note(fmt::format("resuming after step {}", summary.first_step));
}

void TrainProgress::Describe(const RunSummary& summary) {
  const Ledger& plan = summary.plan;
  const auto mebibytes = [&](Memory category) {
    return static_cast<double>(plan.at_peak_bytes[static_cast<size_t>(category)]) / kMiB;
  };
  Note(fmt::format("model: {:.2f} M parameters, {:.2f} M active per token",
                   static_cast<double>(summary.size.parameters) / 1e6,
                   static_cast<double>(summary.size.active_parameters) / 1e6));
  Note(
      fmt::format("memory: {:.1f} of {:.0f} MiB that are free (weights {:.1f}, optimizer {:.1f}, "
                  "gradients {:.1f}, "
                  "activations {:.1f}, scratch {:.1f})",
                  static_cast<double>(plan.total_peak_bytes) / kMiB,
                  static_cast<double>(summary.free_bytes) / kMiB, mebibytes(Memory::kWeights),
                  mebibytes(Memory::kOptimizer), mebibytes(Memory::kGradients),
                  mebibytes(Memory::kActivations), mebibytes(Memory::kScratch)));
  Note(fmt::format("optimizer: policy {}, learning rate up to {:.4g}", summary.policy,
                   summary.learning_rate));
  Note(fmt::format("data: {} to train on, {} to validate; matrix products: {:.0f} GFLOP/s",
                   Counted(summary.train_tokens, "token"), summary.val_tokens,
                   summary.peak_flops / 1e9));
}

// With a bar before it where the terminal has room; never wider, or it could not be rewritten.
std::string TrainProgress::Fitted(const StepMetrics& metrics) const {
  winsize window = {};
  const bool known = ioctl(STDERR_FILENO, TIOCGWINSZ, &window) == 0 && window.ws_col > 0;
  const size_t width = known ? window.ws_col - 1u : 79u;
  const std::string line = LineOf(metrics, width);
  const int64_t filled = kBarCells * metrics.step / std::max<int64_t>(1, summary_.last_step);
  const std::string bar = fmt::format("[{:#<{}}{:.<{}}] ", "", filled, "", kBarCells - filled);
  return bar.size() + line.size() <= width ? bar + line : line;
}

std::string TrainProgress::LineOf(const StepMetrics& metrics, size_t width) const {
  const double elapsed = std::chrono::duration<double>(Clock::now() - *start_).count();
  const double done = static_cast<double>(metrics.step - summary_.first_step);
  const double left = static_cast<double>(summary_.last_step - metrics.step);
  std::string line = fmt::format("{}step {}/{}", prefix_ ? prefix_(metrics) : "", metrics.step,
                                 summary_.last_step);
  // As many as fit, the most wanted first; never a part of one.
  std::vector<std::string> rest = {
      fmt::format("loss {:.4f}", metrics.loss),
      fmt::format("ETA {}", Duration(elapsed / done * left)),
      fmt::format("{:.0f} tok/s", metrics.tokens_per_second),
      fmt::format("{:.0f} MiB", static_cast<double>(metrics.resident_bytes) / kMiB)};
  if (!metrics.layers.empty()) rest.push_back(fmt::format("load {:.2f}x", ImbalanceOf(metrics)));
  rest.push_back(fmt::format("MFU {:.0f} %", 100 * metrics.mfu));
  for (const std::string& part : rest) {
    if (line.size() + 2 + part.size() > width) break;
    line += "  " + part;
  }
  return line;
}

void TrainProgress::Step(const StepMetrics& metrics) {
  using std::chrono_literals::operator""ms;
  const auto now = Clock::now();
  const bool first_or_last =
      metrics.step == summary_.first_step + 1 || metrics.step == summary_.last_step;
  if (!start_) {
    start_ = now - std::chrono::duration_cast<Clock::duration>(
                       std::chrono::duration<double>(metrics.seconds));
  }
  if (first_or_last || now - shown_ >= (terminal_ ? 100ms : 5000ms)) {
    shown_ = now;
    if (terminal_) {
      std::fputs((kClearLine + Fitted(metrics)).c_str(), stderr);
      std::fflush(stderr);
    } else {
      Note(LineOf(metrics, std::string::npos));
    }
  }
  if (metrics.evaluation) {
    const Evaluation& evaluation = *metrics.evaluation;
    Note(fmt::format("step {}  validation loss {:.4f}, perplexity {:.2f}; unigram entropy {:.4f}",
                     metrics.step, evaluation.loss, evaluation.perplexity,
                     evaluation.unigram_entropy));
  }
}

void TrainProgress::Note(std::string_view text) {
  std::fputs(fmt::format("{}{}\n", terminal_ ? kClearLine : "", text).c_str(), stderr);
}

}  // namespace terrace
