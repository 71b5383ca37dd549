// What it costs to release gradients at once: whole training steps of moe-110m with one sink and
// with the other, by turns in one run. Ratios are times of accumulation over times of release for
// the same work: above 1, releasing is faster.
#include <memory>
#include <string>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "bench_support.h"
#include "core/rng.h"
#include "model/presets.h"
#include "optim/accumulate_sink.h"
#include "optim/release_sink.h"
#include "train/step.h"

namespace terrace {
namespace {

constexpr int64_t kTokens = 2048;  // a step
constexpr int64_t kLength = 128;
constexpr int kRepetitions = 9;

struct Work {
  std::string name;
  DType dtype;
  Clipping clipping;
  int64_t micro_batches;
  bool checkpointing;
  std::optional<double> bar;
};

// One model under one sink, in an arena of the size that a dry step finds.
class Trainee {
 public:
  Trainee(const Work& work, bool release) : work_(work) {
    config_.weight_dtype = work.dtype;
    Arena dry = Arena::Dry();
    Start(dry, release);
    Step();
    Stop();
    arena_ = std::make_unique<Arena>(dry.ledger().total_peak_bytes);
    Start(*arena_, release);
    model_->Initialize(1);
  }

  void Step() { TrainStep(*model_, batches_, {1e-4f, ++step_, work_.checkpointing}, *sink_); }
  int64_t peak_bytes() const { return arena_->ledger().total_peak_bytes; }

 private:
  void Start(Arena& arena, bool release) {
    backend_ = std::make_unique<CpuBackend>(arena);
    model_ = std::make_unique<Model>(config_, *backend_);
    optimizer_ = std::make_unique<Optimizer>(PolicyNamed("skewadam"), model_->parameters(), arena,
                                             /*seed=*/1);
    if (release) {
      sink_ = std::make_unique<ReleaseSink>(model_->parameters(), *optimizer_, arena, DType::kF32,
                                            work_.clipping);
    } else {
      sink_ = std::make_unique<AccumulateSink>(model_->parameters(), *optimizer_, arena,
                                               DType::kF32, work_.clipping);
    }
    batches_ = AllocateMicroBatches(arena, work_.micro_batches,
                                    kTokens / kLength / work_.micro_batches, kLength);
    for (size_t m = 0; m < batches_.size() && !arena.dry(); ++m) {
      for (int64_t i = 0; i < batches_[m].tokens(); ++i) {
        batches_[m].inputs.as<int32_t>()[i] = Token(m, i);
        batches_[m].targets.as<int32_t>()[i] = Token(m, i + 1);
      }
    }
  }
  void Stop() {
    batches_.clear();
    sink_.reset();
    optimizer_.reset();
    model_.reset();
    backend_.reset();
  }
  int32_t Token(uint64_t key, int64_t i) const {
    return static_cast<int32_t>(RandomBits(key, static_cast<uint64_t>(i)) %
                                static_cast<uint64_t>(config_.vocab_size));
  }

  Work work_;
  ModelConfig config_ = PresetNamed("moe-110m");
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<CpuBackend> backend_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<StepSink> sink_;
  std::vector<MicroBatch> batches_;
  uint64_t step_ = 0;
};

bool Run(const Work& work) {
  Trainee kept(work, false), released(work, true);
  for (int warm_up = 0; warm_up < 3; ++warm_up) {
    kept.Step();
    released.Step();
  }
  std::vector<double> ratios, kept_seconds, released_seconds;
  for (int repetition = 0; repetition < kRepetitions; ++repetition) {
    kept_seconds.push_back(SecondsOf([&] { kept.Step(); }));
    released_seconds.push_back(SecondsOf([&] { released.Step(); }));
    ratios.push_back(kept_seconds.back() / released_seconds.back());
  }
  constexpr double kMiB = 1 << 20;
  return PrintFigure(
      "release/" + work.name, Median(ratios), "times accumulate's speed", work.bar,
      fmt::format("moe-110m {}, {} tokens in {} micro-batches, clipping {}, checkpointing {}, {} "
                  "threads; {:.0f} ms and {:.0f} MiB released, {:.0f} ms and {:.0f} MiB kept; "
                  "medians of {}",
                  NameOf(work.dtype), kTokens, work.micro_batches, NameOf(work.clipping.kind),
                  work.checkpointing, MaxThreads(), Median(released_seconds) * 1e3,
                  static_cast<double>(released.peak_bytes()) / kMiB, Median(kept_seconds) * 1e3,
                  static_cast<double>(kept.peak_bytes()) / kMiB, kRepetitions));
}

}  // namespace
}  // namespace terrace

// Exits with 1 when a bar is missed. The exact global norm costs a second backward pass: no bar.
int main() {
  using terrace::ClippingKind;
  using terrace::DType;
  const terrace::Clipping per_tensor{ClippingKind::kPerTensor, 1}, global{};
  bool met = true;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const std::string name(terrace::NameOf(dtype));
    met &= terrace::Run({name + "_one_batch", dtype, per_tensor, 1, false, 1.0});
    met &= terrace::Run({name + "_four_micro_batches", dtype, per_tensor, 4, true, 1.0});
    met &= terrace::Run({name + "_global_norm", dtype, global, 1, false, {}});
  }
  return met ? 0 : 1;
}
