// A file that appears under its name complete and on disk, or not at all.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace terrace {

// Writes to "<path>.tmp" beside `path`; Commit syncs it, renames it to `path` and syncs the folder.
// Destroyed without Commit: the temporary file is removed and `path` is as it was. Every member
// throws Error naming the path and the cause (a full disk, a read-only folder).
class AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void Write(std::span<const std::byte> bytes);
  void Write(std::string_view text) { Write(std::as_bytes(std::span(text))); }
  void Commit();

 private:
  [[noreturn]] void FailWith(int error) const;

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  int descriptor_ = -1;
};

void WriteFileAtomically(const std::filesystem::path& path, std::string_view text);

// As fsync, for a file or a folder: false with errno set when its contents may not be durable. True
// also where the file system cannot sync such a thing at all (folders on CIFS and some of FUSE,
// say): it is then as safe as it gets there, and no reason to end a run.
bool SyncDescriptor(int descriptor);

// Makes names created, renamed or removed in `folder` durable. Throws Error naming it and the
// cause.
void SyncFolder(const std::filesystem::path& folder);

// The whole file, of at most 256 MiB. Throws Error naming the path and the cause.
std::string ReadFile(const std::filesystem::path& path);

}  // namespace terrace
