#include "core/atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/error.h"

namespace terrace {
namespace {

std::filesystem::path FolderOf(const std::filesystem::path& path) {
  return path.has_parent_path() ? path.parent_path() : ".";
}

}  // namespace

AtomicFile::AtomicFile(std::filesystem::path path)
    : path_(std::move(path)), temporary_(path_.string() + ".tmp") {
  descriptor_ = open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (descriptor_ < 0) FailWith(errno);
}

AtomicFile::~AtomicFile() {
  if (descriptor_ < 0) return;
  close(descriptor_);
  unlink(temporary_.c_str());
}

void AtomicFile::Write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    // Linux writes at most 2 GiB a call.
    const ssize_t written =
        write(descriptor_, bytes.data(), std::min<size_t>(bytes.size(), size_t{1} << 30));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) FailWith(errno);
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
}

void AtomicFile::Commit() {
  if (!SyncDescriptor(descriptor_)) FailWith(errno);
  if (rename(temporary_.c_str(), path_.c_str()) != 0) FailWith(errno);
  close(std::exchange(descriptor_, -1));
  SyncFolder(FolderOf(path_));
}

void AtomicFile::FailWith(int error) const {
  Fail("{}: cannot write: {}", path_.string(), std::strerror(error));
}

void WriteFileAtomically(const std::filesystem::path& path, std::string_view text) {
  AtomicFile file(path);
  file.Write(text);
  file.Commit();
}

bool SyncDescriptor(int descriptor) {
  return fsync(descriptor) == 0 || errno == EINVAL || errno == ENOTSUP || errno == ENOSYS;
}

void SyncFolder(const std::filesystem::path& folder) {
  const int descriptor = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  // One may be allowed to make files in a folder, and not to read it.
  const bool synced = descriptor >= 0 ? SyncDescriptor(descriptor) : errno == EACCES;
  const int error = errno;
  if (descriptor >= 0) close(descriptor);
  if (!synced) Fail("{}: cannot sync: {}", folder.string(), std::strerror(error));
}

std::string ReadFile(const std::filesystem::path& path) {
  constexpr size_t kMostBytes = size_t{256} << 20;
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  int error = descriptor < 0 ? errno : 0;
  std::string text;
  char buffer[1 << 16];
  while (error == 0) {
    const ssize_t got = read(descriptor, buffer, sizeof(buffer));
    if (got == 0) break;
    if (got > 0) {
      text.append(buffer, static_cast<size_t>(got));
      if (text.size() > kMostBytes) error = EFBIG;
    } else if (errno != EINTR) {
      error = errno;
    }
  }
  if (descriptor >= 0) close(descriptor);
  if (error != 0) Fail("{}: cannot read: {}", path.string(), std::strerror(error));
  return text;
}

}  // namespace terrace
