#include "data/fingerprint.h"

#include <algorithm>
#include <vector>

#include "data/hash.h"

namespace terrace {
namespace {

constexpr int64_t kStretches = 256;
constexpr int64_t kStretchTokens = 32768;

void AddNumber(Hasher& hasher, uint64_t number) {
  hasher.Add({reinterpret_cast<const char*>(&number), sizeof(number)});
}

}  // namespace

DataSample SampleOf(const Dataset& dataset) {
  DataSample sample;
  sample.fingerprint.size = dataset.size();
  Hasher hasher;
  for (const TokenFile& file : dataset.files()) {
    AddNumber(hasher, static_cast<uint64_t>(file.size()));
    AddNumber(hasher, file.checksum());
  }
  std::vector<int32_t> tokens;
  const auto look_at = [&](int64_t first, int64_t count) {
    tokens.assign(static_cast<size_t>(count), 0);
    dataset.Read(first, tokens);
    sample.largest_id = std::max(sample.largest_id, *std::ranges::max_element(tokens));
    AddNumber(hasher, HashOf({reinterpret_cast<const char*>(tokens.data()),
                              tokens.size() * sizeof(int32_t)}));
  };
  const int64_t size = dataset.size();
  if (size <= kStretches * kStretchTokens) {
    for (int64_t first = 0; first < size; first += kStretchTokens) {
      look_at(first, std::min(kStretchTokens, size - first));
    }
  } else {
    for (int64_t i = 0; i < kStretches; ++i) {
      look_at((size - kStretchTokens) / (kStretches - 1) * i, kStretchTokens);
    }
    look_at(size - kStretchTokens, kStretchTokens);
  }
  sample.fingerprint.hash = hasher.value();
  return sample;
}

Fingerprint FingerprintOf(const Tokenizer& tokenizer) {
  Hasher hasher;
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    AddNumber(hasher, tokenizer.Has(id) ? HashOf(tokenizer.BytesOf(id)) : 0);
  }
  return {tokenizer.vocab_size(), hasher.value()};
}

bool Extends(const Tokenizer& tokenizer, const Tokenizer& base) {
  for (int32_t id = 0; id < base.vocab_size(); ++id) {
    if (!base.Has(id)) continue;
    if (!tokenizer.Has(id) || tokenizer.BytesOf(id) != base.BytesOf(id)) return false;
  }
  return true;
}

}  // namespace terrace
