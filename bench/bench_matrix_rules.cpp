// Rules that live by matrix products, as a share of what this machine's products reach in the same
// run. Operations are counted by formula, symmetric products in full: where only half of one is
// computed, the share may exceed 1. The product itself is float32, or bfloat16 where the machine
// has such products and the rule uses them.
#include "experts.h"
#include "product_peak.h"

namespace terrace {
namespace {

struct Subject {
  std::string name;
  std::string policy;
  Settings settings;
  DType products;
  Shape shape;
  int64_t count;        // tensors
  double flops;         // of one tensor's step
  std::string counted;  // what `flops` counts
  int repetitions;
};

// ns_steps times a Gram matrix, its square, and the product of both with X.
double MuonFlops(const Shape& shape) {
  const double side = static_cast<double>(std::min(shape[0], shape[1]));
  const double length = static_cast<double>(std::max(shape[0], shape[1]));
  return 5 * (4 * side * side * length + 2 * side * side * side);
}

// Projecting and projecting back.
double GaloreFlops(const Shape& shape, double rank) {
  return 4 * rank * static_cast<double>(shape.size());
}

// A Gram matrix and its reduction to a tridiagonal one, which dominates in LAPACK.
double SubspaceFlops(const Shape& shape) {
  const double side = static_cast<double>(std::min(shape[0], shape[1]));
  return 2 * side * static_cast<double>(shape.size()) + 4.0 / 3 * side * side * side;
}

std::vector<Subject> Subjects() {
  const Shape small{1024, 512}, large{4096, 4096};
  const Settings keep{{"period", 1e9}}, change{{"period", 1.0}};
  const auto bf16 = DType::kBF16, f32 = DType::kF32;
  std::vector<Subject> subjects;
  for (const auto& [shape, count] : {std::pair(small, int64_t{192}), {large, int64_t{1}}}) {
    const std::string size = fmt::format("_{}x{}", shape[0], shape[1]);
    const int repetitions = shape == small ? 3 : 1;
    subjects.push_back({"muon" + size,
                        "muon",
                        {},
                        bf16,
                        shape,
                        count,
                        MuonFlops(shape),
                        "5 iterations",
                        repetitions});
    subjects.push_back({"galore" + size, "galore", keep, f32, shape, count, GaloreFlops(shape, 128),
                        "rank 128, both projections", 5});
    subjects.push_back({"galore_new_subspace" + size, "galore", change, f32, shape,
                        std::min(count, int64_t{32}),
                        GaloreFlops(shape, 128) + SubspaceFlops(shape),
                        "step, Gram matrix and 4/3 side^3 for LAPACK; due every 200 steps", 1});
  }
  return subjects;
}

void Run(const Subject& subject) {
  ProductPeak peak(subject.products);
  Policy policy = PolicyNamed(subject.policy);
  Override(policy, Population::kExpert, subject.settings);
  // The optimizer's state and scratch, then weights and gradients.
  Arena arena(subject.count * subject.shape.size() * 20 + (int64_t{1} << 30));
  const auto [parameters, updates] =
      MakeExperts(subject.count, subject.shape, DType::kBF16, DType::kF32, arena);
  Optimizer optimizer(policy, parameters, arena, 1);

  // Past the first step, which has a new subspace whatever the period.
  std::fill(optimizer.steps().begin(), optimizer.steps().end(), 1);
  // So that oneDNN's kernels exist.
  optimizer.Apply(std::span(updates).first(std::min<size_t>(updates.size(), MaxThreads())), 1e-4f);
  std::vector<double> ratios, seconds, peaks;
  for (int repetition = 0; repetition < subject.repetitions; ++repetition) {
    const double before = peak.FlopsPerSecond();
    seconds.push_back(SecondsOf([&] { optimizer.Apply(updates, 1e-4f); }));
    peaks.push_back((before + peak.FlopsPerSecond()) / 2);
    ratios.push_back(subject.flops * static_cast<double>(subject.count) / seconds.back() /
                     peaks.back());
  }
  PrintFigure(
      "matrix_rules/" + subject.name, Median(ratios), "of product peak", {},
      fmt::format(
          "{} x {} bf16 weights, f32 gradients, {} threads; {}; {:.2f} GFLOP and "
          "{:.2f} ms a tensor; {} peak {:.0f} GFLOP/s; scratch {:.1f} MiB; "
          "medians of {}",
          subject.count, subject.shape.ToString(), MaxThreads(), subject.counted,
          subject.flops * 1e-9, Median(seconds) * 1e3 / static_cast<double>(subject.count),
          NameOf(peak.dtype()), Median(peaks) * 1e-9,
          static_cast<double>(arena.ledger().peak_bytes[static_cast<int>(Memory::kScratch)]) /
              (1 << 20),
          subject.repetitions));
}

}  // namespace
}  // namespace terrace

// Usage: bench_matrix_rules [PART OF A NAME].
int main(int argc, char** argv) {
  for (const terrace::Subject& subject : terrace::Subjects()) {
    if (argc > 1 && subject.name.find(argv[1]) == std::string::npos) continue;
    terrace::Run(subject);
  }
}
