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

// Makes names created, renamed or removed in `folder` durable.
void SyncFolder(const std::filesystem::path& folder);

// The whole file, of at most 256 MiB. Throws Error naming the path and the cause.
std::string ReadFile(const std::filesystem::path& path);

}  // namespace terrace
