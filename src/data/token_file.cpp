#include "data/token_file.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "core/counted.h"
#include "core/error.h"
#include "data/text_input.h"

namespace terrace {
namespace {

static_assert(std::endian::native == std::endian::little, "token files are little-endian");

constexpr size_t kBufferBytes = size_t{1} << 20;
constexpr size_t kReadBytes = size_t{32} << 10;
constexpr int64_t kLlmcHeaderBytes = 256 * 4;
// What formats are told apart by.
constexpr int64_t kHeadBytes = 512;

struct LlmcFormat {
  int32_t magic;
  int32_t version;
  int64_t token_bytes;
};
constexpr std::array<LlmcFormat, 2> kLlmcFormats = {{{20240520, 1, 2}, {20240801, 7, 4}}};

std::string_view BytesOfHeader(const ShardHeader& header) {
  return {reinterpret_cast<const char*>(&header), sizeof(header)};
}

// Widens the tokens at `bytes`; the index of the first that is not below the limit, or -1.
template <typename T>
int64_t UpcastIds(const char* bytes, uint32_t limit, std::span<int32_t> out) {
  uint32_t largest = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    T token;
    std::memcpy(&token, bytes + i * sizeof(T), sizeof(T));
    largest = std::max<uint32_t>(largest, token);
    out[i] = static_cast<int32_t>(token);
  }
  if (largest < limit) return -1;
  return std::ranges::find_if(out, [&](int32_t id) { return static_cast<uint32_t>(id) >= limit; }) -
         out.begin();
}

}  // namespace

ShardWriter::ShardWriter(std::filesystem::path path, int64_t vocab_size) : file_(std::move(path)) {
  header_.vocab_size = vocab_size;
  header_.token_bytes = static_cast<uint32_t>(TokenBytes(vocab_size));
  // Without the magic number until Close, so that an unfinished shard is none.
  file_.Write(std::string(sizeof(ShardHeader), '\0'));
}

void ShardWriter::Flush(size_t bytes) {
  const std::string_view block = std::string_view(buffer_).substr(0, bytes);
  hasher_.Add(block);
  file_.Write(block);
  buffer_.erase(0, bytes);
}

void ShardWriter::Write(std::span<const int32_t> tokens) {
  for (const int32_t token : tokens) {
    // Little-endian: the low bytes come first.
    buffer_.append(reinterpret_cast<const char*>(&token), header_.token_bytes);
    if (buffer_.size() >= kBufferBytes) Flush(kBufferBytes);
  }
  header_.token_count += static_cast<int64_t>(tokens.size());
}

void ShardWriter::Close() {
  Flush(buffer_.size());
  header_.checksum = hasher_.value();
  file_.WriteAt(0, BytesOfHeader(header_));
  file_.Close();
}

TokenFile::TokenFile(const std::filesystem::path& path) : file_(path) {
  const int64_t size = file_.size();
  std::string bytes(static_cast<size_t>(std::min<int64_t>(size, kHeadBytes)), '\0');
  file_.ReadAt(0, bytes);
  const std::string name = path.string();
  const std::string base = path.filename().string();
  ShardHeader shard;
  std::array<int32_t, 3> llmc{};
  if (bytes.empty()) Fail("{} is empty", name);
  std::memcpy(llmc.data(), bytes.data(), std::min(bytes.size(), sizeof(llmc)));
  const LlmcFormat* llmc_format = nullptr;
  for (const LlmcFormat& format : kLlmcFormats) {
    if (format.magic == llmc[0] && bytes.size() >= sizeof(llmc)) llmc_format = &format;
  }
  if (bytes.size() >= 8 && std::memcmp(bytes.data(), &shard.magic, 8) == 0) {
    if (bytes.size() < sizeof(shard)) Fail("{} is truncated within its header", name);
    std::memcpy(&shard, bytes.data(), sizeof(shard));
    if (shard.version != ShardHeader::kVersion) {
      Fail("{} is a shard of version {}; this program reads version {}", name, shard.version,
           ShardHeader::kVersion);
    }
    if (shard.vocab_size <= 0 || shard.vocab_size > INT32_MAX || shard.token_count < 0 ||
        shard.token_bytes != TokenBytes(shard.vocab_size)) {
      Fail("{} has a damaged header", name);
    }
    header_bytes_ = sizeof(shard);
    token_bytes_ = shard.token_bytes;
    count_ = shard.token_count;
    vocab_size_ = shard.vocab_size;
    checksum_ = shard.checksum;
  } else if (llmc_format != nullptr) {
    if (llmc[1] != llmc_format->version) {
      Fail("{} is an llm.c token file of version {}; version {} is supported", name, llmc[1],
           llmc_format->version);
    }
    header_bytes_ = kLlmcHeaderBytes;
    token_bytes_ = llmc_format->token_bytes;
    count_ = static_cast<uint32_t>(llmc[2]);  // written as int32; files beyond 2^31 wrap
  } else if (base == "train.bin" || base == "val.bin") {
    if (const char* format = BinaryFormatOf(bytes, 4)) {
      Fail("{} is {}; plain uint16 tokens (nanoGPT) are expected", name, format);
    }
    if (size % 2 != 0) Fail("{} is truncated: it ends within a uint16 token", name);
    token_bytes_ = 2;
    count_ = size / 2;
  } else {
    Fail(
        "{} is neither a Terrace shard nor an llm.c token file; plain uint16 tokens (nanoGPT) "
        "must be named train.bin or val.bin",
        name);
  }
  const int64_t held = size - header_bytes_;
  if (held < 0 || held / token_bytes_ < count_) {
    Fail("{} is truncated: it holds {} of {}", name, std::max<int64_t>(held, 0) / token_bytes_,
         Counted(count_, "token"));
  }
  if (held != count_ * token_bytes_) {
    Fail("{} has {} after its {}", name, Counted(held - count_ * token_bytes_, "byte"),
         Counted(count_, "token"));
  }
  if (count_ == 0) Fail("{} has no tokens", name);
}

void TokenFile::Read(int64_t first, int64_t vocab_size, std::span<int32_t> out) const {
  TERRACE_CHECK(first >= 0 && first + static_cast<int64_t>(out.size()) <= count_,
                "tokens [{}, {}) of {}", first, first + static_cast<int64_t>(out.size()), count_);
  const uint32_t limit = static_cast<uint32_t>(std::clamp<int64_t>(vocab_size, 0, INT32_MAX));
  std::array<char, kReadBytes> block;
  const size_t width = static_cast<size_t>(token_bytes_);
  while (!out.empty()) {
    const size_t count = std::min(out.size(), block.size() / width);
    const std::span<int32_t> part = out.first(count);
    file_.ReadAt(header_bytes_ + first * token_bytes_, std::span(block).first(count * width));
    const int64_t error = width == 2 ? UpcastIds<uint16_t>(block.data(), limit, part)
                                     : UpcastIds<uint32_t>(block.data(), limit, part);
    if (error >= 0) {
      Fail("{}: token {} has the id {}, beyond the vocabulary of {}", path().string(),
           first + error, static_cast<uint32_t>(part[static_cast<size_t>(error)]), vocab_size);
    }
    out = out.subspan(count);
    first += static_cast<int64_t>(count);
  }
}

void TokenFile::VerifyChecksum() const {
  if (header_bytes_ != sizeof(ShardHeader)) return;
  Hasher hasher;
  std::vector<char> block(kBufferBytes);
  const int64_t end = header_bytes_ + count_ * token_bytes_;
  for (int64_t offset = header_bytes_; offset < end;) {
    const size_t count =
        static_cast<size_t>(std::min<int64_t>(end - offset, static_cast<int64_t>(block.size())));
    file_.ReadAt(offset, std::span(block).first(count));
    hasher.Add({block.data(), count});
    offset += static_cast<int64_t>(count);
  }
  if (hasher.value() != checksum_) {
    Fail("{} is damaged: its checksum differs", path().string());
  }
}

}  // namespace terrace
