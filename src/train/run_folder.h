// The folder of a run: config.toml (as resolved), tokenizer.json, metrics.jsonl, checkpoints/.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "core/error.h"
#include "data/tokenizer.h"
#include "train/config.h"

namespace terrace {

struct RunFolder {
  std::filesystem::path path;

  std::filesystem::path config() const { return path / "config.toml"; }
  std::filesystem::path tokenizer() const { return path / "tokenizer.json"; }
  std::filesystem::path metrics() const { return path / "metrics.jsonl"; }
  std::filesystem::path checkpoints() const { return path / "checkpoints"; }

  bool HoldsRun() const;
};

// Keeps other processes from training in a folder, until it goes out of scope or the process ends
// in whatever way.
class FolderLock {
 public:
  // Throws Error when another process holds it.
  explicit FolderLock(const std::filesystem::path& folder);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  int descriptor_ = -1;
};

// Refuses what would overwrite a run or continue another than `wanted`: a new run needs a folder
// that is empty or not there, one to be resumed a run that can go on as `wanted`. Throws Error.
// Returns what goes on otherwise than it would have, for whoever resumes.
std::optional<std::string> CheckRunFolder(const RunFolder& run, const ResolvedRun& wanted,
                                          bool resume);

// The config.toml of a run that is resumed, with `assignments` over it. Throws Error, which names
// the copy in the newest checkpoint where the file itself is at fault.
RunConfig LoadRunConfig(const RunFolder& run, const std::vector<std::string>& assignments);

// What `read` gives of the newest checkpoint; its errors say what to do without that.
template <typename Read>
auto FromCheckpoint(const std::filesystem::path& checkpoint, const Read& read) {
  try {
    return read();
  } catch (const Error& error) {
    Fail("{}; without the folder {} the run goes on from what was saved before it", error.what(),
         checkpoint.string());
  }
}

// Makes the folder of a run, or brings that of a resumed one up to date; its `lock` is taken here
// unless it is held already. With its last file, config.toml, the folder holds a run.
void WriteRunFolder(const RunFolder& run, const std::string& config_toml,
                    const std::optional<Tokenizer>& tokenizer, std::optional<FolderLock>& lock);

// A checkpoint, and the run that it belongs to.
struct StoredModel {
  std::filesystem::path checkpoint;
  RunConfig config;

  RunFolder run() const;  // which it lies in
};
// `path` is a run's folder (its newest checkpoint is taken) or a checkpoint's. Throws Error when
// there is none.
StoredModel FindStoredModel(const std::filesystem::path& path);

// The tokenizer that a run's configuration names, or else the one in its data folder; empty when
// neither is there (token files made elsewhere). Throws Error when it has more tokens than the
// model.
std::optional<Tokenizer> TokenizerOf(const RunConfig& config);
// The one that a run keeps; empty where there is none.
std::optional<Tokenizer> OwnTokenizerOf(const RunFolder& run);
// The one kept with the run of a checkpoint, or else the one of its configuration. Throws Error
// when that is not the one that the model was trained with.
Tokenizer TokenizerOf(const StoredModel& stored);

}  // namespace terrace
