#include "support/small_run.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/atomic_file.h"
#include "core/rng.h"
#include "data/prepare.h"
#include "train/checkpoint.h"
#include "train/run_folder.h"

namespace terrace {

void PrepareSmallCorpus(const std::filesystem::path& folder) {
  const char* kWords[] = {"the ",   "old ",   "river ", "sings ", "a ",   "stone ",
                          "under ", "light ", "moves ", "slow ",  "and ", "falls.\n"};
  const std::filesystem::path text = folder.string() + ".txt";
  std::ofstream out(text);
  size_t word = 0;
  for (uint64_t i = 0; i < 8000; ++i) {
    out << kWords[word];
    // Each word has two likely successors: there is something to learn.
    word = (word * 5 + 1 + 3 * (RandomBits(1, i) % 2) + (RandomBits(2, i) % 8 == 0 ? 7 : 0)) % 12;
  }
  out.close();
  PrepareOptions options;
  options.corpus.inputs = {text};
  options.output = folder;
  options.val_fraction = 0.1;
  options.piece_bytes = 512;
  PrepareCorpus(options, Tokenizer::Bytes());
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
