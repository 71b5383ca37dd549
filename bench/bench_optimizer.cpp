// Bytes that an optimizer step moves per second, against a plain loop in the same run.
//
// The loop is a = a * x + b over float32 arrays; with scalars x and b it reads and writes in
// balance, which no optimizer can (it reads gradients that it does not write): that figure is
// shown without a bar.
//
// What is timed is what a training step does with gradients that are complete: it reads all of them
// for their norm (Optimizer::Measure), then updates. Nothing is clipped: the scale is 1.
//
// Bytes are counted as what must cross the memory bus. Gradients have to twice, since the norm of
// all comes before the first update; weights and states once there and back. Where a rule reads a
// tensor in further passes, and all that the threads work on at a time stays within the last-level
// cache, these do not count; else each does. The minimum, without further passes, is printed beside
// it.
//
// `bench_optimizer --plain-norm` sums squares for the norm and leaves nothing to the updates: what
// the sums that rules leave while they measure are worth, by turns in one run.
//
// Rules that are matrix products for the most part have bench_matrix_rules.
#include <cmath>
#include <fstream>
#include <string_view>

#include "backend/cpu/sum_of_squares.h"
#include "experts.h"

namespace terrace {
namespace {

struct Subject {
  std::string name;
  std::string policy;
  Settings settings;  // laid over the policy for experts, which all tensors are
  Shape shape;
  int64_t count;  // tensors
  DType weight_dtype;
  DType gradient_dtype;
  // How often the rule reads the gradient in its update, and the momentum beyond it.
  int gradient_passes;
  int momentum_rereads;
  std::optional<double> bar;
};

constexpr double kOnePass = 0.85;
constexpr double kTwoPasses = 0.6;  // where statistics of rows and columns force them
constexpr int kRepetitions = 9;

// In memory below 2 GiB each.
std::vector<Subject> Subjects() {
  const Shape small{1024, 512}, large{4096, 4096};
  const auto f32 = DType::kF32, bf16 = DType::kBF16;
  const auto momentum = [](std::string_view dtype) {
    return Settings{{"momentum", std::string(dtype)}};
  };
  const auto rule = [](std::string_view name) { return Settings{{"rule", std::string(name)}}; };
  const std::string experts = "skewadam_experts_";
  return {
      {experts + "1024x512", "skewadam", {}, small, 192, bf16, f32, 1, 0, kOnePass},
      {experts + "1024x512_bf16_gradients", "skewadam", {}, small, 192, bf16, bf16, 1, 0, kOnePass},
      {experts + "1024x512_f32", "skewadam", {}, small, 192, f32, f32, 1, 0, kOnePass},
      {experts + "4096x4096", "skewadam", {}, large, 6, bf16, f32, 1, 0, kOnePass},
      {experts + "4096x4096_bf16_gradients", "skewadam", {}, large, 6, bf16, bf16, 1, 0, kOnePass},
      {"adamw_1024x512", "adamw", {}, small, 96, bf16, f32, 1, 0, kOnePass},
      {"adamw_4096x4096", "adamw", {}, large, 3, bf16, f32, 1, 0, kOnePass},
      {"adamw8bit_4096x4096", "adamw8bit", {}, large, 4, bf16, f32, 1, 0, kOnePass},
      {"lion_4096x4096", "adamw", rule("lion"), large, 4, bf16, f32, 1, 0, kOnePass},
      {"sgd_4096x4096", "sgd", {}, large, 4, bf16, f32, 1, 0, kOnePass},
      {"sgd_no_momentum_4096x4096", "sgd", momentum("none"), large, 6, bf16, f32, 1, 0, kOnePass},
      {"adafactor_4096x4096", "adafactor", {}, large, 6, bf16, f32, 1, 0, kOnePass},
      {"skewadam_f32_momentum_4096x4096", "skewadam", momentum("f32"), large, 4, bf16, f32, 1, 1,
       kTwoPasses},
      {"skewadam_bf16_momentum_4096x4096", "skewadam", momentum("bf16"), large, 4, bf16, f32, 1, 1,
       kTwoPasses},
      {"skewadam_int8_momentum_4096x4096", "skewadam", momentum("int8"), large, 4, bf16, f32, 1, 1,
       kTwoPasses},
      {"sage_4096x4096", "adamw", rule("sage"), large, 4, bf16, f32, 2, 0, kTwoPasses},
      // Five iterations, and the update.
      {"sinkgd_4096x4096", "adamw", rule("sinkgd"), large, 6, bf16, f32, 6, 0, kTwoPasses},
  };
}

// Of what the operating system tells; where it does not, so large that passes never count twice.
int64_t LastLevelCacheBytes() {
  std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index3/size");
  int64_t kibibytes = 0;
  return file >> kibibytes ? kibibytes << 10 : INT64_MAX;
}

bool Run(const Subject& subject, PlainLoop& loop, bool plain_norm) {
  const int64_t elements = subject.shape.size();
  Arena arena(subject.count * elements * 16 + (int64_t{64} << 20));
  const auto [parameters, updates] = MakeExperts(subject.count, subject.shape, subject.weight_dtype,
                                                 subject.gradient_dtype, arena);
  Policy policy = PolicyNamed(subject.policy);
  Override(policy, Population::kExpert, subject.settings);
  Optimizer optimizer(policy, parameters, arena, 1);

  const int64_t gradient_bytes = elements * BytesOf(subject.gradient_dtype);
  const int64_t once_bytes =
      subject.count * (2 * gradient_bytes + 2 * elements * BytesOf(subject.weight_dtype)) +
      2 * StateBytesOf(policy, parameters).total;
  int64_t momentum_bytes = 0;
  for (const TensorView& view : optimizer.state()) {
    if (std::string_view(view.name).ends_with(".momentum")) momentum_bytes += view.bytes();
  }
  const bool cached = gradient_bytes * MaxThreads() <= LastLevelCacheBytes() / 2;
  const int64_t bytes =
      once_bytes + subject.momentum_rereads * momentum_bytes +
      (cached ? 0 : subject.count * (subject.gradient_passes - 1) * gradient_bytes);

  std::vector<double> ratios, speeds, loops, gains;
  const auto step = [&](bool measure) {
    double squares = 0;
    for (const Update& update : updates) {
      squares += measure ? optimizer.Measure(*update.parameter, update.gradient)
                         : SumOfSquares(update.gradient);
    }
    if (!std::isfinite(squares)) Fail("a norm that is not finite");
    optimizer.Apply(updates, 1e-4f);
  };
  step(true);
  for (int repetition = 0; repetition < kRepetitions; ++repetition) {
    const double before = loop.WithArrays();
    const double seconds = SecondsOf([&] { step(true); });
    const double reference = (before + loop.WithArrays()) / 2;
    speeds.push_back(bytes / seconds);
    loops.push_back(reference);
    ratios.push_back(bytes / seconds / reference);
    if (plain_norm) gains.push_back(SecondsOf([&] { step(false); }) / seconds);
  }
  if (plain_norm) {
    PrintFigure("optimizer/" + subject.name + "_gain", Median(gains), "x", {},
                "time of a step whose norm leaves no sums, over that of one whose does");
  }
  const double scale = static_cast<double>(once_bytes) / bytes;
  return PrintFigure(
      "optimizer/" + subject.name, Median(ratios), "of plain-loop bandwidth", subject.bar,
      fmt::format("{} x {} {} weights, {} gradients, {} threads; {:.1f} GB/s of {:.1f} GB/s "
                  "(a = a * x + b); {:.3f} with minimal bytes; medians of {}",
                  subject.count, subject.shape.ToString(), NameOf(subject.weight_dtype),
                  NameOf(subject.gradient_dtype), MaxThreads(), Median(speeds) / 1e9,
                  Median(loops) / 1e9, Median(ratios) * scale, kRepetitions));
}

void PrintLoops(PlainLoop& loop) {
  std::vector<double> arrays, scalars;
  for (int repetition = 0; repetition < kRepetitions; ++repetition) {
    arrays.push_back(loop.WithArrays() / 1e9);
    scalars.push_back(loop.WithScalars() / 1e9);
  }
  const std::string threads = fmt::format("{} threads", MaxThreads());
  PrintFigure("optimizer/plain_loop_arrays", Median(arrays), "GB/s", {}, threads);
  PrintFigure("optimizer/plain_loop_scalars", Median(scalars), "GB/s", {}, threads);
}

}  // namespace
}  // namespace terrace

// Usage: bench_optimizer [--plain-norm] [PART OF A NAME]. Exits with 1 when a bar is missed.
int main(int argc, char** argv) {
  const bool plain_norm = argc > 1 && std::string_view(argv[1]) == "--plain-norm";
  const int first = plain_norm ? 2 : 1;
  terrace::PlainLoop loop;
  terrace::PrintLoops(loop);
  bool met = true;
  for (const terrace::Subject& subject : terrace::Subjects()) {
    if (argc > first && subject.name.find(argv[first]) == std::string::npos) continue;
    met &= terrace::Run(subject, loop, plain_norm);
  }
  return met ? 0 : 1;
}
