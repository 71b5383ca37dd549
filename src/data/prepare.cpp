#include "data/prepare.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <numbers>
#include <optional>
#include <utility>
#include <vector>

#include "core/counted.h"
#include "core/error.h"
#include "core/parallel.h"
#include "data/bpe_trainer.h"
#include "data/dataset.h"
#include "data/files.h"
#include "data/token_file.h"
#include "data/tokenizer_files.h"

namespace terrace {
namespace {

constexpr int64_t kMinPieceBytes = 256;
// Pieces are encoded in blocks of this many bytes, one a thread, and written after each batch.
constexpr int64_t kBlockBytes = int64_t{64} << 10;
constexpr int64_t kPiecesHashedTogether = 16;
// Text is cut into parts of this size when its words are counted.
constexpr int64_t kCountedBytes = int64_t{64} << 10;

// Of the whole piece: documents that only begin alike (a licence, a template) go their own ways.
Split SplitOf(std::string_view piece, double val_fraction) {
  const double place = static_cast<double>(HashOf(piece) >> 11) * 0x1p-53;  // in [0, 1)
  return place < val_fraction ? Split::kVal : Split::kTrain;
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

// Splits and encodes pieces over all threads and writes them in order.
class PieceWriter {
 public:
  PieceWriter(const Tokenizer& tokenizer, double val_fraction, std::array<SplitWriter, 2>& writers)
      : end_of_text_(tokenizer.end_of_text()), val_fraction_(val_fraction), writers_(writers) {
    for (int64_t thread = 0; thread < MaxThreads(); ++thread) encoders_.emplace_back(tokenizer);
  }

  void Write(std::span<const Piece> pieces) {
    splits_.resize(pieces.size());
    ParallelFor(std::ssize(pieces), kPiecesHashedTogether, [&](int64_t begin, int64_t end) {
      for (size_t i = static_cast<size_t>(begin); std::cmp_less(i, end); ++i) {
        splits_[i] = SplitOf(pieces[i].text, val_fraction_);
      }
    });
    if (!pieces.empty() && unfinished_) {
      if (*unfinished_ != splits_[0]) WriterOf(*unfinished_).Write({&end_of_text_, 1});
    }
    const std::vector<Block> blocks = BlocksOf(pieces);
    if (tokens_.size() < blocks.size()) tokens_.resize(blocks.size());
    ParallelFor(std::ssize(blocks), 1, [&](int64_t begin, int64_t end) {
      TokenEncoder& encoder = encoders_[static_cast<size_t>(ThreadNumber())];
      for (size_t i = static_cast<size_t>(begin); std::cmp_less(i, end); ++i) {
        for (auto& of_split : tokens_[i]) of_split.clear();
        for (size_t piece = blocks[i].begin; piece < blocks[i].end; ++piece) {
          auto& of_split = tokens_[i][static_cast<size_t>(splits_[piece])];
          try {
            encoder.Append(pieces[piece].text, of_split);
          } catch (const Error& error) {
            Fail("{}: in a piece of {}: {}", pieces[piece].file->string(),
                 Counted(pieces[piece].text.size(), "byte"), error.what());
          }
          // What follows the last one is not known yet.
          const bool moves = piece + 1 < pieces.size() && splits_[piece] != splits_[piece + 1];
          if (pieces[piece].ends_document || moves) of_split.push_back(end_of_text_);
        }
      }
    });
    for (size_t i = 0; i < blocks.size(); ++i) {
      for (size_t piece = blocks[i].begin; piece < blocks[i].end; ++piece) {
        WriterOf(splits_[piece]).AddPiece(pieces[piece]);
      }
      for (size_t split = 0; split < writers_.size(); ++split) {
        writers_[split].Write(tokens_[i][split]);
      }
    }
    if (pieces.empty()) return;
    unfinished_.reset();
    if (!pieces.back().ends_document) unfinished_ = splits_.back();
  }

 private:
  // Some pieces, by index.
  struct Block {
    size_t begin;
    size_t end;
  };

  static std::vector<Block> BlocksOf(std::span<const Piece> pieces) {
    std::vector<Block> blocks;
    size_t begin = 0;
    int64_t bytes = 0;
    for (size_t i = 0; i < pieces.size(); ++i) {
      bytes += std::ssize(pieces[i].text);
      if (bytes < kBlockBytes && i + 1 < pieces.size()) continue;
      blocks.push_back({begin, i + 1});
      begin = i + 1;
      bytes = 0;
    }
    return blocks;
  }

  SplitWriter& WriterOf(Split split) { return writers_[static_cast<size_t>(split)]; }

  int32_t end_of_text_;
  double val_fraction_;
  std::vector<TokenEncoder> encoders_;
  std::array<SplitWriter, 2>& writers_;
  std::vector<Split> splits_;                                // of the pieces at hand
  std::vector<std::array<std::vector<int32_t>, 2>> tokens_;  // by block and split
  // Where the last piece went, if its document goes on.
  std::optional<Split> unfinished_;
};

void Report(const ProgressCallback& progress, std::string_view stage,
            const DocumentReader& reader) {
  if (progress) progress({stage, reader.done_bytes(), reader.total_bytes()});
}

CorpusSummary WriteShards(const PrepareOptions& options,
                          const std::vector<std::filesystem::path>& files, int64_t piece_bytes,
                          const Tokenizer& tokenizer, const std::filesystem::path& folder,
                          const ProgressCallback& progress) {
  const auto writer = [&](Split split) {
    return SplitWriter(folder, split, tokenizer.vocab_size(), options.shard_tokens);
  };
  std::array<SplitWriter, 2> writers = {writer(Split::kTrain), writer(Split::kVal)};
  PieceWriter piece_writer(tokenizer, options.val_fraction, writers);
  DocumentReader reader(options.corpus, files, piece_bytes);
  CorpusSummary summary;
  std::vector<Piece> pieces;
  while (reader.Next(pieces)) {
    summary.documents += std::ranges::count_if(pieces, &Piece::ends_document);
    piece_writer.Write(pieces);
    Report(progress, "encoding", reader);
  }
  summary.vocab_size = tokenizer.vocab_size();
  summary.files = std::ssize(files);
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
    Fail("pieces of {} are below the minimum of {}", Counted(options.piece_bytes, "byte"),
         kMinPieceBytes);
  }
  if (options.shard_tokens < 1) Fail("shards of {} tokens", options.shard_tokens);
  if (tokenizer.end_of_text() < 0) Fail("the tokenizer has no end-of-text token");
}

}  // namespace

CorpusSummary PrepareCorpus(const PrepareOptions& options, const Tokenizer& tokenizer,
                            const ProgressCallback& progress) {
  CheckOptions(options, tokenizer);
  const std::vector<std::filesystem::path> files = FindFiles(options.corpus);
  OutputFolder folder(options.output);
  const std::filesystem::path tokens = folder.temporary();
  const bool needs_both = options.val_fraction > 0 && options.val_fraction < 1;
  const bool can_read_again = std::ranges::none_of(options.corpus.inputs, IsPipe);
  CorpusSummary summary;
  for (int64_t piece_bytes = options.piece_bytes;; piece_bytes /= 2) {
    for (const auto& entry : std::filesystem::directory_iterator(tokens)) {
      std::filesystem::remove(entry.path());  // of larger pieces
    }
    summary = WriteShards(options, files, piece_bytes, tokenizer, tokens, progress);
    const SplitSummary& train = summary.train;
    const SplitSummary& val = summary.val;
    if (train.tokens + val.tokens == 0) {
      Fail("{} has no text", options.corpus.inputs.front().string());
    }
    if (!needs_both || (train.tokens > 0 && val.tokens > 0)) break;
    if (piece_bytes / 2 < kMinPieceBytes || !can_read_again) {
      Fail("{} of text in {} are too few: {} would be empty",
           Counted(train.bytes + val.bytes, "byte"), Counted(train.pieces + val.pieces, "piece"),
           train.tokens == 0 ? "train" : "val");
    }
  }
  WriteText(tokens / "tokenizer.json", ToTokenizerJson(tokenizer));
  WriteSummary(summary, tokens / "meta.json");
  folder.Commit();
  return summary;
}

CorpusSummary ReadCorpusSummary(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "meta.json";
  const std::string text = ReadWhole(path);
  try {
    const auto meta = nlohmann::json::parse(text);
    return {meta.at("vocab_size").get<int64_t>(), meta.at("files").get<int64_t>(),
            meta.at("documents").get<int64_t>(),  meta.at("piece_bytes").get<int64_t>(),
            SplitFromJson(meta.at("train")),      SplitFromJson(meta.at("val"))};
  } catch (const nlohmann::json::exception&) {
    Fail("{} is not the description of a prepared corpus", path.string());
  }
}

Tokenizer TrainTokenizer(const CorpusOptions& corpus, int64_t vocab_size,
                         const ProgressCallback& progress) {
  DocumentReader reader(corpus, FindFiles(corpus), kCountedBytes);
  WordCounter counter;
  std::vector<Piece> pieces;
  std::vector<std::string_view> texts;
  while (reader.Next(pieces)) {
    texts.clear();
    for (const Piece& piece : pieces) texts.push_back(piece.text);
    counter.Add(texts);
    Report(progress, "counting words", reader);
  }
  const std::vector<WordCount> words = counter.Sorted();
  if (words.empty()) Fail("{} has no text", corpus.inputs.front().string());
  return TrainBpe(words, vocab_size, progress);
}

}  // namespace terrace
