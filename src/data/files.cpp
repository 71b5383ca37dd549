#include "data/files.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/atomic_file.h"
#include "core/error.h"

namespace terrace {
namespace {

[[noreturn]] void FailWithCause(const char* action, const std::filesystem::path& path) {
  const int cause = errno;
  Fail("cannot {} {}: {}", action, path.string(), std::strerror(cause));
}

class Descriptor {
 public:
  explicit Descriptor(int value) : value_(value) {}
  ~Descriptor() {
    if (value_ >= 0) close(value_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int value() const { return value_; }

 private:
  int value_;
};

std::filesystem::path ParentOf(const std::filesystem::path& path) {
  return path.has_parent_path() ? path.parent_path() : ".";
}

void WriteAll(int descriptor, const std::filesystem::path& path, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = write(descriptor, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) FailWithCause("write", path);
    bytes.remove_prefix(static_cast<size_t>(count));
  }
}

// Datasets of more files than a shell lets a program open by default are common.
bool RaiseDescriptorLimit() {
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max) return false;
  limit.rlim_cur = limit.rlim_max;
  return setrlimit(RLIMIT_NOFILE, &limit) == 0;
}

// What mkdir and open would take away. mkdtemp and mkstemp make private folders and files.
mode_t FileModeMask() {
  const mode_t mask = umask(0);
  umask(mask);
  return mask;
}

// Whether a file system that has no modes, or one for all files, refused to set one.
bool RefusesModes() { return errno == EPERM || errno == ENOTSUP || errno == ENOSYS; }

// An empty file with an unused name beside `path`.
struct PartialFile {
  explicit PartialFile(const std::filesystem::path& path)
      : name(path.string() + ".partial-XXXXXX"),
        descriptor(path.has_filename() ? mkostemp(name.data(), O_CLOEXEC) : -1) {
    if (!path.has_filename()) errno = ENOENT;  // "data/" names a folder
    if (descriptor.value() < 0) FailWithCause("create", path);
  }

  std::string name;
  Descriptor descriptor;
};

// Renames, but never onto something.
void RenameToNew(const std::filesystem::path& from, const std::filesystem::path& to) {
  if (renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) return;
  if (errno == EINVAL || errno == ENOTSUP || errno == ENOSYS) {  // cannot be done there
    RequireAbsent(to);
    if (rename(from.c_str(), to.c_str()) == 0) return;
  }
  FailWithCause("create", to);
}

}  // namespace

InputFile::InputFile(std::filesystem::path path) : path_(std::move(path)) {
  descriptor_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor_ < 0 && errno == EMFILE && RaiseDescriptorLimit()) {
    descriptor_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  }
  struct stat status;
  if (descriptor_ < 0 || fstat(descriptor_, &status) != 0) FailWithCause("open", path_);
  if (S_ISDIR(status.st_mode)) {
    close(descriptor_);
    Fail("cannot read {}: it is a folder", path_.string());
  }
  if (S_ISREG(status.st_mode)) size_ = status.st_size;
}

InputFile::~InputFile() {
  if (descriptor_ >= 0) close(descriptor_);
}

InputFile::InputFile(InputFile&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      size_(other.size_) {}

size_t InputFile::Read(std::span<char> out) {
  size_t done = 0;
  while (done < out.size()) {
    const ssize_t count = read(descriptor_, out.data() + done, out.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) FailWithCause("read", path_);
    if (count == 0) break;
    done += static_cast<size_t>(count);
  }
  return done;
}

void InputFile::ReadAt(int64_t offset, std::span<char> out) const {
  while (!out.empty()) {
    const ssize_t count = pread(descriptor_, out.data(), out.size(), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) FailWithCause("read", path_);
    if (count == 0) {
      Fail("{} was truncated while it was in use: it ends before byte {}, and had {}",
           path_.string(), offset + static_cast<int64_t>(out.size()), size_);
    }
    offset += count;
    out = out.subspan(static_cast<size_t>(count));
  }
}

std::string ReadWhole(const std::filesystem::path& path) {
  InputFile file(path);
  std::string bytes;
  // The system's own files (/proc) say 0 and have bytes all the same.
  for (size_t room = std::max<size_t>(static_cast<size_t>(file.size()) + 1, 1 << 16);; room *= 2) {
    const size_t before = bytes.size();
    bytes.resize(before + room);
    const size_t count = file.Read(std::span(bytes).subspan(before));
    if (count < room) {
      bytes.resize(before + count);
      return bytes;
    }
  }
}

OutputFile::OutputFile(std::filesystem::path path) : path_(std::move(path)) {
  descriptor_ = open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor_ < 0) FailWithCause("create", path_);
}

OutputFile::~OutputFile() {
  if (descriptor_ >= 0) close(descriptor_);
}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)) {}

void OutputFile::Write(std::string_view bytes) { WriteAll(descriptor_, path_, bytes); }

void OutputFile::WriteAt(int64_t offset, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = pwrite(descriptor_, bytes.data(), bytes.size(), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) FailWithCause("write", path_);
    bytes.remove_prefix(static_cast<size_t>(count));
    offset += count;
  }
}

void OutputFile::Close() {
  if (!SyncDescriptor(descriptor_)) FailWithCause("sync", path_);
  if (close(std::exchange(descriptor_, -1)) != 0) FailWithCause("close", path_);
}

OutputFolder::OutputFolder(std::filesystem::path path) : path_(path.lexically_normal()) {
  if (!path_.has_filename()) path_ = path_.parent_path();  // "data/" names "data"
  std::error_code error;
  if (!std::filesystem::is_directory(path_, error) || !std::filesystem::is_empty(path_, error)) {
    RequireAbsent(path_);
  }
  std::filesystem::create_directories(ParentOf(path_), error);
  if (error) Fail("cannot create folder {}: {}", ParentOf(path_).string(), error.message());
  std::string pattern = path_.string() + ".partial-XXXXXX";
  if (mkdtemp(pattern.data()) == nullptr) FailWithCause("create folder", pattern);
  temporary_ = pattern;
}

OutputFolder::~OutputFolder() {
  std::error_code ignored;
  if (!temporary_.empty()) std::filesystem::remove_all(temporary_, ignored);
}

void OutputFolder::Commit() {
  if (chmod(temporary_.c_str(), 0777 & ~FileModeMask()) != 0 && !RefusesModes()) {
    FailWithCause("set the mode of", temporary_);
  }
  SyncFolder(temporary_);
  if (rename(temporary_.c_str(), path_.c_str()) != 0) FailWithCause("create", path_);
  temporary_.clear();
  SyncFolder(ParentOf(path_));
}

void RequireAbsent(const std::filesystem::path& path) {
  std::error_code error;
  if (std::filesystem::exists(std::filesystem::symlink_status(path, error))) {
    Fail("{} exists already: remove it or choose another output", path.string());
  }
}

void RequireCreatable(const std::filesystem::path& path) {
  RequireAbsent(path);
  const PartialFile file(path);
  unlink(file.name.c_str());
}

void WriteNewFile(const std::filesystem::path& path, std::string_view bytes) {
  RequireAbsent(path);
  const PartialFile file(path);
  const int descriptor = file.descriptor.value();
  try {
    WriteAll(descriptor, path, bytes);
    if (fchmod(descriptor, 0666 & ~FileModeMask()) != 0 && !RefusesModes()) {
      FailWithCause("set the mode of", path);
    }
    if (!SyncDescriptor(descriptor)) FailWithCause("sync", path);
    RenameToNew(file.name, path);
  } catch (...) {
    unlink(file.name.c_str());
    throw;
  }
  SyncFolder(ParentOf(path));
}

bool IsStream(const std::filesystem::path& path) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  return std::filesystem::is_character_file(status) || std::filesystem::is_fifo(status);
}

void WriteToStream(const std::filesystem::path& path, std::string_view bytes) {
  const Descriptor stream(open(path.c_str(), O_WRONLY | O_CLOEXEC));
  if (stream.value() < 0) FailWithCause("open", path);
  WriteAll(stream.value(), path, bytes);
}

}  // namespace terrace
