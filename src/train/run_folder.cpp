#include "train/run_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "core/error.h"
#include "data/fingerprint.h"
#include "data/tokenizer_files.h"
#include "train/checkpoint.h"

namespace terrace {
namespace fs = std::filesystem;

bool RunFolder::HoldsRun() const { return fs::exists(config()); }

FolderLock::FolderLock(const fs::path& folder)
    : descriptor_(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
  // File systems that cannot lock are taken as they are.
  if (flock(descriptor_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    close(descriptor_);
    Fail("{}: another process is training in it", folder.string());
  }
}

FolderLock::~FolderLock() {
  if (descriptor_ >= 0) close(descriptor_);
}

RunFolder StoredModel::run() const {
  return {fs::absolute(checkpoint).lexically_normal().parent_path().parent_path()};
}

StoredModel FindStoredModel(const fs::path& path) {
  if (!fs::is_directory(path)) Fail("{}: no such folder", path.string());
  StoredModel stored;
  if (fs::exists(path / "state.json")) {
    stored.checkpoint = path;
  } else {
    const RunFolder run{path};
    const std::optional<fs::path> latest = LatestCheckpoint(run.checkpoints());
    if (!latest) Fail("{}: holds no checkpoint", path.string());
    stored.checkpoint = *latest;
  }
  stored.config = LoadSavedConfig(stored.checkpoint / "config.toml");
  return stored;
}

std::optional<Tokenizer> TokenizerOf(const RunConfig& config) {
  std::string name = config.data.tokenizer;
  if (name.empty()) {
    const fs::path prepared = fs::path(config.data.folder) / "tokenizer.json";
    if (!fs::exists(prepared)) return {};
    name = prepared.string();
  }
  Tokenizer tokenizer = LoadTokenizer(name);
  if (tokenizer.vocab_size() > config.model.vocab_size) {
    Fail("{}: has {} tokens, more than model.vocab_size = {}", name, tokenizer.vocab_size(),
         config.model.vocab_size);
  }
  return tokenizer;
}

std::optional<Tokenizer> OwnTokenizerOf(const RunFolder& run) {
  if (!fs::exists(run.tokenizer())) return {};
  return LoadTokenizer(run.tokenizer().string());
}

Tokenizer TokenizerOf(const StoredModel& stored) {
  if (std::optional<Tokenizer> own = OwnTokenizerOf(stored.run())) return *std::move(own);
  std::optional<Tokenizer> tokenizer = TokenizerOf(stored.config);
  if (!tokenizer) {
    Fail("{}: no tokenizer is known for this model (data.tokenizer is not set)",
         stored.checkpoint.string());
  }
  const std::optional<Fingerprint> known = LoadDataIdentity(stored.checkpoint).vocabulary;
  if (known && *known != FingerprintOf(*tokenizer)) {
    Fail("{}: the tokenizer of its data is not the one that it was trained with",
         stored.checkpoint.string());
  }
  return *std::move(tokenizer);
}

}  // namespace terrace
