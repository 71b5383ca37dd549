// Checkpoints of a run: `checkpoints/step-N/` with model.safetensors, optimizer.safetensors,
// state.json and config.toml, complete or not there at all.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
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

// What SaveCheckpoint writes, with a little more than the files around the tensors take.
int64_t CheckpointBytes(const Model& model, const Optimizer& optimizer);

// Throws Error when the file system of `checkpoints`, which need not exist yet, has no room for
// `saves` more calls of SaveCheckpoint: a new checkpoint is complete before the oldest goes, so
// that keep + 1 are there at once. Quotas count as far as the file system shows them as less room.
void RequireRoomForCheckpoints(const std::filesystem::path& checkpoints, int64_t checkpoint_bytes,
                               int64_t keep, int64_t saves);

// The step that a complete checkpoint's folder is named after; empty for another name.
std::optional<int64_t> StepOf(const std::filesystem::path& folder);
// The newest one in the folder; empty without any.
std::optional<std::filesystem::path> LatestCheckpoint(const std::filesystem::path& checkpoints);

// Each reads one checkpoint into what was built from its configuration, and throws Error naming
// file and tensor for anything missing, superfluous, of another shape, or damaged. A file of
// tensors that another program has written since is taken, with a notice: what it says of the same
// tensors may be meant.
using Notice = std::function<void(std::string_view)>;
void LoadModel(const std::filesystem::path& checkpoint, Model& model, const Notice& notice = {});
// What the run was trained on so far; empty in checkpoints of earlier versions.
DataIdentity LoadDataIdentity(const std::filesystem::path& checkpoint);
// Also sets the optimizer's step counts.
RunState LoadState(const std::filesystem::path& checkpoint, const Model& model,
                   Optimizer& optimizer, const Notice& notice = {});

}  // namespace terrace
