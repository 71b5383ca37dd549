// Reading files through mappings, and writing them so that an error leaves nothing half-written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace terrace {

// The bytes of a file, mapped read-only (pipes, devices and the files of /proc are read into memory
// instead).
// The file must not shrink while it is mapped.
class MappedFile {
 public:
  // Throws Error naming the path and the cause; a folder is an error, an empty file is not.
  explicit MappedFile(std::filesystem::path path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&&) = delete;

  std::string_view bytes() const { return bytes_; }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  std::string_view bytes_;
  std::string buffer_;  // holds the bytes when they are not mapped
  bool mapped_ = false;
};

// A new file being written. Throws Error naming the path and the cause, e.g. a full disk.
class OutputFile {
 public:
  // Fails when the file exists.
  explicit OutputFile(std::filesystem::path path);
  ~OutputFile();
  OutputFile(OutputFile&& other) noexcept;
  OutputFile& operator=(OutputFile&&) = delete;

  void Write(std::string_view bytes);
  void WriteAt(int64_t offset, std::string_view bytes);
  // Syncs and closes; without it the contents are not guaranteed.
  void Close();

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
};

// A folder that comes into being complete: files are written to a temporary neighbour, which
// Commit syncs and renames; without Commit it is removed.
class OutputFolder {
 public:
  // Throws Error when `path` exists, unless as an empty folder. Creates missing parents.
  explicit OutputFolder(std::filesystem::path path);
  ~OutputFolder();
  OutputFolder(const OutputFolder&) = delete;
  OutputFolder& operator=(const OutputFolder&) = delete;

  // Where to write meanwhile.
  const std::filesystem::path& temporary() const { return temporary_; }
  void Commit();

 private:
  std::filesystem::path path_;
  std::filesystem::path temporary_;
};

// Throws Error when `path` exists: for a check before long work.
void RequireAbsent(const std::filesystem::path& path);

// Writes a new file under an unused temporary name beside it, syncs and renames it. Throws Error
// when `path` exists, and leaves nothing where it fails.
void WriteNewFile(const std::filesystem::path& path, std::string_view bytes);

// Whether `path` is a pipe or a character device, such as /dev/null.
bool IsStream(const std::filesystem::path& path);

// Writes to what IsStream. Throws Error naming the path and the cause.
void WriteToStream(const std::filesystem::path& path, std::string_view bytes);

}  // namespace terrace
