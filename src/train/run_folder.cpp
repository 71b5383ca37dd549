#include "train/run_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "core/atomic_file.h"
#include "core/counted.h"
#include "core/error.h"
#include "data/fingerprint.h"
#include "data/tokenizer_files.h"
#include "train/checkpoint.h"

namespace terrace {
namespace fs = std::filesystem;

namespace {

// Nothing but what a start leaves that failed or was killed before its first step.
bool HoldsNothing(const RunFolder& run) {
  if (!fs::is_directory(run.path)) return !fs::exists(run.path);
  for (const auto& entry : fs::directory_iterator(run.path)) {
    const fs::path path = entry.path();
    const bool leftover = path == run.tokenizer() || path == run.tokenizer().string() + ".tmp" ||
                          path == run.config() || path == run.config().string() + ".tmp" ||
                          (path == run.metrics() && fs::is_empty(path)) ||
                          (path == run.checkpoints() && fs::is_empty(path));
    if (!leftover) return false;
  }
  return true;
}

}  // namespace

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

std::optional<std::string> CheckRunFolder(const RunFolder& run, const ResolvedRun& wanted,
                                          bool resume) {
  if (!resume) {
    if (HoldsNothing(run)) return {};
    if (run.HoldsRun()) {
      Fail("{}: holds a run already (--resume continues it)", run.path.string());
    }
    Fail("{}: exists and is not an empty folder", run.path.string());
  }
  if (!run.HoldsRun()) Fail("{}: holds no run to resume", run.path.string());
  // A checkpoint's own configuration is the one that it was trained under.
  const std::optional<fs::path> latest = LatestCheckpoint(run.checkpoints());
  const RunConfig stored =
      latest ? FromCheckpoint(*latest, [&] { return LoadSavedConfig(*latest / "config.toml"); })
             : LoadSavedConfig(run.config());
  CheckSameRun(stored, wanted);
  if (!latest || !stored.saved_earlier || wanted.schedule.kind == ScheduleKind::kConstant)
    return {};
  return fmt::format(
      "{} is of an earlier version, whose schedules reached optimizer.min_ratio with the last "
      "step; "
      "now they would with the step after it: learning rates differ a little from here on",
      latest->string());
}

RunConfig LoadRunConfig(const RunFolder& run, const std::vector<std::string>& assignments) {
  try {
    return LoadSavedConfig(run.config(), assignments);
  } catch (const Error&) {
    const std::optional<fs::path> latest = LatestCheckpoint(run.checkpoints());
    if (!latest) throw;
    std::string fault;
    try {
      LoadSavedConfig(run.config());
    } catch (const Error& error) {
      fault = error.what();
    }
    if (fault.empty()) throw;  // the assignments are at fault
    Fail("{}; {} is the configuration of its last checkpoint", fault,
         (*latest / "config.toml").string());
  }
}

void WriteRunFolder(const RunFolder& run, const std::string& config_toml,
                    const std::optional<Tokenizer>& tokenizer, std::optional<FolderLock>& lock) {
  std::error_code error;
  fs::create_directories(run.checkpoints(), error);
  if (error) Fail("{}: cannot create: {}", run.path.string(), error.message());
  const bool is_new = !lock;
  if (is_new) {
    lock.emplace(run.path);
    // Another process may have begun, and even ended, a run since the check.
    if (!HoldsNothing(run)) Fail("{}: holds a run already", run.path.string());
  }
  // The one of a run that has begun is never replaced: what its ids mean is settled.
  if (tokenizer && (is_new || !fs::exists(run.tokenizer()))) {
    WriteFileAtomically(run.tokenizer(), ToTokenizerJson(*tokenizer));
  }
  WriteFileAtomically(run.config(), config_toml);
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
    Fail("{}: has {}, more than model.vocab_size = {}", name,
         Counted(tokenizer.vocab_size(), "token"), config.model.vocab_size);
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
