#include "train/checkpoint.h"

#include <sys/statvfs.h>

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "core/atomic_file.h"
#include "core/counted.h"
#include "core/error.h"
#include "train/checksum.h"
#include "train/safetensors.h"

namespace terrace {
namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "step-";
constexpr std::string_view kTemporarySuffix = ".tmp";
constexpr int64_t kFormat = 1;

// Newest first.
std::vector<std::pair<int64_t, fs::path>> CheckpointsIn(const fs::path& checkpoints) {
  std::vector<std::pair<int64_t, fs::path>> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(checkpoints, error)) {
    if (const auto step = StepOf(entry.path())) found.emplace_back(*step, entry.path());
  }
  std::sort(found.rbegin(), found.rend());
  return found;
}

// Removes a checkpoint so that a kill in between leaves no partial one under a valid name.
void RemoveCheckpoint(const fs::path& folder) {
  const fs::path doomed = folder.string() + std::string(kTemporarySuffix);
  std::error_code error;
  fs::remove_all(doomed, error);
  fs::rename(folder, doomed, error);
  if (!error) fs::remove_all(doomed, error);
  if (error) Fail("{}: cannot remove: {}", folder.string(), error.message());
}

// Of all but the checksum itself.
std::string ChecksumOfState(Json json) {
  json.erase("checksum");
  const std::string text = json.dump();
  return fmt::format("{:016x}", ChecksumOf(std::as_bytes(std::span(text))));
}

std::vector<TensorView> ViewsOf(const Parameters& parameters) {
  std::vector<TensorView> views;
  for (const Parameter& parameter : parameters) views.push_back(parameter.value);
  return views;
}

// Parts of names as versions up to 0.1 wrote them.
constexpr std::pair<std::string_view, std::string_view> kFormerNames[] = {
    {".gate_proj.", ".w1."}, {".up_proj.", ".w2."}, {".down_proj.", ".w3."}};

// The name under which a file of an earlier version has what is called `name` now.
std::string FormerName(std::string name) {
  for (const auto& [now, before] : kFormerNames) {
    const size_t at = name.find(now);
    if (at != std::string::npos) return name.replace(at, now.size(), before);
  }
  return name;
}

void ReadTensors(const fs::path& path, std::span<const TensorView> views, const Notice& notice) {
  const SafetensorsReader reader(path);
  std::set<std::string> rest;
  for (const std::string& name : reader.names()) rest.insert(name);
  int64_t unverified = 0;
  std::string first;
  for (const TensorView& view : views) {
    const std::string former = FormerName(view.name);
    const std::string name = reader.Has(view.name) || !reader.Has(former) ? view.name : former;
    if (!reader.Read(name, view) && unverified++ == 0) first = view.name;
    rest.erase(name);
  }
  if (!rest.empty()) Fail("{}: tensor {} has no place in the model", path.string(), *rest.begin());
  if (!notice || reader.WrittenHere()) return;
  std::string text = fmt::format("{}: was written by another program", path.string());
  if (unverified > 0) {
    text += fmt::format("; no checksum says that {}{} as saved by the run", first,
                        unverified == 1
                            ? " is"
                            : fmt::format(" and {} are", Counted(unverified - 1, "more tensor")));
  }
  notice(text);
}

// The parser takes any nesting, but what walks its result calls itself for each level.
Json ParseState(const std::string& text) {
  constexpr int kDeepest = 4;
  return Json::parse(text, [](int depth, Json::parse_event_t, Json&) {
    if (depth > kDeepest) throw Json::other_error::create(500, "too deep", nullptr);
    return true;
  });
}

// Of the nearest folder that is there; empty where the file system does not tell.
std::optional<int64_t> FreeDiskBytes(fs::path path) {
  struct statvfs status = {};
  path = fs::absolute(path).lexically_normal();
  while (statvfs(path.c_str(), &status) != 0) {
    if (path == path.parent_path()) return {};
    path = path.parent_path();
  }
  if (status.f_blocks == 0) return {};  // some that are mounted over a network
  return static_cast<int64_t>(status.f_bavail * status.f_frsize);
}

// The members of a DataIdentity, by name.
template <typename Identity, typename Visit>
void VisitIdentity(Identity& identity, const Visit& visit) {
  visit("train", identity.train);
  visit("val", identity.val);
  visit("vocabulary", identity.vocabulary);
}

// Hashes as text, since many programs read numbers as doubles.
Json ToJson(const DataIdentity& identity) {
  Json json = Json::object();
  VisitIdentity(identity, [&](const char* name, const std::optional<Fingerprint>& fingerprint) {
    if (!fingerprint) return;
    json[name] = {{"size", fingerprint->size}, {"hash", fmt::format("{:016x}", fingerprint->hash)}};
  });
  return json;
}

DataIdentity IdentityFromJson(const Json& state, const fs::path& path) {
  DataIdentity identity;
  const auto data = state.find("data");
  if (data == state.end()) return identity;
  VisitIdentity(identity, [&](const char* name, std::optional<Fingerprint>& fingerprint) {
    if (!data->contains(name)) return;
    const Json& json = data->at(name);
    const std::string hash = json.at("hash").get<std::string>();
    fingerprint.emplace(json.at("size").get<int64_t>());
    const char* end = hash.data() + hash.size();
    if (std::from_chars(hash.data(), end, fingerprint->hash, 16).ptr != end || hash.empty()) {
      Fail("{}: is damaged (the fingerprint of {})", path.string(), name);
    }
  });
  return identity;
}

// A state.json that is sound as a whole.
template <typename Read>
void ReadState(const fs::path& checkpoint, const Read& read) {
  const fs::path path = checkpoint / "state.json";
  try {
    const Json json = ParseState(ReadFile(path));
    if (json.at("checksum").get<std::string>() != ChecksumOfState(json)) {
      Fail("{}: is damaged (its checksum differs)", path.string());
    }
    if (json.at("format").get<int64_t>() != kFormat) {
      Fail("{}: is of format {}, not {}", path.string(), json.at("format").get<int64_t>(), kFormat);
    }
    read(json, path);
  } catch (const Json::exception&) {
    Fail("{}: is damaged (not the JSON of a checkpoint)", path.string());
  }
}

}  // namespace

std::optional<int64_t> StepOf(const fs::path& folder) {
  const std::string name = folder.filename().string();
  if (!name.starts_with(kPrefix)) return {};
  int64_t step = 0;
  const char* end = name.data() + name.size();
  const auto [rest, error] = std::from_chars(name.data() + kPrefix.size(), end, step);
  if (error != std::errc{} || rest != end) return {};
  return step;
}

int64_t CheckpointBytes(const Model& model, const Optimizer& optimizer) {
  // Names, shapes, offsets, checksums and step counts, and the configuration.
  constexpr int64_t kBytesAroundATensor = 512, kBytesBesides = 65536;
  int64_t bytes = kBytesBesides;
  const auto add = [&](const TensorView& view) { bytes += view.bytes() + kBytesAroundATensor; };
  for (const Parameter& parameter : model.parameters()) add(parameter.value);
  for (const TensorView& view : optimizer.state()) add(view);
  return bytes;
}

void RequireRoomForCheckpoints(const fs::path& checkpoints, int64_t checkpoint_bytes, int64_t keep,
                               int64_t saves) {
  constexpr double kMiB = 1 << 20;
  const std::optional<int64_t> free_bytes = FreeDiskBytes(checkpoints);
  if (!free_bytes || saves == 0) return;
  const int64_t existing = std::ssize(CheckpointsIn(checkpoints));
  const int64_t added = std::max<int64_t>(1, std::min(keep + 1 - existing, saves));
  const double needed_bytes = static_cast<double>(added) * static_cast<double>(checkpoint_bytes);
  if (needed_bytes <= static_cast<double>(*free_bytes)) return;
  Fail(
      "{}: {:.1f} MiB are needed for checkpoints (training.keep = {}, and the next: {} of {:.1f} "
      "MiB "
      "to come) and {:.1f} MiB are free; --overcommit starts all the same",
      checkpoints.string(), needed_bytes / kMiB, keep, added,
      static_cast<double>(checkpoint_bytes) / kMiB, static_cast<double>(*free_bytes) / kMiB);
}

std::filesystem::path SaveCheckpoint(const fs::path& checkpoints, int64_t keep,
                                     std::string_view config_toml, const RunState& state,
                                     const Model& model, const Optimizer& optimizer) {
  const fs::path folder = checkpoints / fmt::format("{}{}", kPrefix, state.step);
  const fs::path temporary = folder.string() + std::string(kTemporarySuffix);
  std::error_code error;
  // What an earlier kill left behind.
  for (const auto& entry : fs::directory_iterator(checkpoints, error)) {
    if (entry.path().extension() == kTemporarySuffix) fs::remove_all(entry.path(), error);
  }
  fs::create_directories(temporary, error);
  if (error) Fail("{}: cannot create: {}", temporary.string(), error.message());
  try {
    WriteSafetensors(temporary / "model.safetensors", ViewsOf(model.parameters()),
                     {{"format", "pt"}});
    WriteSafetensors(temporary / "optimizer.safetensors",
                     {optimizer.state().begin(), optimizer.state().end()}, {});
    Json json = {{"format", kFormat}, {"step", state.step}, {"tokens", state.tokens}};
    json["data"] = ToJson(state.data);
    for (const Parameter& parameter : model.parameters()) {
      json["tensor_steps"][parameter.name] = optimizer.steps()[static_cast<size_t>(parameter.id)];
    }
    json["checksum"] = ChecksumOfState(json);
    WriteFileAtomically(temporary / "state.json", json.dump(1) + "\n");
    WriteFileAtomically(temporary / "config.toml", config_toml);
    fs::rename(temporary, folder, error);
    if (error) Fail("{}: cannot rename: {}", temporary.string(), error.message());
    SyncFolder(checkpoints);
  } catch (...) {
    fs::remove_all(temporary, error);
    throw;
  }
  const auto all = CheckpointsIn(checkpoints);
  for (size_t i = static_cast<size_t>(keep); i < all.size(); ++i) RemoveCheckpoint(all[i].second);
  return folder;
}

std::optional<fs::path> LatestCheckpoint(const fs::path& checkpoints) {
  const auto all = CheckpointsIn(checkpoints);
  if (all.empty()) return {};
  return all.front().second;
}

void LoadModel(const fs::path& checkpoint, Model& model, const Notice& notice) {
  ReadTensors(checkpoint / "model.safetensors", ViewsOf(model.parameters()), notice);
}

DataIdentity LoadDataIdentity(const fs::path& checkpoint) {
  DataIdentity identity;
  ReadState(checkpoint, [&](const Json& json, const fs::path& path) {
    identity = IdentityFromJson(json, path);
  });
  return identity;
}

RunState LoadState(const fs::path& checkpoint, const Model& model, Optimizer& optimizer,
                   const Notice& notice) {
  RunState state;
  ReadState(checkpoint, [&](const Json& json, const fs::path& path) {
    state = {json.at("step").get<int64_t>(), json.at("tokens").get<int64_t>(),
             IdentityFromJson(json, path)};
    if (StepOf(checkpoint).value_or(state.step) != state.step) {
      Fail("{}: is of step {}, unlike its folder", path.string(), state.step);
    }
    const Json& steps = json.at("tensor_steps");
    for (const Parameter& parameter : model.parameters()) {
      const std::string& name = parameter.name;
      optimizer.steps()[static_cast<size_t>(parameter.id)] =
          steps.at(steps.contains(name) ? name : FormerName(name)).get<int64_t>();
    }
  });
  ReadTensors(checkpoint / "optimizer.safetensors", optimizer.state(), notice);
  return state;
}

}  // namespace terrace
