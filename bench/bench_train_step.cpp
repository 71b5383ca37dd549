// Whole training steps of the preset moe-110m with SkewAdam, as a share of what this machine's
// matrix products reach in the same run, and where the time goes. With an argument, "f32" or
// "bf16", that precision alone.
#include <map>
#include <string>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "bench_support.h"
#include "core/rng.h"
#include "model/presets.h"
#include "optim/accumulate_sink.h"
#include "optim/optimizer.h"
#include "product_peak.h"
#include "profiling_backend.h"
#include "train/step.h"

namespace terrace {
namespace {

constexpr int64_t kSequences = 16;  // B
constexpr int64_t kLength = 128;    // T
constexpr int kRounds = 5;
constexpr int kStepsPerRound = 3;

// Words by Zipf's law, as text has them.
void FillTokens(TensorView view, int64_t vocabulary, uint64_t key) {
  for (int64_t i = 0; i < view.size(); ++i) {
    const double u = RandomUniform(key, static_cast<uint64_t>(i));
    const double rank = std::pow(static_cast<double>(vocabulary), u) - 1;
    view.as<int32_t>()[i] = static_cast<int32_t>(rank);
  }
}

// Calls body(backend, arena) on a dry arena, then on one of the capacity that the dry run found.
template <typename Body>
void RunPlanned(const Body& body) {
  Arena dry = Arena::Dry();
  CpuBackend planner(dry);
  body(planner, dry);
  Arena arena(dry.ledger().total_peak_bytes);
  CpuBackend backend(arena);
  body(backend, arena);
}

void BenchTrainStep(DType dtype, double share_bar, double tokens_bar) {
  ModelConfig config = PresetNamed("moe-110m");
  config.weight_dtype = dtype;
  ProductPeak peak(dtype);
  RunPlanned([&](CpuBackend& cpu, Arena& arena) {
    ProfilingBackend backend(cpu);
    Model model(config, backend);
    model.Initialize(1);
    Optimizer optimizer(PolicyNamed("skewadam"), model.parameters(), arena, /*seed=*/1);
    AccumulateSink sink(model.parameters(), optimizer, arena, DType::kF32, {});
    const std::vector<MicroBatch> batch = AllocateMicroBatches(arena, 1, kSequences, kLength);
    uint64_t step = 0;
    const auto run_step = [&] {
      if (!arena.dry()) {
        FillTokens(batch[0].inputs, config.vocab_size, MixKeys(2, step));
        FillTokens(batch[0].targets, config.vocab_size, MixKeys(3, step));
      }
      TrainStep(model, batch, {.learning_rate = 3e-4f, .noise_key = step++}, sink);
    };
    run_step();
    if (arena.dry()) return;
    for (int warm_up = 0; warm_up < 8; ++warm_up) run_step();

    std::vector<double> step_seconds, outside_seconds, shares;
    std::map<std::string, std::vector<double>> operation_seconds;
    const double flops_per_step =
        SizeOf(config).FlopsPerToken(kLength) * static_cast<double>(kSequences * kLength);
    for (int round = 0; round < kRounds; ++round) {
      const double before = peak.FlopsPerSecond();
      std::vector<double> round_seconds;
      for (int i = 0; i < kStepsPerRound; ++i) {
        backend.Reset();
        round_seconds.push_back(SecondsOf(run_step));
        double outside = round_seconds.back();
        for (const auto& [operation, spent] : backend.seconds()) {
          operation_seconds[operation].push_back(spent);
          outside -= spent;
        }
        outside_seconds.push_back(outside);
      }
      const double reached = (before + peak.FlopsPerSecond()) / 2;
      shares.push_back(flops_per_step / Median(round_seconds) / reached);
      step_seconds.insert(step_seconds.end(), round_seconds.begin(), round_seconds.end());
    }

    const double seconds = Median(step_seconds);
    const std::string name = fmt::format("train_step.moe-110m.{}.", NameOf(dtype));
    const std::string conditions = fmt::format(
        "{} threads, {} x {} tokens, skewadam, float32 gradients and state, {} peak {:.0f} "
        "GFLOP/s on 2048^3, median of {} steps",
        MaxThreads(), kSequences, kLength, NameOf(peak.dtype()), peak.FlopsPerSecond() * 1e-9,
        step_seconds.size());
    PrintFigure(name + "mfu", Median(shares), "ratio", share_bar, conditions);
    PrintFigure(name + "tokens", kSequences * kLength / seconds, "tokens/s", tokens_bar,
                conditions + "; bar for two Zen 4 cores");
    PrintFigure(name + "step", seconds * 1e3, "ms", {}, conditions);
    for (const auto& [operation, spent] : operation_seconds) {
      PrintFigure(name + operation, Median(spent) * 1e3, "ms", {}, "median of a step");
    }
    PrintFigure(name + "outside the backend", Median(outside_seconds) * 1e3, "ms", {},
                "median of a step: norm for clipping, optimizer, host code");
  });
}

}  // namespace
}  // namespace terrace

int main(int count, char** arguments) {
  const std::string_view only = count > 1 ? arguments[1] : "";
  // Tokens per second: 1.6 and 3.3 times a well-written PyTorch program's on two Zen 4 cores.
  if (only != "f32") terrace::BenchTrainStep(terrace::DType::kBF16, 0.70, 1.6 * 1943);
  if (only != "bf16") terrace::BenchTrainStep(terrace::DType::kF32, 0.80, 3.3 * 464);
}
