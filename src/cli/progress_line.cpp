#include "cli/progress_line.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>

namespace terrace {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

constexpr int64_t kBarCells = 30;
constexpr const char* kClearLine = "\r\x1b[K";

}  // namespace

ProgressLine::ProgressLine()
    : terminal_(isatty(STDERR_FILENO) == 1), start_(Clock::now()), shown_(start_) {}

ProgressLine::~ProgressLine() {
  if (terminal_) std::fputs(kClearLine, stderr);
}

void ProgressLine::Show(const ProgressReport& report) {
  const auto now = Clock::now();
  if (now - shown_ < (terminal_ ? Clock::duration(100ms) : Clock::duration(10s))) return;
  shown_ = now;
  const double share =
      report.total > 0
          ? std::min(1.0, static_cast<double>(report.done) / static_cast<double>(report.total))
          : 0.0;
  const double seconds = std::chrono::duration<double>(now - start_).count();
  const std::string text = fmt::format("{} {:.0f} %, {:.0f} s", report.stage, 100 * share, seconds);
  if (!terminal_) {
    std::fputs((text + "\n").c_str(), stderr);
    return;
  }
  const int64_t filled = static_cast<int64_t>(share * kBarCells);
  std::fputs(
      fmt::format("{}[{:#<{}}{:.<{}}] {}", kClearLine, "", filled, "", kBarCells - filled, text)
          .c_str(),
      stderr);
  std::fflush(stderr);
}

}  // namespace terrace
