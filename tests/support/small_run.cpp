#include "support/small_run.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/atomic_file.h"
#include "core/rng.h"
#include "data/hash.h"
#include "data/pieces.h"
#include "data/token_file.h"
#include "data/tokenizer_files.h"
#include "train/checkpoint.h"
#include "train/run_folder.h"

namespace terrace {

namespace {

// Pieces of `text` as tokens of both splits. The split is a rule of its own, so that losses that
// were committed do not depend on how `terrace data prepare` chooses.
void WriteSmallCorpus(const std::filesystem::path& folder, std::string_view text) {
  const Tokenizer tokenizer = Tokenizer::Bytes();
  const auto is_val = [](std::string_view piece) {
    return static_cast<double>(HashOf(piece.substr(0, 256)) >> 11) * 0x1p-53 < 0.1;
  };
  std::filesystem::create_directories(folder);
  ShardWriter train(folder / "train-00000.bin", tokenizer.vocab_size());
  ShardWriter val(folder / "val-00000.bin", tokenizer.vocab_size());
  const auto first_piece = [](std::string_view rest) {
    return rest.substr(0, static_cast<size_t>(FirstPieceBytes(rest, 512)));
  };
  while (!text.empty()) {
    const std::string_view piece = first_piece(text);
    text.remove_prefix(piece.size());
    std::vector<int32_t> tokens = tokenizer.Encode(piece);
    if (text.empty() || is_val(piece) != is_val(first_piece(text))) {
      tokens.push_back(tokenizer.end_of_text());
    }
    (is_val(piece) ? val : train).Write(tokens);
  }
  train.Close();
  val.Close();
  WriteNewFile(folder / "tokenizer.json", ToTokenizerJson(tokenizer));
}

}  // namespace

void PrepareSmallCorpus(const std::filesystem::path& folder) {
  const char* kWords[] = {"the ",   "old ",   "river ", "sings ", "a ",   "stone ",
                          "under ", "light ", "moves ", "slow ",  "and ", "falls.\n"};
  std::string text;
  size_t word = 0;
  for (uint64_t i = 0; i < 8000; ++i) {
    text += kWords[word];
    // Each word has two likely successors: there is something to learn.
    word = (word * 5 + 1 + 3 * (RandomBits(1, i) % 2) + (RandomBits(2, i) % 8 == 0 ? 7 : 0)) % 12;
  }
  WriteSmallCorpus(folder, text);
}

RunConfig SmallRun(const std::filesystem::path& corpus) {
  RunConfig config;
  ModelConfig& model = config.model;
  model.vocab_size = 257;
  model.max_positions = 32;
  model.width = 32;
  model.layers = 2;
  model.heads = 4;
  model.kv_heads = 2;
  model.ffn_width = 32;
  model.ffn = {FeedForwardKind::kDense, FeedForwardKind::kMoe};
  model.experts = 4;
  model.router.top_k = 2;
  model.router.aux_coefficient = 0.05f;
  model.router.z_coefficient = 1e-4f;
  model.router.noise_scale = 0.5f;
  config.data.folder = corpus.string();
  TrainingConfig& training = config.training;
  training.steps = 20;
  training.micro_batch_size = 4;
  training.sequence_length = 16;
  training.gradient_accumulation_steps = 2;
  training.eval_interval = 10;
  training.eval_batches = 2;
  training.checkpoint_interval = 10;
  config.optimizer.learning_rate = 3e-3f;
  return config;
}

std::vector<std::pair<std::string, std::string>> RepeatableParts(const std::filesystem::path& run) {
  std::vector<std::pair<std::string, std::string>> parts;
  const RunFolder folder{run};
  const auto latest = LatestCheckpoint(folder.checkpoints());
  if (latest) {
    for (const auto& entry : std::filesystem::directory_iterator(*latest)) {
      if (entry.path().filename() == "config.toml") continue;  // steps may differ
      parts.emplace_back(latest->filename() / entry.path().filename(), ReadFile(entry.path()));
    }
  }
  std::sort(parts.begin(), parts.end());
  std::istringstream lines(ReadFile(folder.metrics()));
  for (std::string line; std::getline(lines, line);) {
    nlohmann::json json = nlohmann::json::parse(line);
    for (const char* key : {"seconds", "tokens_per_second", "flops_per_second", "mfu",
                            "resident_bytes", "resident_peak_bytes"}) {
      json.erase(key);
    }
    parts.emplace_back("metrics.jsonl", json.dump());
  }
  return parts;
}

std::vector<double> MetricOf(const std::filesystem::path& metrics, const std::string& key) {
  std::vector<double> values;
  std::istringstream lines(ReadFile(metrics));
  for (std::string line; std::getline(lines, line);) {
    values.push_back(nlohmann::json::parse(line).at(key).get<double>());
  }
  return values;
}

}  // namespace terrace
