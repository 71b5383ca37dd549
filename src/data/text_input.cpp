#include "data/text_input.h"

#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "data/utf8.h"

namespace terrace {
namespace {

using namespace std::string_view_literals;

constexpr size_t kBufferBytes = size_t{256} << 10;
constexpr std::string_view kGzipMagic = "\x1f\x8b"sv;

struct BinaryFormat {
  std::string_view magic;
  const char* name;
  size_t offset = 0;
  bool can_open_text = false;  // a text about the format may start so
};
constexpr BinaryFormat kBinaryFormats[] = {
    {"\xfd\x37zXZ\0"sv, "an xz archive (unpack it with xz -d)"},
    {"1AY&SY"sv, "a bzip2 archive (unpack it with bunzip2)", 4},
    {"\x1f\x8b\x08\x00"sv, "compressed by gzip"},
    {"\x1f\x8b\x08\x08"sv, "compressed by gzip"},
    {kGzipMagic, "compressed by gzip"},
    {"\x1f\x9d"sv, "compressed by compress (unpack it with gzip -d)"},
    {"\x04\x22\x4d\x18"sv, "an LZ4 archive (unpack it with lz4 -d)"},
    {"\xff\x06\0\0sNaPpY"sv, "compressed by Snappy"},
    {"LZIP\x01"sv, "an lzip archive"},
    {"7z\xbc\xaf\x27\x1c"sv, "a 7-Zip archive"},
    {"Rar!\x1a\x07"sv, "a RAR archive"},
    {"PK\x03\x04"sv, "a zip archive (or one of the documents that are: .docx, .epub, .npz)"},
    {"PK\x05\x06"sv, "an empty zip archive"},
    {"ustar\0"sv, "a tar archive (unpack it)", 257},
    {"ustar  \0"sv, "a tar archive (unpack it)", 257},
    {"PAR1"sv, "a Parquet file"},
    {"ARROW1\0\0"sv, "an Arrow file"},
    {"FEA1"sv, "a Feather file"},
    {"Obj\x01"sv, "an Avro file"},
    {"\x89HDF\r\n\x1a\n"sv, "an HDF5 file"},
    {"\x93NUMPY"sv, "a NumPy array (.npy)"},
    {"SQLite format 3\0"sv, "an SQLite database"},
    {"GGUF"sv, "a GGUF model", 0, true},
    {"%PDF-"sv, "a PDF document"},
    {"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"sv, "an old Office document"},
    {"\x89PNG\r\n\x1a\n"sv, "a PNG picture"},
    {"\xff\xd8\xff"sv, "a JPEG picture"},
    {"GIF89a"sv, "a GIF picture", 0, true},
    {"\x7f"
     "ELF"sv,
     "a program (ELF)"},
    {"\xff\xfe"sv, "text in UTF-16 (convert it: iconv -f UTF-16 -t UTF-8)"},
    {"\xfe\xff"sv, "text in UTF-16 (convert it: iconv -f UTF-16 -t UTF-8)"},
};

// A frame, or one of those that are to be skipped, which parallel compressors begin with.
bool IsZstd(std::string_view head) {
  return head.starts_with("\x28\xb5\x2f\xfd"sv) || (head.size() >= 4 && (head[0] & 0xf0) == 0x50 &&
                                                    head.substr(1).starts_with("\x2a\x4d\x18"sv));
}

class GzipDecoder : public TextInput::Decoder {
 public:
  GzipDecoder() {
    constexpr int kGzipOnly = 16 + MAX_WBITS;
    TERRACE_CHECK(inflateInit2(&stream_, kGzipOnly) == Z_OK, "zlib");
  }
  ~GzipDecoder() override { inflateEnd(&stream_); }

  void Step(std::string_view& in, std::span<char>& out) override {
    if (done_) {
      // Tapes and disks pad with zeros.
      const size_t padding = std::min(in.find_first_not_of('\0'), in.size());
      in.remove_prefix(padding);
      if (in.empty()) return;
      inflateReset(&stream_);
      done_ = false;
    }
    stream_.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(in.data()));
    stream_.avail_in = static_cast<uInt>(in.size());
    stream_.next_out = reinterpret_cast<Bytef*>(out.data());
    stream_.avail_out = static_cast<uInt>(std::min<size_t>(out.size(), 1u << 30));
    const size_t room = stream_.avail_out;
    const int result = inflate(&stream_, Z_NO_FLUSH);
    in.remove_prefix(in.size() - stream_.avail_in);
    out = out.subspan(room - stream_.avail_out);
    done_ = result == Z_STREAM_END;
    if (result != Z_OK && result != Z_STREAM_END && result != Z_BUF_ERROR) {
      Fail("{}", stream_.msg != nullptr ? stream_.msg : zError(result));
    }
  }
  bool done() const override { return done_; }

 private:
  z_stream stream_{};
  bool done_ = true;
};

class ZstdDecoder : public TextInput::Decoder {
 public:
  ~ZstdDecoder() override { ZSTD_freeDStream(stream_); }

  void Step(std::string_view& in, std::span<char>& out) override {
    if (in.empty() && done_) return;  // a call would begin another frame
    ZSTD_inBuffer input = {in.data(), in.size(), 0};
    ZSTD_outBuffer output = {out.data(), out.size(), 0};
    const size_t result = ZSTD_decompressStream(stream_, &output, &input);
    if (ZSTD_isError(result) != 0) Fail("{}", ZSTD_getErrorName(result));
    in.remove_prefix(input.pos);
    out = out.subspan(output.pos);
    done_ = result == 0;
  }
  bool done() const override { return done_; }

 private:
  ZSTD_DStream* stream_ = ZSTD_createDStream();
  bool done_ = true;
};

bool EndsIn(const std::filesystem::path& path, std::string_view ending) {
  return path.filename().string().ends_with(ending);
}

}  // namespace

const char* BinaryFormatOf(std::string_view head, size_t least_magic) {
  const bool is_text = ValidUtf8Bytes(head) + 3 >= std::ssize(head) &&
                       std::ranges::none_of(head, [](char byte) { return byte >= 0 && byte < 9; });
  for (const BinaryFormat& format : kBinaryFormats) {
    if (format.magic.size() < least_magic || head.size() < format.offset) continue;
    if (format.can_open_text && is_text) continue;
    if (head.substr(format.offset).starts_with(format.magic)) return format.name;
  }
  if (IsZstd(head)) return "compressed by Zstandard";
  // A stream of Arrow messages, as datasets are cached: a mark, then the length of the first one.
  if (head.size() >= 8 && head.starts_with("\xff\xff\xff\xff"sv) && head[7] == 0 &&
      head[4] % 8 == 0) {
    return "a stream of Arrow data";
  }
  return nullptr;
}

std::string UncompressedName(const std::filesystem::path& path) {
  const bool is_compressed = EndsIn(path, ".gz") || EndsIn(path, ".zst");
  return is_compressed ? path.stem().string() : path.filename().string();
}

TextInput::TextInput(const std::filesystem::path& path) : file_(path), buffer_(kBufferBytes, '\0') {
  Fill();
  if (rest_.starts_with(kGzipMagic)) {
    format_ = "gzip";
    decoder_ = std::make_unique<GzipDecoder>();
  } else if (IsZstd(rest_)) {
    format_ = "Zstandard";
    decoder_ = std::make_unique<ZstdDecoder>();
  } else if (EndsIn(path, ".gz") || EndsIn(path, ".zst")) {
    Fail("{} is not compressed by {}, whatever its name says", path.string(),
         EndsIn(path, ".gz") ? "gzip" : "Zstandard");
  } else if (const char* format = BinaryFormatOf(rest_)) {
    Fail("{} is {}, not text", path.string(), format);
  }
}

TextInput::~TextInput() = default;

void TextInput::Fill() {
  const size_t count = file_.Read(buffer_);
  rest_ = std::string_view(buffer_).substr(0, count);
  ended_ = count < buffer_.size();
  consumed_ += static_cast<int64_t>(count);
}

size_t TextInput::ReadDecoded(std::span<char> out) {
  const size_t wanted = out.size();
  try {
    for (;;) {
      if (rest_.empty() && !ended_) Fill();
      const size_t bytes_before = rest_.size() + out.size();
      decoder_->Step(rest_, out);
      if (out.empty()) break;
      if (!rest_.empty() || !ended_) continue;
      // What the decoder still holds comes out without more input.
      if (rest_.size() + out.size() < bytes_before) continue;
      if (!decoder_->done()) Fail("they end too early: the file is truncated");
      break;
    }
  } catch (const Error& error) {
    Fail("{}: its {} data are damaged: {}", path().string(), format_, error.what());
  }
  return wanted - out.size();
}

size_t TextInput::Read(std::span<char> out) {
  if (decoder_ != nullptr) {
    const size_t count = ReadDecoded(out);
    if (std::exchange(is_first_, false)) {
      if (const char* format = BinaryFormatOf({out.data(), count})) {
        Fail("{}: what its {} data hold is {}, not text", path().string(), format_, format);
      }
    }
    return count;
  }
  const size_t held = std::min(rest_.size(), out.size());
  std::copy_n(rest_.begin(), held, out.begin());
  rest_.remove_prefix(held);
  if (held == out.size() || ended_) return held;
  const size_t count = file_.Read(out.subspan(held));
  ended_ = count < out.size() - held;
  consumed_ += static_cast<int64_t>(count);
  return held + count;
}

}  // namespace terrace
