#include "train/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>

#include "backend/cpu/cpu_backend.h"
#include "core/atomic_file.h"
#include "core/error.h"
#include "support/file_size_limit.h"
#include "support/message_of.h"
#include "support/small_run.h"
#include "support/temporary_folder.h"
#include "train/safetensors.h"

namespace terrace {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

// A model with its optimizer, filled from a seed.
struct Trained {
  explicit Trained(const RunConfig& config, uint64_t seed = 1)
      : arena(16 << 20),
        backend(arena),
        model(config.model, backend),
        optimizer(ResolvedRun(config).policy, model.parameters(), arena, 1) {
    model.Initialize(seed);
    for (const TensorView& view : optimizer.state()) {
      for (int64_t i = 0; i < view.size(); ++i) {
        view.as<float>()[i] = static_cast<float>(seed) + static_cast<float>(i);
      }
    }
    int64_t steps = static_cast<int64_t>(seed);
    for (int64_t& count : optimizer.steps()) count = ++steps;
  }
  // All bytes of weights and state, and step counts.
  std::string Contents() const {
    std::string bytes;
    const auto add = [&](const TensorView& view) {
      bytes.append(reinterpret_cast<const char*>(view.data), static_cast<size_t>(view.bytes()));
    };
    for (const Parameter& parameter : model.parameters()) add(parameter.value);
    for (const TensorView& view : optimizer.state()) add(view);
    for (int64_t steps : optimizer.steps()) bytes += std::to_string(steps) + ",";
    return bytes;
  }

  Arena arena;
  CpuBackend backend;
  Model model;
  Optimizer optimizer;
};

std::map<std::string, std::string> FilesBelow(const fs::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file()) files[entry.path()] = ReadFile(entry.path());
  }
  return files;
}

class CheckpointTest : public ::testing::Test {
 protected:
  fs::path Save(const Trained& trained, int64_t step, int64_t keep = 9) {
    fs::create_directories(checkpoints_);
    return SaveCheckpoint(checkpoints_, keep, "text", {step, step * 100, {}}, trained.model,
                          trained.optimizer);
  }
  std::string MessageOfLoad(const fs::path& checkpoint, Trained& into) {
    return MessageOf([&] {
      LoadModel(checkpoint, into.model);
      LoadState(checkpoint, into.model, into.optimizer);
    });
  }

  TemporaryFolder folder_;
  fs::path checkpoints_ = folder_ / "checkpoints";
  RunConfig config_ = SmallRun("corpus");
};

TEST_F(CheckpointTest, RoundTrip) {
  for (const char* policy : {"skewadam", "adamw"}) {
    config_.optimizer.policy = policy;
    config_.model.weight_dtype = DType::kBF16;
    const Trained saved(config_, 1);
    Trained loaded(config_, 2);
    ASSERT_NE(saved.Contents(), loaded.Contents());
    const fs::path path = Save(saved, 7);
    EXPECT_EQ(path, checkpoints_ / "step-7");
    LoadModel(path, loaded.model);
    const RunState state = LoadState(path, loaded.model, loaded.optimizer);
    EXPECT_EQ(state.step, 7);
    EXPECT_EQ(state.tokens, 700);
    EXPECT_EQ(loaded.Contents(), saved.Contents());
    fs::remove_all(checkpoints_);
  }
}

// A flip anywhere either is found or changes nothing (the padding and such of a header).
TEST_F(CheckpointTest, FlippedBytesAreFound) {
  config_.model.width = 16;
  config_.model.vocab_size = 40;
  const Trained saved(config_);
  const fs::path path = Save(saved, 1);
  for (const char* name : {"model.safetensors", "optimizer.safetensors", "state.json"}) {
    const std::string good = ReadFile(path / name);
    int64_t found = 0, tried = 0;
    for (size_t i = 0; i < good.size(); i += 1 + good.size() / 400) {
      std::string bad = good;
      bad[i] = static_cast<char>(bad[i] ^ (1 << (i % 7)));
      std::ofstream(path / name, std::ios::binary) << bad;
      Trained loaded(config_, 2);
      const std::string message = MessageOfLoad(path, loaded);
      if (message.empty()) {
        EXPECT_EQ(loaded.Contents(), saved.Contents()) << name << " byte " << i;
      } else {
        EXPECT_THAT(message, HasSubstr(name));
        ++found;
      }
      ++tried;
    }
    EXPECT_GT(found, tried / 2) << name;
    std::ofstream(path / name, std::ios::binary) << good;
  }
  Trained loaded(config_, 2);
  EXPECT_EQ(MessageOfLoad(path, loaded), "");
}

// The file as Python's safetensors writes it: keys and tensors in another order, padded to 8 bytes.
std::string WrittenAgain(const fs::path& path, bool metadata,
                         const std::function<void(std::string& bytes)>& change = {}) {
  const SafetensorsReader reader(path);
  std::vector<std::string> names = reader.names();
  std::reverse(names.begin(), names.end());
  nlohmann::ordered_json header;
  if (metadata) header["__metadata__"] = reader.metadata();
  std::string data;
  for (const std::string& name : names) {
    const TensorView view = reader.Find(name);
    std::string bytes(reinterpret_cast<const char*>(view.data), static_cast<size_t>(view.bytes()));
    if (change && name == names[1]) change(bytes);
    auto& entry = header[name];
    entry["dtype"] = view.dtype == DType::kF32 ? "F32" : view.dtype == DType::kBF16 ? "BF16" : "U8";
    entry["shape"] = nlohmann::json::array();
    for (int axis = 0; axis < view.shape.rank(); ++axis) entry["shape"].push_back(view.shape[axis]);
    entry["data_offsets"] = {data.size(), data.size() + bytes.size()};
    data += bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + text + data;
}

TEST_F(CheckpointTest, WhatAnotherProgramWroteIsTakenWithANotice) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    config_.model.weight_dtype = dtype;
    const Trained saved(config_, 1);
    const fs::path path = Save(saved, 1);
    std::map<std::string, std::string> good;
    for (const char* name : {"model.safetensors", "optimizer.safetensors"}) {
      good[name] = ReadFile(path / name);
    }
    const auto restore = [&] {
      for (const auto& [name, bytes] : good) std::ofstream(path / name, std::ios::binary) << bytes;
    };
    std::vector<std::string> notices;
    const Notice notice = [&](std::string_view text) { notices.emplace_back(text); };
    Trained loaded(config_, 2);
    LoadModel(path, loaded.model, notice);
    LoadState(path, loaded.model, loaded.optimizer, notice);
    EXPECT_THAT(notices, testing::IsEmpty());
    for (const bool metadata : {true, false}) {
      restore();
      for (const char* name : {"model.safetensors", "optimizer.safetensors"}) {
        const std::string bytes = WrittenAgain(path / name, metadata);
        std::ofstream(path / name, std::ios::binary) << bytes;
      }
      Trained again(config_, 3);
      LoadModel(path, again.model, notice);
      LoadState(path, again.model, again.optimizer, notice);
      EXPECT_EQ(again.Contents(), saved.Contents());
      EXPECT_EQ(notices.size(), 2u);
      EXPECT_THAT(notices[0], HasSubstr("model.safetensors: was written by another program"));
      EXPECT_EQ(notices[0].find("checksum") == std::string::npos, metadata) << notices[0];
      notices.clear();
    }
    // With its checksums kept, and one tensor changed.
    restore();
    const std::string changed =
        WrittenAgain(path / "model.safetensors", true, [](std::string& bytes) { bytes[0] ^= 1; });
    std::ofstream(path / "model.safetensors", std::ios::binary) << changed;
    Trained again(config_, 3);
    LoadModel(path, again.model, notice);
    ASSERT_EQ(notices.size(), 1u);
    EXPECT_THAT(notices[0], testing::EndsWith(" is as saved by the run"));
    // What the format itself tells is still found.
    std::ofstream(path / "model.safetensors", std::ios::binary)
        << changed.substr(0, changed.size() - 1);
    EXPECT_THAT(MessageOfLoad(path, again), HasSubstr("model.safetensors: "));
    fs::remove_all(checkpoints_);
  }
}

TEST_F(CheckpointTest, TruncatedMissingAndForeignFilesAreNamed) {
  const Trained saved(config_);
  Trained loaded(config_, 2);
  for (const char* name : {"model.safetensors", "optimizer.safetensors", "state.json"}) {
    const fs::path path = Save(saved, 1);
    const std::string good = ReadFile(path / name);
    for (const size_t size : {size_t{0}, size_t{7}, good.size() / 2, good.size() - 1}) {
      // The last byte of state.json is a line end.
      if (name == std::string("state.json") && size == good.size() - 1) continue;
      std::ofstream(path / name, std::ios::binary) << good.substr(0, size);
      EXPECT_THAT(MessageOfLoad(path, loaded), HasSubstr(name)) << size;
    }
    fs::remove(path / name);
    EXPECT_THAT(MessageOfLoad(path, loaded), HasSubstr("No such file"));
    fs::remove_all(path);
  }
  const fs::path path = Save(saved, 1);
  config_.model.experts = 3;
  Trained smaller(config_);
  EXPECT_THAT(MessageOfLoad(path, smaller), HasSubstr("model.safetensors: tensor "));
  config_.model.experts = 5;
  Trained larger(config_);
  EXPECT_THAT(MessageOfLoad(path, larger), HasSubstr("model.safetensors: "));
  config_.model.experts = 4;
  config_.optimizer.policy = "adamw";
  Trained other_policy(config_);
  EXPECT_THAT(MessageOfLoad(path, other_policy), HasSubstr("optimizer.safetensors: "));
}

TEST_F(CheckpointTest, LatestIsByNumberAndIgnoresWhatIsNotComplete) {
  EXPECT_FALSE(LatestCheckpoint(checkpoints_).has_value());
  for (const char* name : {"step-9", "step-10", "step-11.tmp", "step-x", "notes"}) {
    fs::create_directories(checkpoints_ / name);
  }
  EXPECT_EQ(LatestCheckpoint(checkpoints_), checkpoints_ / "step-10");
}

TEST_F(CheckpointTest, AFullDiskLeavesEarlierCheckpointsAndNothingElse) {
  const Trained trained(config_);
  for (int64_t step = 1; step <= 3; ++step) Save(trained, step);
  const auto before = FilesBelow(checkpoints_);

  int failures = 0;
  for (const rlim_t bytes : {1000, 20'000, 100'000}) {
    const FileSizeLimit limit(bytes);
    try {
      Save(trained, 4, 1);
    } catch (const Error& error) {
      ++failures;
      EXPECT_THAT(error.what(), HasSubstr("cannot write: File too large"));
    }
  }
  EXPECT_EQ(failures, 3);
  EXPECT_EQ(FilesBelow(checkpoints_), before);
}

TEST_F(CheckpointTest, WhatAKillLeftBehindIsRemovedByTheNextSave) {
  fs::create_directories(checkpoints_ / "step-4.tmp");
  std::ofstream(checkpoints_ / "step-4.tmp/model.safetensors") << "half";
  const Trained trained(config_);
  Save(trained, 4);
  Save(trained, 5, 1);
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(checkpoints_)) {
    names.push_back(entry.path().filename());
  }
  EXPECT_EQ(names, std::vector<std::string>{"step-5"});
}

}  // namespace
}  // namespace terrace
