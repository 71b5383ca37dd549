#include "data/files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
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

std::string ReadAll(int descriptor, const std::filesystem::path& path) {
  std::string bytes;
  std::array<char, 1 << 16> block;
  for (;;) {
    const ssize_t count = read(descriptor, block.data(), block.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) FailWithCause("read", path);
    if (count == 0) return bytes;
    bytes.append(block.data(), static_cast<size_t>(count));
  }
}

void WriteAll(int descriptor, const std::filesystem::path& path, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = write(descriptor, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) FailWithCause("write", path);
    bytes.remove_prefix(static_cast<size_t>(count));
  }
}

// What mkdir and open would take away. mkdtemp and mkstemp make private folders and files.
mode_t FileModeMask() {
  const mode_t mask = umask(0);
  umask(mask);
  return mask;
}

// Whether a file system that has no modes, or one for all files, refused to set one.
bool RefusesModes() { return errno == EPERM || errno == ENOTSUP || errno == ENOSYS; }

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

MappedFile::MappedFile(std::filesystem::path path) : path_(std::move(path)) {
  const Descriptor file(open(path_.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status;
  if (file.value() < 0 || fstat(file.value(), &status) != 0) FailWithCause("open", path_);
  if (S_ISDIR(status.st_mode)) Fail("cannot read {}: it is a folder", path_.string());
  // The system's own files (/proc) say 0 and have bytes all the same.
  if (!S_ISREG(status.st_mode) || status.st_size == 0) {
    buffer_ = ReadAll(file.value(), path_);
    bytes_ = buffer_;
    return;
  }
  const size_t size = static_cast<size_t>(status.st_size);
  void* address = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.value(), 0);
  if (address == MAP_FAILED) FailWithCause("map", path_);
  bytes_ = {static_cast<const char*>(address), size};
  mapped_ = true;
}

MappedFile::~MappedFile() {
  if (mapped_) munmap(const_cast<char*>(bytes_.data()), bytes_.size());
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      bytes_(other.bytes_),
      buffer_(std::move(other.buffer_)),
      mapped_(std::exchange(other.mapped_, false)) {
  if (!mapped_) bytes_ = buffer_;
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

void WriteNewFile(const std::filesystem::path& path, std::string_view bytes) {
  RequireAbsent(path);
  std::string temporary = path.string() + ".partial-XXXXXX";
  const Descriptor file(mkostemp(temporary.data(), O_CLOEXEC));
  if (file.value() < 0) FailWithCause("create", path);
  try {
    WriteAll(file.value(), path, bytes);
    if (fchmod(file.value(), 0666 & ~FileModeMask()) != 0 && !RefusesModes()) {
      FailWithCause("set the mode of", path);
    }
    if (!SyncDescriptor(file.value())) FailWithCause("sync", path);
    RenameToNew(temporary, path);
  } catch (...) {
    unlink(temporary.c_str());
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
