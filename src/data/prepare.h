// Turns documents into a folder of token shards for training and validation.
#pragma once

#include <cstdint>
#include <filesystem>

#include "data/documents.h"
#include "data/progress.h"
#include "data/tokenizer.h"

namespace terrace {

// What goes into the split, and how.
//
// A document longer than `piece_bytes` is cut, at the last blank line, else line end, else
// character, in the second half of that size. Each piece (a short document is one) goes to val or
// train by a hash of its bytes: neither the order nor the number of documents matters.
// Pieces of a document that stay together follow each other directly; an end-of-text token ends
// a document, and also a run of pieces whose next one went to the other split.
// Where a small corpus would leave a split empty, piece_bytes is halved, down to 256.
struct PrepareOptions {
  CorpusOptions corpus;
  std::filesystem::path output;  // must not exist, or be an empty folder
  double val_fraction = 0.05;    // 0 or 1: a single split
  int64_t piece_bytes = 16384;
  int64_t shard_tokens = int64_t{1} << 28;
};

struct SplitSummary {
  int64_t tokens = 0;  // with the end-of-text tokens
  int64_t bytes = 0;   // of text
  int64_t pieces = 0;
  int64_t shards = 0;
  double entropy_nats = 0;  // UnigramEntropy of the tokens
};

// As meta.json has it.
struct CorpusSummary {
  int64_t vocab_size = 0;
  int64_t files = 0;
  int64_t documents = 0;
  int64_t piece_bytes = 0;  // as used
  SplitSummary train;
  SplitSummary val;
};

// Writes train-*.bin and val-*.bin (token_file.h), tokenizer.json and meta.json. The folder appears
// complete or not at all; its bytes do not depend on the number of threads. Special tokens spelled
// in the text are ordinary text. Throws Error when the output exists, an input cannot be read, the
// tokenizer has no end-of-text token, or there is too little text for both splits.
CorpusSummary PrepareCorpus(const PrepareOptions& options, const Tokenizer& tokenizer,
                            const ProgressCallback& progress = {});

// Reads meta.json of such a folder. Throws Error when it is missing or damaged.
CorpusSummary ReadCorpusSummary(const std::filesystem::path& folder);

// Trains a tokenizer on documents: TrainBpe on the words of all of them.
Tokenizer TrainTokenizer(const CorpusOptions& corpus, int64_t vocab_size,
                         const ProgressCallback& progress = {});

}  // namespace terrace
