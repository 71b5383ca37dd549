// Text from files that may be compressed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "data/files.h"

namespace terrace {

// What a file is that starts with `head` (512 bytes suffice) and is neither text nor tokens, for
// messages: "an xz archive", "a PDF document". Null where nothing is known. Marks of fewer than
// `least_magic` bytes do not count: in arbitrary numbers they are found by chance.
const char* BinaryFormatOf(std::string_view head, size_t least_magic = 2);

// The name without an ending .gz or .zst.
std::string UncompressedName(const std::filesystem::path& path);

// A file from its start to its end, decompressed on the way if it is gzip or Zstandard, of one or
// several members. Memory does not depend on the file's size; Zstandard's windows are limited to
// 128 MiB, as its own program does by default.
class TextInput {
 public:
  // Throws Error naming the path when it cannot be opened, is of a known format that is no text, or
  // is not of the kind of compression that its name says.
  explicit TextInput(const std::filesystem::path& path);
  ~TextInput();
  TextInput(const TextInput&) = delete;
  TextInput& operator=(const TextInput&) = delete;

  const std::filesystem::path& path() const { return file_.path(); }

  // Reads on. Less than out.size() only at the end. Throws Error naming the path and what is wrong
  // with it: truncated or damaged compressed data, and compressed data that are no text.
  size_t Read(std::span<char> out);
  // Bytes read from the file itself.
  int64_t consumed() const { return consumed_; }

  // Takes one format apart, step by step.
  class Decoder {
   public:
    virtual ~Decoder() = default;
    // Decodes from the front of `in`, which it shortens, to the front of `out`, which it shortens.
    // `done`: nothing has been begun that is not ended. Throws Error with the bare reason.
    virtual void Step(std::string_view& in, std::span<char>& out) = 0;
    virtual bool done() const = 0;
  };

 private:
  void Fill();
  size_t ReadDecoded(std::span<char> out);

  InputFile file_;
  std::string buffer_;     // of the file's own bytes
  std::string_view rest_;  // those in it that are not used yet
  bool ended_ = false;     // the file has no more
  int64_t consumed_ = 0;
  const char* format_ = nullptr;  // of the compression, for messages
  std::unique_ptr<Decoder> decoder_;
  bool is_first_ = true;
};

}  // namespace terrace
