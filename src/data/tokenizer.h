// Byte-level byte pair encoding (Sennrich et al. 2016; on bytes: Radford et al. 2019).
//
// Text is any bytes. It is split into words; each word starts as one token a byte, and the
// neighbouring pair that comes first in the list of merges is merged until none is left, the
// leftmost first among equals. Encoding and then decoding gives back the same bytes.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "data/pair_table.h"
#include "data/word_splitter.h"

namespace terrace {

// A token matched as a whole before the text is split. Special ones (such as end-of-text) carry
// meaning beyond their spelling.
struct AddedToken {
  std::string text;
  int32_t id;
  bool special;
};

// All that defines a tokenizer.
struct TokenizerSpec {
  struct Merge {
    int32_t left;
    int32_t right;
    int32_t result;
  };

  std::vector<std::string> tokens;  // bytes of each id; empty where there is no such token
  std::vector<Merge> merges;        // the earlier the stronger
  std::vector<AddedToken> added;
  std::vector<std::string> patterns;  // of WordSplitter
  bool ignore_merges = false;         // a word that is a token is taken whole, whatever the merges
};

// What the spelling of a special token in the text becomes. Other added tokens are always
// recognised. Either way an added token comes from its spelling as a whole, found before the text
// is split: neither merges nor whole words make one that is special.
enum class SpecialTokens : uint8_t {
  kAsText,    // ordinary tokens: text cannot forge a special token
  kAsTokens,  // the special token, as Hugging Face's tokenizers do
};

// Immutable, cheap to copy, safe to share between threads.
class Tokenizer {
 public:
  // Ids above this are refused, so that a damaged file cannot ask for absurd memory.
  static constexpr int64_t kMaxVocabSize = int64_t{1} << 22;

  // Throws Error when the parts contradict each other, or a byte has no token but special ones.
  explicit Tokenizer(TokenizerSpec spec);

  // One token a byte, its value; <|endoftext|> is 256.
  static Tokenizer Bytes();

  // The largest id plus one. Ids in between may be unused.
  int64_t vocab_size() const;
  // The token that ends a document, or -1: the first that exists of <|endoftext|>,
  // <|end_of_text|>, </s>, <eos>.
  int32_t end_of_text() const;

  // Whether there is a token of this id.
  bool Has(int32_t id) const;

  // For text of some length or for many calls, a TokenEncoder is faster.
  std::vector<int32_t> Encode(std::string_view text,
                              SpecialTokens special = SpecialTokens::kAsText) const;
  // Throws Error naming the id and its position when there is no such token.
  std::string Decode(std::span<const int32_t> ids) const;
  // The bytes of one token, possibly a part of a character; throws Error when there is none.
  std::string_view BytesOf(int32_t id) const;

  const TokenizerSpec& spec() const;

 private:
  friend class TokenEncoder;
  struct Tables;
  std::shared_ptr<const Tables> tables_;
};

// Encodes for one thread; keeps scratch and a cache of words (2 MiB) from call to call. Results
// do not depend on what was encoded before.
class TokenEncoder {
 public:
  explicit TokenEncoder(Tokenizer tokenizer);

  // Appends the tokens of `text` to `ids`. Time is O(n log n) even for a single long word. Throws
  // Error, as WordIterator does, when the splitting pattern needs too many resources.
  void Append(std::string_view text, std::vector<int32_t>& ids,
              SpecialTokens special = SpecialTokens::kAsText);

 private:
  // A word of up to kBytes bytes and its tokens; one cache line.
  struct alignas(64) CachedWord {
    static constexpr size_t kBytes = 23;
    static constexpr size_t kTokens = 9;
    uint64_t key[3] = {};  // the bytes, then the length
    int32_t count = 0;
    int32_t tokens[kTokens];
  };
  struct Symbol {
    int32_t id;  // -1 once merged into its left neighbour
    uint32_t previous;
    uint32_t next;
  };

  void AppendText(std::string_view text, size_t offset, std::vector<int32_t>& ids);
  void AppendWord(std::string_view word, std::vector<int32_t>& ids);
  void MergeWord(std::string_view word, std::vector<int32_t>& ids);
  void PushPair(uint32_t left, uint32_t right);

  Tokenizer tokenizer_;
  WordIterator words_;
  std::vector<CachedWord> cache_;  // direct-mapped
  std::vector<Symbol> symbols_;
  std::vector<uint64_t> candidates_;  // heap of (rank, position of the left symbol)
};

}  // namespace terrace
