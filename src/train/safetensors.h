// Reading and writing of .safetensors: an 8-byte little-endian header length, a JSON header that
// gives each tensor's dtype, shape and byte range, then the bytes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/tensor.h"

namespace terrace {

// A file open for reading. Every offset, overlap and size is checked on opening: a damaged or
// hostile file gives an Error that names the file and the tensor, never a wild read.
// Dtypes: F32, BF16, I32, I64; tensors of others (or of more than four dimensions, or not aligned
// to their element) are an Error when looked up, not on opening.
class SafetensorsReader {
 public:
  explicit SafetensorsReader(std::filesystem::path path);
  ~SafetensorsReader();
  SafetensorsReader(SafetensorsReader&&) noexcept;

  std::vector<std::string> names() const;
  bool Has(std::string_view name) const;
  // A view on a mapping of the file: valid while the reader lives, not to be written; for files
  // that nobody changes. Throws Error naming file and tensor when there is none.
  TensorView Find(std::string_view name) const;
  // Copies the tensor of this name into `destination`, converting nothing, and compares it with
  // its checksum. Resident memory does not grow by the file. Throws Error naming file and tensor
  // when it is absent, has another dtype or shape, or was damaged or cut off meanwhile (destination
  // then holds what there was).
  //
  // Returns whether a checksum says that the bytes are those that were saved. It may not where
  // another program wrote the file: most drop the metadata, and some keep what no longer holds.
  bool Read(std::string_view name, TensorView destination) const;
  // Whether the header is, to the byte, what WriteSafetensors makes of such tensors. Other programs
  // order, align and space theirs differently.
  bool WrittenHere() const;
  const std::map<std::string, std::string>& metadata() const;
  const std::filesystem::path& path() const;

 private:
  struct File;
  std::unique_ptr<File> file_;
};

// Metadata keys of this prefix, followed by a tensor's name, hold its checksum (train/checksum.h)
// in hexadecimal: other readers ignore them.
inline constexpr std::string_view kChecksumPrefix = "checksum:";

// Writes tensors to `path` in one sequential stream without a second copy in memory, to a
// temporary name that is synced and renamed at the end: a kill or a full disk leaves no partial
// file under `path`. Adds every tensor's checksum to `metadata`. Throws Error naming the path and
// the cause.
void WriteSafetensors(const std::filesystem::path& path, const std::vector<TensorView>& tensors,
                      const std::map<std::string, std::string>& metadata);

}  // namespace terrace
