// Reading files, and writing them so that an error leaves nothing half-written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace terrace {

// A file open for reading. Nothing of it is mapped: a file that somebody else truncates gives an
// Error, where touching a mapping would end the process, and what was read does not stay resident.
class InputFile {
 public:
  // Throws Error naming the path and the cause; a folder is an error. A process may have any number
  // of files open that the system's hard limit allows.
  explicit InputFile(std::filesystem::path path);
  ~InputFile();
  InputFile(InputFile&& other) noexcept;
  InputFile& operator=(InputFile&&) = delete;

  const std::filesystem::path& path() const { return path_; }
  // When it was opened; 0 for pipes, devices and the files of /proc.
  int64_t size() const { return size_; }

  // Reads on from where the last call stopped. Less than out.size() only at the end. Throws Error.
  size_t Read(std::span<char> out);
  // Fills `out` from `offset` on; safe for several threads. Throws Error, too when the file ends
  // before.
  void ReadAt(int64_t offset, std::span<char> out) const;

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
  int64_t size_ = 0;
};

// The whole of a file, pipe or device. Throws Error as InputFile does.
std::string ReadWhole(const std::filesystem::path& path);

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

// Throws Error when `path` exists.
void RequireAbsent(const std::filesystem::path& path);

// Throws the Error that WriteNewFile would: `path` exists, or nothing can be made there (a missing
// folder, one without the right to write). For a check before long work, which leaves nothing.
void RequireCreatable(const std::filesystem::path& path);

// Writes a new file under an unused temporary name beside it, syncs and renames it. Throws Error
// when `path` exists, and leaves nothing where it fails.
void WriteNewFile(const std::filesystem::path& path, std::string_view bytes);

// Whether `path` is a pipe or a character device, such as /dev/null.
bool IsStream(const std::filesystem::path& path);

// Writes to what IsStream. Throws Error naming the path and the cause.
void WriteToStream(const std::filesystem::path& path, std::string_view bytes);

}  // namespace terrace
