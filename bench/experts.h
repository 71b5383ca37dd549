// Experts' weights and gradients, for benchmarks of update rules.
#pragma once

#include <vector>

#include "bench_support.h"
#include "optim/optimizer.h"

namespace terrace {

struct Experts {
  Parameters parameters;
  std::vector<Update> updates;
};

// `count` matrices of random values, in the arena.
inline Experts MakeExperts(int64_t count, const Shape& shape, DType weight_dtype,
                           DType gradient_dtype, Arena& arena) {
  Experts experts;
  for (int64_t i = 0; i < count; ++i) {
    Parameter& parameter = experts.parameters.emplace_back();
    parameter.name = fmt::format("expert.{}", i);
    parameter.population = Population::kExpert;
    parameter.id = i;
    parameter.value = arena.Allocate(Memory::kWeights, weight_dtype, shape, parameter.name.c_str());
    const TensorView gradient =
        arena.Allocate(Memory::kGradients, gradient_dtype, shape, "gradient");
    FillRandom(parameter.value, 2 * i);
    FillRandom(gradient, 2 * i + 1);
    experts.updates.push_back({&parameter, gradient, 1});
  }
  return experts;
}

}  // namespace terrace
