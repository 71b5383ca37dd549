#include "data/prepare.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <numbers>
#include <optional>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/parallel.h"
#include "data/bpe_trainer.h"
#include "data/dataset.h"
#include "data/files.h"
#include "data/pieces.h"
#include "data/token_file.h"
#include "data/tokenizer_files.h"

namespace terrace {
namespace {

constexpr size_t kHashedBytes = 256;
constexpr int64_t kMinPieceBytes = 256;
// Pieces are encoded in blocks of this many bytes, one a thread, and written after each batch.
constexpr int64_t kBlockBytes = int64_t{256} << 10;
constexpr int64_t kBatchBytes = int64_t{32} << 20;
// Text is cut into parts of this size when its words are counted.
constexpr int64_t kCountedBytes = int64_t{64} << 10;
// Texts counted between two reports of progress.
constexpr size_t kCountedParts = 1024;

struct Piece {
  std::string_view text;
  Split split;
  bool ends;  // an end-of-text token follows
};

Split SplitOf(std::string_view piece, double val_fraction) {
  const uint64_t hash = HashOf(piece.substr(0, kHashedBytes));
  const double place = static_cast<double>(hash >> 11) * 0x1p-53;  // in [0, 1)
  return place < val_fraction ? Split::kVal : Split::kTrain;
}

void AppendPieces(std::string_view document, double val_fraction, int64_t piece_bytes,
                  std::vector<Piece>& pieces) {
  const size_t first = pieces.size();
  while (!document.empty()) {
    const size_t size = static_cast<size_t>(FirstPieceBytes(document, piece_bytes));
    const std::string_view text = document.substr(0, size);
    pieces.push_back({text, SplitOf(text, val_fraction), true});
    document.remove_prefix(size);
  }
  for (size_t i = first; i + 1 < pieces.size(); ++i) {
    pieces[i].ends = pieces[i].split != pieces[i + 1].split;
  }
}

// The shards of one split.
class SplitWriter {
 public:
  SplitWriter(std::filesystem::path folder, Split split, int64_t vocab_size, int64_t shard_tokens)
      : folder_(std::move(folder)),
        split_(split),
        vocab_size_(vocab_size),
        shard_tokens_(shard_tokens),
        counts_(static_cast<size_t>(vocab_size)) {}

  void Write(std::span<const int32_t> tokens) {
    for (const int32_t token : tokens) ++counts_[static_cast<size_t>(token)];
    summary_.tokens += static_cast<int64_t>(tokens.size());
    while (!tokens.empty()) {
      if (!shard_) Open();
      const size_t count =
          std::min(tokens.size(), static_cast<size_t>(shard_tokens_ - tokens_in_shard_));
      shard_->Write(tokens.first(count));
      tokens = tokens.subspan(count);
      tokens_in_shard_ += static_cast<int64_t>(count);
      if (tokens_in_shard_ == shard_tokens_) Close();
    }
  }

  void AddPiece(const Piece& piece) {
    ++summary_.pieces;
    summary_.bytes += static_cast<int64_t>(piece.text.size());
  }

  SplitSummary Finish() {
    if (shard_) Close();
    summary_.entropy_nats = UnigramEntropy(counts_);
    return summary_;
  }

 private:
  void Open() {
    shard_.emplace(folder_ / fmt::format("{}-{:05}.bin", NameOf(split_), summary_.shards),
                   vocab_size_);
    tokens_in_shard_ = 0;
    ++summary_.shards;
  }
  void Close() {
    shard_->Close();
    shard_.reset();
  }

  std::filesystem::path folder_;
  Split split_;
  int64_t vocab_size_;
  int64_t shard_tokens_;
  int64_t tokens_in_shard_ = 0;
  std::optional<ShardWriter> shard_;
  std::vector<int64_t> counts_;
  SplitSummary summary_;
};

// Encodes pieces over all threads and writes them in order.
class PieceWriter {
 public:
  PieceWriter(const Tokenizer& tokenizer, std::array<SplitWriter, 2>& writers)
      : end_of_text_(tokenizer.end_of_text()), writers_(writers) {
    for (int64_t thread = 0; thread < MaxThreads(); ++thread) encoders_.emplace_back(tokenizer);
  }

  void Write(std::span<const Piece> pieces) {
    const std::vector<std::span<const Piece>> blocks = BlocksOf(pieces);
    if (tokens_.size() < blocks.size()) tokens_.resize(blocks.size());
    ParallelFor(static_cast<int64_t>(blocks.size()), 1, [&](int64_t begin, int64_t end) {
      TokenEncoder& encoder = encoders_[static_cast<size_t>(ThreadNumber())];
      for (int64_t i = begin; i < end; ++i) {
        auto& tokens = tokens_[static_cast<size_t>(i)];
        for (auto& of_split : tokens) of_split.clear();
        for (const Piece& piece : blocks[static_cast<size_t>(i)]) {
          auto& of_split = tokens[static_cast<size_t>(piece.split)];
          encoder.Append(piece.text, of_split);
          if (piece.ends) of_split.push_back(end_of_text_);
        }
      }
    });
    for (size_t i = 0; i < blocks.size(); ++i) {
      for (const Piece& piece : blocks[i])
        writers_[static_cast<size_t>(piece.split)].AddPiece(piece);
      for (size_t split = 0; split < writers_.size(); ++split) {
        writers_[split].Write(tokens_[i][split]);
      }
    }
  }

 private:
  static std::vector<std::span<const Piece>> BlocksOf(std::span<const Piece> pieces) {
    std::vector<std::span<const Piece>> blocks;
    size_t begin = 0;
    int64_t bytes = 0;
    for (size_t i = 0; i < pieces.size(); ++i) {
      bytes += static_cast<int64_t>(pieces[i].text.size());
      if (bytes < kBlockBytes && i + 1 < pieces.size()) continue;
      blocks.push_back(pieces.subspan(begin, i + 1 - begin));
      begin = i + 1;
      bytes = 0;
    }
    return blocks;
  }

  int32_t end_of_text_;
  std::vector<TokenEncoder> encoders_;
  std::array<SplitWriter, 2>& writers_;
  std::vector<std::array<std::vector<int32_t>, 2>> tokens_;  // by block and split
};

// Reports `done` of the `total` items of what the reader gave since it stood at `before` bytes.
void Report(const ProgressCallback& progress, std::string_view stage, const DocumentReader& reader,
            size_t done, size_t total, int64_t before) {
  if (!progress) return;
  const double share = static_cast<double>(done) / static_cast<double>(total);
  const double read = static_cast<double>(reader.done_bytes() - before);
  progress({stage, before + static_cast<int64_t>(share * read), reader.total_bytes()});
}

CorpusSummary WriteShards(const PrepareOptions& options, int64_t piece_bytes,
                          const Tokenizer& tokenizer, const std::filesystem::path& folder,
                          const ProgressCallback& progress) {
  const auto writer = [&](Split split) {
    return SplitWriter(folder, split, tokenizer.vocab_size(), options.shard_tokens);
  };
  std::array<SplitWriter, 2> writers = {writer(Split::kTrain), writer(Split::kVal)};
  PieceWriter piece_writer(tokenizer, writers);
  DocumentReader reader(options.corpus);
  CorpusSummary summary;
  std::vector<std::string_view> documents;
  std::vector<Piece> pieces;
  int64_t before = 0;
  while (reader.Next(documents)) {
    summary.documents += static_cast<int64_t>(documents.size());
    pieces.clear();
    for (const std::string_view document : documents) {
      AppendPieces(document, options.val_fraction, piece_bytes, pieces);
    }
    // A single document can be far larger than a batch.
    const size_t batch = static_cast<size_t>(std::max<int64_t>(1, kBatchBytes / piece_bytes));
    for (size_t begin = 0; begin < pieces.size(); begin += batch) {
      const size_t end = std::min(begin + batch, pieces.size());
      piece_writer.Write(std::span(pieces).subspan(begin, end - begin));
      Report(progress, "encoding", reader, end, pieces.size(), before);
    }
    before = reader.done_bytes();
  }
  summary.vocab_size = tokenizer.vocab_size();
  summary.files = reader.files();
  summary.piece_bytes = piece_bytes;
  summary.train = writers[static_cast<size_t>(Split::kTrain)].Finish();
  summary.val = writers[static_cast<size_t>(Split::kVal)].Finish();
  return summary;
}

nlohmann::ordered_json ToJson(const SplitSummary& split) {
  return {{"tokens", split.tokens},
          {"bytes", split.bytes},
          {"pieces", split.pieces},
          {"shards", split.shards},
          {"unigram_entropy_nats", split.entropy_nats},
          {"unigram_entropy_bits", split.entropy_nats / std::numbers::ln2}};
}

void WriteText(const std::filesystem::path& path, std::string_view text) {
  OutputFile file(path);
  file.Write(text);
  file.Close();
}

void WriteSummary(const CorpusSummary& summary, const std::filesystem::path& path) {
  const nlohmann::ordered_json meta = {{"format", "terrace-corpus"},
                                       {"version", 1},
                                       {"vocab_size", summary.vocab_size},
                                       {"token_bytes", TokenBytes(summary.vocab_size)},
                                       {"files", summary.files},
                                       {"documents", summary.documents},
                                       {"piece_bytes", summary.piece_bytes},
                                       {"train", ToJson(summary.train)},
                                       {"val", ToJson(summary.val)}};
  WriteText(path, meta.dump(2) + "\n");
}

SplitSummary SplitFromJson(const nlohmann::json& json) {
  return {json.at("tokens").get<int64_t>(), json.at("bytes").get<int64_t>(),
          json.at("pieces").get<int64_t>(), json.at("shards").get<int64_t>(),
          json.at("unigram_entropy_nats").get<double>()};
}

bool IsPipe(const std::filesystem::path& path) {
  std::error_code ignored;
  return std::filesystem::is_other(path, ignored);
}

void CheckOptions(const PrepareOptions& options, const Tokenizer& tokenizer) {
  if (!(options.val_fraction >= 0 && options.val_fraction <= 1)) {
    Fail("the fraction for validation is {}, outside of [0, 1]", options.val_fraction);
  }
  if (options.piece_bytes < kMinPieceBytes) {
    Fail("pieces of {} bytes are below the minimum of {}", options.piece_bytes, kMinPieceBytes);
  }
  if (options.shard_tokens < 1) Fail("shards of {} tokens", options.shard_tokens);
  if (tokenizer.end_of_text() < 0) Fail("the tokenizer has no end-of-text token");
}

}  // namespace

CorpusSummary PrepareCorpus(const PrepareOptions& options, const Tokenizer& tokenizer,
                            const ProgressCallback& progress) {
  CheckOptions(options, tokenizer);
  OutputFolder folder(options.output);
  const std::filesystem::path tokens = folder.temporary();
  const bool needs_both = options.val_fraction > 0 && options.val_fraction < 1;
  const bool can_read_again = std::ranges::none_of(options.corpus.inputs, IsPipe);
  CorpusSummary summary;
  for (int64_t piece_bytes = options.piece_bytes;; piece_bytes /= 2) {
    for (const auto& entry : std::filesystem::directory_iterator(tokens)) {
      std::filesystem::remove(entry.path());  // of larger pieces
    }
    summary = WriteShards(options, piece_bytes, tokenizer, tokens, progress);
    const SplitSummary& train = summary.train;
    const SplitSummary& val = summary.val;
    if (train.tokens + val.tokens == 0) {
      Fail("{} has no text", options.corpus.inputs.front().string());
    }
    if (!needs_both || (train.tokens > 0 && val.tokens > 0)) break;
    if (piece_bytes / 2 < kMinPieceBytes || !can_read_again) {
      Fail("{} bytes of text in {} pieces are too few: {} would be empty", train.bytes + val.bytes,
           train.pieces + val.pieces, train.tokens == 0 ? "train" : "val");
    }
  }
  WriteText(tokens / "tokenizer.json", ToTokenizerJson(tokenizer));
  WriteSummary(summary, tokens / "meta.json");
  folder.Commit();
  return summary;
}

CorpusSummary ReadCorpusSummary(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "meta.json";
  const MappedFile file(path);
  try {
    const auto meta = nlohmann::json::parse(file.bytes());
    return {meta.at("vocab_size").get<int64_t>(), meta.at("files").get<int64_t>(),
            meta.at("documents").get<int64_t>(),  meta.at("piece_bytes").get<int64_t>(),
            SplitFromJson(meta.at("train")),      SplitFromJson(meta.at("val"))};
  } catch (const nlohmann::json::exception&) {
    Fail("{} is not the description of a prepared corpus", path.string());
  }
}

Tokenizer TrainTokenizer(const CorpusOptions& corpus, int64_t vocab_size,
                         const ProgressCallback& progress) {
  DocumentReader reader(corpus);
  WordCounter counter;
  std::vector<std::string_view> documents;
  std::vector<std::string_view> parts;
  int64_t before = 0;
  while (reader.Next(documents)) {
    parts.clear();
    for (std::string_view document : documents) {
      while (!document.empty()) {
        const size_t size = static_cast<size_t>(FirstPieceBytes(document, kCountedBytes));
        parts.push_back(document.substr(0, size));
        document.remove_prefix(size);
      }
    }
    for (size_t begin = 0; begin < parts.size(); begin += kCountedParts) {
      const size_t end = std::min(begin + kCountedParts, parts.size());
      counter.Add(std::span(parts).subspan(begin, end - begin));
      Report(progress, "counting words", reader, end, parts.size(), before);
    }
    before = reader.done_bytes();
  }
  const std::vector<WordCount> words = counter.Sorted();
  if (words.empty()) Fail("{} has no text", corpus.inputs.front().string());
  return TrainBpe(words, vocab_size, progress);
}

}  // namespace terrace
