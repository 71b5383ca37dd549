// Products on AMX of one thread, as multiples of the speed of oneDNN's kernels made for their size.
// Both run by turns, since the speed of tiles changes by the second.
#include <array>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "backend/cpu/amx_products.h"
#include "backend/cpu/matmul.h"
#include "bench_support.h"

namespace terrace {
namespace {

constexpr std::pair<AmxKind, const char*> kKinds[] = {
    {AmxKind::kForward, "forward"},
    {AmxKind::kInputGradient, "input_gradient"},
    {AmxKind::kWeightGradient, "weight_gradient"}};

struct Subject {
  AmxKind kind;
  std::string name;
  int64_t tokens, out, in;
  bool add;
};

std::vector<Subject> Subjects() {
  std::vector<Subject> subjects;
  for (const auto& [kind, kind_name] : kKinds) {
    for (const auto& [out, in] : {std::pair<int64_t, int64_t>{1024, 512}, {2048, 512}}) {
      for (const int64_t tokens : {16, 64, 128, 512, 2048}) {
        for (const bool add : {false, true}) {
          subjects.push_back({kind,
                              fmt::format("{}_{}x{}_{}_rows_{}", kind_name, out, in, tokens,
                                          add ? "added" : "fresh"),
                              tokens, out, in, add});
        }
      }
    }
  }
  return subjects;
}

Operand Filled(Arena& arena, DType dtype, int64_t rows, int64_t columns, uint64_t key) {
  const TensorView view = arena.Allocate(Memory::kScratch, dtype, {rows, columns}, "operand");
  FillRandom(view, key);
  return {view.data, dtype, columns};
}

Product ProductOf(const Subject& subject, Arena& arena) {
  const auto [kind, name, tokens, out, in, add] = subject;
  constexpr DType kInput = DType::kBF16;
  switch (kind) {
    case AmxKind::kForward: {
      Product product{.m = tokens,
                      .n = out,
                      .k = in,
                      .a = Filled(arena, kInput, tokens, in, 1),
                      .b = Filled(arena, kInput, out, in, 2),
                      .c = Filled(arena, DType::kBF16, tokens, out, 3),
                      .add = add,
                      .kernel = Kernel::kThisSize};
      product.b.transposed = true;
      return product;
    }
    case AmxKind::kInputGradient:
      return {.m = tokens,
              .n = in,
              .k = out,
              .a = Filled(arena, kInput, tokens, out, 1),
              .b = Filled(arena, kInput, out, in, 2),
              .c = Filled(arena, DType::kBF16, tokens, in, 3),
              .add = add,
              .kernel = Kernel::kThisSize};
    case AmxKind::kWeightGradient: {
      Product product{.m = out,
                      .n = in,
                      .k = tokens,
                      .a = Filled(arena, kInput, tokens, out, 1),
                      .b = Filled(arena, kInput, tokens, in, 2),
                      .c = Filled(arena, DType::kF32, out, in, 3),
                      .add = add,
                      .kernel = Kernel::kThisSize};
      product.a.transposed = true;
      return product;
    }
  }
  return {};
}

void Run(const Subject& subject, Matmul& matmul) {
  // As experts in a step, several sets of operands by turns: their weights come from memory.
  constexpr size_t kSets = 8;
  constexpr int kRepetitions = 25;
  Arena arena(int64_t{256} << 20);
  std::vector<Product> products;
  for (size_t set = 0; set < kSets; ++set) products.push_back(ProductOf(subject, arena));
  const auto scratch = [&](int64_t bytes) {
    return arena.Allocate(Memory::kScratch, DType::kF32, {bytes / 4 + 1}, "scratchpad");
  };
  const TensorView ours = scratch(AmxScratchBytes(products[0]));
  const TensorView theirs = scratch(matmul.ScratchBytes(products[0]));
  std::vector<double> our_seconds, their_seconds, ratios;
  for (int repetition = 0; repetition <= kRepetitions; ++repetition) {
    double our_sum = 0, their_sum = 0;
    for (const Product& product : products) {
      our_sum += SecondsOf([&] { RunAmx(product, ours.data, ours.bytes()); });
    }
    for (const Product& product : products) {
      their_sum += SecondsOf([&] {
        matmul.Run(product, {theirs.data, static_cast<size_t>(theirs.bytes())});
      });
    }
    if (repetition == 0) continue;  // oneDNN's kernel was made
    our_seconds.push_back(our_sum / kSets);
    their_seconds.push_back(their_sum / kSets);
    ratios.push_back(their_sum / our_sum);
  }
  const double flops = 2.0 * static_cast<double>(subject.tokens * subject.out * subject.in);
  PrintFigure("amx_products/" + subject.name, Median(ratios), "of oneDNN's speed", {},
              fmt::format("1 thread, bf16 inputs, {} result, {} sets of operands by turns; ours "
                          "{:.3f} ms, {:.0f} GFLOP/s; oneDNN {:.3f} ms, {:.0f} GFLOP/s; "
                          "training takes {}; medians of {}",
                          NameOf(products[0].c.dtype), kSets, Median(our_seconds) * 1e3,
                          flops / Median(our_seconds) * 1e-9, Median(their_seconds) * 1e3,
                          flops / Median(their_seconds) * 1e-9,
                          PrefersAmx(products[0]) ? "ours" : "oneDNN's", kRepetitions));
}

}  // namespace
}  // namespace terrace

// Usage: bench_amx_products [PART OF A NAME].
int main(int argc, char** argv) {
  if (!terrace::HasAmx()) {
    std::puts("this processor has no AMX, or may not use it: nothing to measure");
    return 0;
  }
  terrace::Matmul matmul;
  for (const terrace::Subject& subject : terrace::Subjects()) {
    if (argc > 1 && subject.name.find(argv[1]) == std::string::npos) continue;
    terrace::Run(subject, matmul);
  }
}
