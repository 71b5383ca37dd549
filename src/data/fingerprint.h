// What tells one content from another, wherever it lies and whatever its files are called.
#pragma once

#include <cstdint>
#include <optional>

#include "data/dataset.h"
#include "data/tokenizer.h"

namespace terrace {

struct Fingerprint {
  int64_t size = 0;  // tokens of a dataset, ids of a vocabulary
  uint64_t hash = 0;
  bool operator==(const Fingerprint&) const = default;
};

struct DataSample {
  Fingerprint fingerprint;
  int32_t largest_id = 0;  // of the tokens that were looked at
};

// The fingerprint of a dataset is of the number of tokens in each file, of the checksums that
// shards carry, and of 256 stretches of 32,768 tokens from all over it: a dataset of up to 8.4
// million tokens is looked at whole, and a larger one costs no more. What it can miss in a larger
// one: damage between the stretches of a shard (`terrace data check` finds it), and other tokens
// there in a file of the same size without a checksum (llm.c, nanoGPT). Throws Error as
// Dataset::Read.
DataSample SampleOf(const Dataset& dataset);

// Of what each id stands for. Two tokenizers that agree in that may still split text differently.
Fingerprint FingerprintOf(const Tokenizer& tokenizer);

// Whether every id of `base` stands for the same bytes in `tokenizer`, which may know more.
bool Extends(const Tokenizer& tokenizer, const Tokenizer& base);

// What a run is trained and validated on; empty where it is not known.
struct DataIdentity {
  std::optional<Fingerprint> train;
  std::optional<Fingerprint> val;
  std::optional<Fingerprint> vocabulary;
};

}  // namespace terrace
