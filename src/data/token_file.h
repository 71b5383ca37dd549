// Files of tokens: our shards, and those of llm.c and nanoGPT.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "data/files.h"
#include "data/hash.h"

namespace terrace {

// The start of a shard; the tokens follow, unsigned, little-endian as all else here.
struct ShardHeader {
  static constexpr uint64_t kMagic = 0x53444b4f54525254u;  // "TRRTOKDS"
  static constexpr uint32_t kVersion = 1;

  uint64_t magic = kMagic;
  uint32_t version = kVersion;
  uint32_t token_bytes = 0;  // 2, or 4 for vocabularies above 65,536
  int64_t token_count = 0;
  int64_t vocab_size = 0;
  uint64_t checksum = 0;  // HashOf the tokens' bytes
  uint64_t reserved[3] = {};
};
static_assert(sizeof(ShardHeader) == 64);

constexpr int64_t TokenBytes(int64_t vocab_size) { return vocab_size <= 65536 ? 2 : 4; }

// Writes one shard; complete only after Close. Throws Error as OutputFile does.
class ShardWriter {
 public:
  ShardWriter(std::filesystem::path path, int64_t vocab_size);

  // Ids must be in [0, vocab_size).
  void Write(std::span<const int32_t> tokens);
  void Close();

 private:
  void Flush(size_t bytes);

  OutputFile file_;
  ShardHeader header_;
  Hasher hasher_;
  std::string buffer_;
};

// A file of tokens in one of these formats, told apart by their start:
//   - a shard as above;
//   - llm.c: 256 int32 (20240520, version 1, count) and uint16 tokens, or (20240801, version 7,
//     count) and uint32 tokens;
//   - nanoGPT: uint16 tokens only; accepted under the names train.bin and val.bin, since anything
//     could be read so.
class TokenFile {
 public:
  // Throws Error naming the file when it is empty, truncated, longer than its header says, or in
  // none of the formats.
  explicit TokenFile(const std::filesystem::path& path);

  int64_t size() const { return count_; }             // tokens
  int64_t vocab_size() const { return vocab_size_; }  // 0 where the format does not say
  // HashOf all tokens' bytes when they were written; 0 where the format has none.
  uint64_t checksum() const { return checksum_; }
  const std::filesystem::path& path() const { return file_.path(); }

  // Reads the tokens [first, first + out.size()); safe for several threads. Throws Error naming the
  // file when it was truncated meanwhile, and the token's index when an id is not below
  // `vocab_size`.
  void Read(int64_t first, int64_t vocab_size, std::span<int32_t> out) const;
  // Reads all of a shard and compares the checksum; throws Error when it differs. Other formats
  // have none.
  void VerifyChecksum() const;

 private:
  InputFile file_;
  int64_t header_bytes_ = 0;
  int64_t token_bytes_ = 0;
  int64_t count_ = 0;
  int64_t vocab_size_ = 0;
  uint64_t checksum_ = 0;
};

}  // namespace terrace
