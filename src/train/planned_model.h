// A model in an arena of exactly the size that its use needs.
#pragma once

#include "backend/cpu/cpu_backend.h"
#include "core/arena.h"
#include "model/model.h"
#include "train/measure.h"

namespace terrace {

// Calls use(model) twice: on a dry backend, to learn the peak, and then on an arena of that size.
// `use` loads or initialises the weights unless model.backend().dry().
template <typename Use>
void UsePlannedModel(const ModelConfig& config, const Use& use) {
  const auto run = [&](Arena arena) {
    CpuBackend backend(arena);
    Model model(config, backend);
    use(model);
    return arena.ledger().total_peak_bytes;
  };
  const int64_t peak_bytes = run(Arena::Dry());
  RequireMemory(peak_bytes, AvailableMemoryBytes());
  run(Arena(peak_bytes));
}

}  // namespace terrace
