// Memory over a step as an SVG: areas by category, one on the other.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "plan/bytes.h"
#include "plan/report.h"

namespace terrace {
namespace {

constexpr double kWidth = 960, kHeight = 520;
constexpr double kLeft = 76, kRight = 20, kTop = 84, kBottom = 74;
constexpr double kPlotWidth = kWidth - kLeft - kRight, kPlotHeight = kHeight - kTop - kBottom;

// From the bottom up: what stays below, what comes and goes above.
constexpr Memory kOrder[] = {Memory::kWeights, Memory::kOptimizer, Memory::kGradients,
                             Memory::kActivations, Memory::kScratch};

constexpr std::string_view kStyle = R"(
  svg { background: #ffffff; font: 13px system-ui, sans-serif; }
  text { fill: #24292f; }
  .title { font-size: 17px; font-weight: 600; }
  .soft { fill: #57606a; }
  .grid { stroke: #d0d7de; }
  .line { stroke: #24292f; fill: none; stroke-dasharray: 5 4; }
  .weights { fill: #4477aa; } .optimizer { fill: #aa3377; } .gradients { fill: #ccbb44; }
  .activations { fill: #228833; } .scratch { fill: #ee6677; }
  .part { fill: #000000; fill-opacity: 0; } .part:hover { fill-opacity: 0.15; }
  @media (prefers-color-scheme: dark) {
    svg { background: #0d1117; }
    text { fill: #e6edf3; } .soft { fill: #9da7b3; }
    .grid { stroke: #30363d; } .line { stroke: #e6edf3; }
    .part { fill: #ffffff; }
  }
)";

std::string Escaped(std::string_view text) {
  std::string escaped;
  for (const char c : text) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      default:
        // XML knows no other control characters, escaped or not.
        escaped += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
  }
  return escaped;
}

// 1, 2 or 5 times a power of ten, for about five lines.
double NiceStep(double range) {
  const double power = std::pow(10, std::floor(std::log10(range / 5)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= range / 5) return factor * power;
  }
  return 10 * power;
}

class Chart {
 public:
  explicit Chart(const PlanReport& report)
      : report_(report),
        moments_(report.memory.moments),
        unit_bytes_(static_cast<double>(report.memory.ledger.total_peak_bytes) >= kGiB ? kGiB
                                                                                       : kMiB),
        top_bytes_(1.08 * static_cast<double>(report.memory.ledger.total_peak_bytes)) {}

  std::string Draw() {
    const std::string peak = BytesText(report_.memory.ledger.total_peak_bytes);
    const Subject& subject = report_.subject;
    const std::string title = fmt::format("{}: {} at the peak", subject.name, peak);
    svg_ = fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" width=\"{}\" "
        "height=\"{}\" "
        "role=\"img\" aria-label=\"{}\">\n<title>{}</title>\n<style>{}</style>\n",
        kWidth, kHeight, kWidth, kHeight, Escaped(title), Escaped(title), kStyle);
    Text(kLeft, 26, "title", "start", title);
    Text(kLeft, 46, "soft", "start",
         fmt::format("policy {}, sink {}, {} x {} x {} tokens a step; the peak is in the {}",
                     subject.policy, NameOf(subject.config.training.sink),
                     subject.config.training.gradient_accumulation_steps,
                     subject.config.training.micro_batch_size,
                     subject.config.training.sequence_length, TextOf(report_.memory.peak_phase)));
    DrawLegend();
    DrawGrid();
    DrawAreas();
    DrawLine(report_.memory.ledger.total_peak_bytes, fmt::format("peak {}", peak));
    DrawPasses();
    DrawParts();
    return svg_ + "</svg>\n";
  }

 private:
  double X(size_t moment) const {
    return kLeft + kPlotWidth * static_cast<double>(moment) / static_cast<double>(moments_.size());
  }
  double Y(double bytes) const { return kTop + kPlotHeight * (1 - bytes / top_bytes_); }

  void Text(double x, double y, std::string_view style, std::string_view anchor,
            std::string_view text) {
    svg_ +=
        fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" class=\"{}\" text-anchor=\"{}\">{}</text>\n",
                    x, y, style, anchor, Escaped(text));
  }

  void DrawLegend() {
    double x = kLeft;
    for (const Memory category : kOrder) {
      svg_ += fmt::format("<rect x=\"{:.1f}\" y=\"58\" width=\"12\" height=\"12\" class=\"{}\"/>\n",
                          x, NameOf(category));
      Text(x + 17, 69, "", "start", NameOf(category));
      x += 110;
    }
  }

  void DrawGrid() {
    const double step = NiceStep(top_bytes_ / unit_bytes_);
    for (double value = 0; value * unit_bytes_ <= top_bytes_; value += step) {
      const double y = Y(value * unit_bytes_);
      svg_ += fmt::format(
          "<line x1=\"{:.1f}\" x2=\"{:.1f}\" y1=\"{:.1f}\" y2=\"{:.1f}\" class=\"grid\"/>\n", kLeft,
          kLeft + kPlotWidth, y, y);
      Text(kLeft - 8, y + 4, "soft", "end", fmt::format("{:.4g}", value));
    }
    svg_ += fmt::format(
        "<text transform=\"translate(20 {:.1f}) rotate(-90)\" text-anchor=\"middle\">memory, "
        "{}</text>\n",
        kTop + kPlotHeight / 2, unit_bytes_ == kGiB ? "GiB" : "MiB");
    Text(kLeft + kPlotWidth / 2, kHeight - 14, "", "middle",
         "one step, part by part; each part at the moment when it holds most");
  }

  void DrawAreas() {
    std::vector<double> below(moments_.size());
    for (const Memory category : kOrder) {
      std::string upper, lower;
      for (size_t i = 0; i < moments_.size(); ++i) {
        const double bytes = static_cast<double>(moments_[i].bytes[static_cast<size_t>(category)]);
        upper += fmt::format("{}{:.1f} {:.1f}L{:.1f} {:.1f}", i == 0 ? "M" : "L", X(i),
                             Y(below[i] + bytes), X(i + 1), Y(below[i] + bytes));
        lower =
            fmt::format("L{:.1f} {:.1f}L{:.1f} {:.1f}", X(i + 1), Y(below[i]), X(i), Y(below[i])) +
            lower;
        below[i] += bytes;
      }
      svg_ += fmt::format("<path class=\"{}\" d=\"{}{}Z\"/>\n", NameOf(category), upper, lower);
    }
  }

  void DrawLine(int64_t bytes, const std::string& text) {
    const double y = Y(static_cast<double>(bytes));
    svg_ += fmt::format("<path class=\"line\" d=\"M{:.1f} {:.1f}H{:.1f}\"/>\n", kLeft, y,
                        kLeft + kPlotWidth);
    Text(kLeft + kPlotWidth - 4, y - 6, "", "end", text);
  }

  // Names below the axis, where there is room for them.
  void DrawPasses() {
    constexpr double kCharacter = 7.2;
    double free_from = 0;
    for (size_t first = 0; first < moments_.size();) {
      const std::string_view pass = moments_[first].phase.pass;
      size_t end = first;
      while (end < moments_.size() && pass == moments_[end].phase.pass) ++end;
      const double middle = (X(first) + X(end)) / 2;
      const double half = kCharacter * static_cast<double>(pass.size()) / 2;
      const double y = kTop + kPlotHeight;
      svg_ += fmt::format("<path class=\"grid\" d=\"M{:.1f} {:.1f}v6\"/>\n", X(first), y);
      if (middle - half >= free_from && middle + half <= kWidth) {
        Text(middle, y + 20, "soft", "middle", pass);
        free_from = middle + half + kCharacter;
      }
      first = end;
    }
  }

  // What a reader who points at a part is told.
  void DrawParts() {
    for (size_t i = 0; i < moments_.size(); ++i) {
      std::string text =
          fmt::format("{}: {}", TextOf(moments_[i].phase), BytesText(moments_[i].total_bytes()));
      for (const Memory category : kOrder) {
        text += fmt::format("; {} {}", NameOf(category),
                            BytesText(moments_[i].bytes[static_cast<size_t>(category)]));
      }
      svg_ += fmt::format(
          "<rect class=\"part\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\">"
          "<title>{}</title></rect>\n",
          X(i), kTop, X(i + 1) - X(i), kPlotHeight, Escaped(text));
    }
  }

  const PlanReport& report_;
  const std::vector<PlanMoment>& moments_;
  double unit_bytes_;
  double top_bytes_;
  std::string svg_;
};

}  // namespace

std::string ToSvg(const PlanReport& report) { return Chart(report).Draw(); }

}  // namespace terrace
