// Checkpoints of a run: `checkpoints/step-N/` with model.safetensors, optimizer.safetensors,
// state.json and config.toml, complete or not there at all.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string_view>

#include "data/fingerprint.h"
#include "model/model.h"
#include "optim/optimizer.h"

namespace terrace {

// Where a run stands beside its tensors. Batches, noise and rounding are functions of the seed and
// the step: nothing else has to be kept.
struct RunState {
  int64_t step = 0;
  int64_t tokens = 0;  // trained on so far
  DataIdentity data;   // whose tokens these are
};

// Writes `<checkpoints>/step-N`, to a temporary name that is synced and renamed, then removes all
// but the newest `keep`. Throws Error on one line (a full disk, say): earlier checkpoints are as
// they were, and nothing of the new one is left.
std::filesystem::path SaveCheckpoint(const std::filesystem::path& checkpoints, int64_t keep,
                                     std::string_view config_toml, const RunState& state,
                                     const Model& model, const Optimizer& optimizer);

// The step that a complete checkpoint's folder is named after; empty for another name.
std::optional<int64_t> StepOf(const std::filesystem::path& folder);
// The newest one in the folder; empty without any.
std::optional<std::filesystem::path> LatestCheckpoint(const std::filesystem::path& checkpoints);

// Each reads one checkpoint into what was built from its configuration, and throws Error naming
// file and tensor for anything missing, superfluous, of another shape, or damaged.
void LoadModel(const std::filesystem::path& checkpoint, Model& model);
// What the run was trained on so far; empty in checkpoints of earlier versions.
DataIdentity LoadDataIdentity(const std::filesystem::path& checkpoint);
// Also sets the optimizer's step counts.
RunState LoadState(const std::filesystem::path& checkpoint, const Model& model,
                   Optimizer& optimizer);

}  // namespace terrace
