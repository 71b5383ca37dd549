#include "train/safetensors.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <span>
#include <utility>

#include "core/atomic_file.h"
#include "core/counted.h"
#include "core/error.h"
#include "train/checksum.h"

namespace terrace {
namespace {

using Json = nlohmann::json;

// The format's own limit.
constexpr uint64_t kMaxHeaderBytes = 100'000'000;
// Of reads and their checksums: large enough for speed, small beside any model.
constexpr int64_t kPartBytes = int64_t{4} << 20;

struct StoredType {
  std::string_view name;
  int64_t bytes;
  std::optional<DType> dtype;
};
constexpr StoredType kStoredTypes[] = {
    {"F32", 4, DType::kF32}, {"BF16", 2, DType::kBF16},
    {"I32", 4, DType::kI32}, {"I64", 8, DType::kI64},
    {"F64", 8, {}},          {"F16", 2, {}},
    {"U64", 8, {}},          {"U32", 4, {}},
    {"U16", 2, {}},          {"I16", 2, {}},
    {"U8", 1, DType::kU8},   {"I8", 1, {}},
    {"BOOL", 1, {}},         {"F8_E4M3", 1, {}},
    {"F8_E5M2", 1, {}},
};

std::string_view StoredName(DType dtype) {
  return std::find_if(std::begin(kStoredTypes), std::end(kStoredTypes),
                      [&](const StoredType& type) { return type.dtype == dtype; })
      ->name;
}

struct Entry {
  std::string dtype;
  std::vector<int64_t> dims;
  int64_t begin = 0;  // within the bytes after the header
  int64_t end = 0;
};

// Like Json::parse, but a repeated key is an error (Json keeps the last one silently).
Json ParseUnique(std::string_view text) {
  std::vector<std::set<std::string>> keys;
  return Json::parse(text, [&](int, Json::parse_event_t event, Json& value) {
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && !keys.back().insert(value.get<std::string>()).second) {
      Fail("the header has \"{}\" twice", value.get<std::string>());
    }
    return true;
  });
}

int64_t WholeNumber(const Json& value, std::string_view what) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() > INT64_MAX) {
    Fail("{} is not a whole number from 0", what);
  }
  return value.get<int64_t>();
}

Entry ParseEntry(const Json& json, int64_t data_bytes) {
  if (!json.is_object() || !json.contains("dtype") || !json["dtype"].is_string() ||
      !json.contains("shape") || !json["shape"].is_array() || !json.contains("data_offsets") ||
      !json["data_offsets"].is_array() || json["data_offsets"].size() != 2) {
    Fail("dtype, shape or data_offsets are missing or of a wrong type");
  }
  Entry entry;
  entry.dtype = json["dtype"].get<std::string>();
  int64_t elements = 1;
  for (const Json& dim : json["shape"]) {
    entry.dims.push_back(WholeNumber(dim, "a dimension"));
    if (__builtin_mul_overflow(elements, entry.dims.back(), &elements)) {
      Fail("the shape's size overflows");
    }
  }
  entry.begin = WholeNumber(json["data_offsets"][0], "an offset");
  entry.end = WholeNumber(json["data_offsets"][1], "an offset");
  if (entry.begin > entry.end || entry.end > data_bytes) {
    Fail("bytes {} .. {} lie outside the file's {} of data", entry.begin, entry.end,
         Counted(data_bytes, "byte"));
  }
  for (const StoredType& type : kStoredTypes) {
    int64_t bytes = 0;
    if (type.name == entry.dtype && (__builtin_mul_overflow(elements, type.bytes, &bytes) ||
                                     bytes != entry.end - entry.begin)) {
      Fail("{} {} not hold {} of {}", Counted(entry.end - entry.begin, "byte"),
           ForCount(entry.end - entry.begin, "does", "do"), Counted(elements, "element"),
           type.name);
    }
  }
  return entry;
}

// Padded, so that data starts at a multiple of 64.
std::string HeaderText(const Json& header) {
  std::string text = header.dump();
  text.resize((8 + text.size() + 63) / 64 * 64 - 8, ' ');
  return text;
}

}  // namespace

struct SafetensorsReader::File {
  std::filesystem::path path;
  int descriptor = -1;
  std::byte* mapping = nullptr;  // for views alone: one that is cut meanwhile ends who touches it
  int64_t bytes = 0;
  std::byte* data = nullptr;  // behind the header
  std::map<std::string, Entry, std::less<>> entries;
  std::map<std::string, std::string> metadata;
  bool written_here = false;

  ~File() {
    if (mapping != nullptr) munmap(mapping, static_cast<size_t>(bytes));
    if (descriptor >= 0) close(descriptor);
  }

  void Map() {
    descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) Fail("cannot read: {}", std::strerror(errno));
    struct stat status = {};
    void* mapped = MAP_FAILED;
    if (fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode) && status.st_size >= 8) {
      mapped =
          mmap(nullptr, static_cast<size_t>(status.st_size), PROT_READ, MAP_PRIVATE, descriptor, 0);
    }
    if (!S_ISREG(status.st_mode)) Fail("not a file");
    if (status.st_size < 8)
      Fail("{} {} too few for a safetensors file", Counted(status.st_size, "byte"),
           ForCount(status.st_size, "is", "are"));
    if (mapped == MAP_FAILED) Fail("cannot map {} bytes", status.st_size);
    mapping = static_cast<std::byte*>(mapped);
    bytes = status.st_size;
  }

  // Throws Error, also when the file has become shorter.
  void ReadAt(int64_t offset, void* to, int64_t size) const {
    for (int64_t done = 0; done < size;) {
      const ssize_t count = pread(descriptor, static_cast<std::byte*>(to) + done,
                                  static_cast<size_t>(size - done), offset + done);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) Fail("cannot read: {}", std::strerror(errno));
      if (count == 0) Fail("was truncated while it was read");
      done += count;
    }
  }

  void ParseHeader() {
    uint64_t header_bytes = 0;
    ReadAt(0, &header_bytes, 8);
    if (header_bytes > kMaxHeaderBytes || header_bytes > static_cast<uint64_t>(bytes - 8)) {
      Fail("the header would have {}, the file has {} (truncated, or no safetensors file)",
           Counted(header_bytes, "byte"), bytes);
    }
    data = mapping + 8 + header_bytes;
    const int64_t data_bytes = bytes - 8 - static_cast<int64_t>(header_bytes);

    std::string text(header_bytes, '\0');
    ReadAt(8, text.data(), static_cast<int64_t>(header_bytes));
    Json header;
    try {
      header = ParseUnique(text);
    } catch (const Json::exception&) {
      Fail("the header is not valid JSON (damaged, or no safetensors file)");
    }
    if (!header.is_object()) Fail("the header is not a JSON object");
    for (const auto& [name, json] : header.items()) {
      if (name == "__metadata__") {
        ParseMetadata(json);
        continue;
      }
      try {
        entries.emplace(name, ParseEntry(json, data_bytes));
      } catch (const Error& error) {
        Fail("tensor {}: {}", name, error.what());
      }
    }
    CheckCoverage(data_bytes);
    written_here = HeaderText(header) == text;
  }

  void ParseMetadata(const Json& json) {
    if (!json.is_object()) Fail("__metadata__ is not an object");
    for (const auto& [key, value] : json.items()) {
      if (!value.is_string()) Fail("__metadata__: {} is not a string", key);
      metadata.emplace(key, value.get<std::string>());
    }
  }

  // The tensors' ranges, in order, cover the data without a gap, an overlap or a rest.
  void CheckCoverage(int64_t data_bytes) const {
    std::vector<std::pair<int64_t, const decltype(entries)::value_type*>> order;
    for (const auto& item : entries) order.emplace_back(item.second.begin, &item);
    std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
      return std::pair(a.first, a.second->second.end) < std::pair(b.first, b.second->second.end);
    });
    int64_t covered = 0;
    for (const auto& [begin, item] : order) {
      if (begin != covered) {
        Fail("tensor {}: begins at byte {}, the tensors before it end at {}", item->first, begin,
             covered);
      }
      covered = item->second.end;
    }
    if (covered != data_bytes) {
      Fail("the tensors take {}, the file holds {}", Counted(covered, "byte"), data_bytes);
    }
  }

  const decltype(entries)::value_type& Lookup(std::string_view name) const {
    const auto found = entries.find(name);
    if (found == entries.end()) Fail("{}: has no tensor {}", path.string(), name);
    return *found;
  }

  // The tensor's view, whatever its alignment.
  TensorView View(std::string_view name) const {
    const auto& [stored_name, entry] = Lookup(name);
    const auto type = std::find_if(
        std::begin(kStoredTypes), std::end(kStoredTypes),
        [&](const StoredType& row) { return row.name == entry.dtype && row.dtype.has_value(); });
    if (type == std::end(kStoredTypes)) {
      Fail("{}: tensor {}: type {} is not supported", path.string(), name, entry.dtype);
    }
    if (entry.dims.size() > Shape::kMaxRank) {
      Fail("{}: tensor {}: {} dimensions, at most {} are supported", path.string(), name,
           entry.dims.size(), Shape::kMaxRank);
    }
    return {data + entry.begin, *type->dtype, Shape(std::span(entry.dims)), stored_name.c_str()};
  }
};

SafetensorsReader::SafetensorsReader(std::filesystem::path path) : file_(std::make_unique<File>()) {
  file_->path = std::move(path);
  try {
    file_->Map();
    file_->ParseHeader();
  } catch (const Error& error) {
    Fail("{}: {}", file_->path.string(), error.what());
  }
}

SafetensorsReader::~SafetensorsReader() = default;
SafetensorsReader::SafetensorsReader(SafetensorsReader&&) noexcept = default;

std::vector<std::string> SafetensorsReader::names() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : file_->entries) names.push_back(name);
  return names;
}

bool SafetensorsReader::Has(std::string_view name) const { return file_->entries.contains(name); }

TensorView SafetensorsReader::Find(std::string_view name) const {
  const TensorView view = file_->View(name);
  if (reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(BytesOf(view.dtype)) != 0) {
    Fail("{}: tensor {}: not aligned to its element", file_->path.string(), name);
  }
  return view;
}

bool SafetensorsReader::Read(std::string_view name, TensorView destination) const {
  const TensorView source = file_->View(name);
  if (source.dtype != destination.dtype || source.shape != destination.shape) {
    Fail("{}: tensor {} is {} {}, {} {} is needed", file_->path.string(), name,
         NameOf(source.dtype), source.shape.ToString(), NameOf(destination.dtype),
         destination.shape.ToString());
  }
  const auto stored = file_->metadata.find(std::string(kChecksumPrefix) + std::string(name));
  const bool has_checksum = stored != file_->metadata.end();
  if (!has_checksum && file_->written_here) {
    Fail("{}: tensor {} has no checksum", file_->path.string(), name);
  }
  Checksum checksum;
  for (int64_t begin = 0; begin < source.bytes(); begin += kPartBytes) {
    const int64_t size = std::min(kPartBytes, source.bytes() - begin);
    try {
      file_->ReadAt(source.data - file_->mapping + begin, destination.data + begin, size);
    } catch (const Error& error) {
      Fail("{}: tensor {}: {}", file_->path.string(), name, error.what());
    }
    checksum.Update({destination.data + begin, static_cast<size_t>(size)});
  }
  const bool same = has_checksum && fmt::format("{:016x}", checksum.Value()) == stored->second;
  if (!same && file_->written_here) {
    Fail("{}: tensor {} is damaged (its checksum differs)", file_->path.string(), name);
  }
  return same;
}

bool SafetensorsReader::WrittenHere() const { return file_->written_here; }

const std::map<std::string, std::string>& SafetensorsReader::metadata() const {
  return file_->metadata;
}

const std::filesystem::path& SafetensorsReader::path() const { return file_->path; }

void WriteSafetensors(const std::filesystem::path& path, const std::vector<TensorView>& tensors,
                      const std::map<std::string, std::string>& metadata) {
  // Wide elements first: then every tensor is aligned to its element without gaps.
  std::vector<TensorView> ordered = tensors;
  std::stable_sort(ordered.begin(), ordered.end(), [](const TensorView& a, const TensorView& b) {
    return BytesOf(a.dtype) > BytesOf(b.dtype);
  });
  const auto bytes_of = [](const TensorView& tensor) {
    return std::span<const std::byte>(tensor.data, static_cast<size_t>(tensor.bytes()));
  };

  Json header = Json::object();
  header["__metadata__"] = metadata;
  int64_t offset = 0;
  for (const TensorView& tensor : ordered) {
    TERRACE_CHECK(!header.contains(tensor.name), "{}: two tensors {}", path.string(), tensor.name);
    Json shape = Json::array();
    for (int axis = 0; axis < tensor.shape.rank(); ++axis) shape.push_back(tensor.shape[axis]);
    header[tensor.name] = {{"dtype", StoredName(tensor.dtype)},
                           {"shape", shape},
                           {"data_offsets", {offset, offset + tensor.bytes()}}};
    header["__metadata__"][std::string(kChecksumPrefix) + tensor.name] =
        fmt::format("{:016x}", ChecksumOf(bytes_of(tensor)));
    offset += tensor.bytes();
  }
  const std::string text = HeaderText(header);
  const uint64_t header_bytes = text.size();
  if (header_bytes > kMaxHeaderBytes) {
    Fail("{}: {} tensors are too many for one file", path.string(), tensors.size());
  }

  AtomicFile file(path);
  file.Write(std::as_bytes(std::span(&header_bytes, 1)));
  file.Write(text);
  for (const TensorView& tensor : ordered) file.Write(bytes_of(tensor));
  file.Commit();
}

}  // namespace terrace
