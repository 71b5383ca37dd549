#include "data/tokenizer.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <utility>

#include "core/error.h"
#include "data/quoted.h"

namespace terrace {
namespace {

constexpr uint64_t kCacheWords = uint64_t{1} << 15;
// Positions within a word are 32-bit; longer words are cut.
constexpr size_t kMaxWordBytes = size_t{1} << 30;
constexpr uint32_t kNone = UINT32_MAX;

constexpr std::array<std::string_view, 4> kEndOfTextNames = {"<|endoftext|>", "<|end_of_text|>",
                                                             "</s>", "<eos>"};

}  // namespace

struct Tokenizer::Tables {
  explicit Tables(TokenizerSpec definition)
      : spec(std::move(definition)), splitter(spec.patterns) {}

  TokenizerSpec spec;
  WordSplitter splitter;
  std::vector<bool> is_special;  // by id
  std::array<int32_t, 256> token_of_byte{};
  PairTable merges;
  std::unordered_map<std::string_view, int32_t> whole_words;  // filled for ignore_merges only
  // Added tokens by first byte, the longest first.
  std::array<std::vector<const AddedToken*>, 256> added;
  int32_t end_of_text = -1;

  void AddTokens();
  void IndexBytes();
  void IndexMerges();
  void FindEndOfText();
  const AddedToken* AddedTokenAt(std::string_view text, SpecialTokens special) const;
};

void Tokenizer::Tables::AddTokens() {
  for (const AddedToken& token : spec.added) {
    if (token.text.empty()) Fail("added token {} is empty", token.id);
    if (token.id < 0 || token.id >= kMaxVocabSize) {
      Fail("added token {} has the id {}, outside of [0, {})", Quoted(token.text), token.id,
           kMaxVocabSize);
    }
    const size_t id = static_cast<size_t>(token.id);
    if (id >= spec.tokens.size()) spec.tokens.resize(id + 1);
    if (!spec.tokens[id].empty() && spec.tokens[id] != token.text) {
      Fail("added token {} has the id {} of another token", Quoted(token.text), token.id);
    }
    spec.tokens[id] = token.text;
    added[static_cast<unsigned char>(token.text[0])].push_back(&token);
  }
  for (auto& candidates : added) {
    std::stable_sort(
        candidates.begin(), candidates.end(),
        [](const AddedToken* a, const AddedToken* b) { return a->text.size() > b->text.size(); });
  }
  if (std::cmp_greater(spec.tokens.size(), kMaxVocabSize)) {
    Fail("a vocabulary of {} tokens is above the limit of {}", spec.tokens.size(), kMaxVocabSize);
  }
  is_special.resize(spec.tokens.size());
  for (const AddedToken& token : spec.added) {
    if (token.special) is_special[static_cast<size_t>(token.id)] = true;
  }
}

void Tokenizer::Tables::IndexBytes() {
  token_of_byte.fill(-1);
  for (size_t id = 0; id < spec.tokens.size(); ++id) {
    const std::string& token = spec.tokens[id];
    if (is_special[id]) continue;
    if (spec.ignore_merges && !token.empty()) whole_words.emplace(token, static_cast<int32_t>(id));
    if (token.size() != 1) continue;
    int32_t& entry = token_of_byte[static_cast<unsigned char>(token[0])];
    if (entry < 0) entry = static_cast<int32_t>(id);
  }
  for (int byte = 0; byte < 256; ++byte) {
    if (token_of_byte[byte] < 0) Fail("the vocabulary has no token for the byte {:#04x}", byte);
  }
}

void Tokenizer::Tables::IndexMerges() {
  const auto exists = [&](int32_t id) {
    return id >= 0 && std::cmp_less(id, spec.tokens.size()) && !spec.tokens[id].empty();
  };
  merges = PairTable(static_cast<int64_t>(spec.merges.size()));
  for (size_t rank = 0; rank < spec.merges.size(); ++rank) {
    const auto [left, right, result] = spec.merges[rank];
    if (!exists(left) || !exists(right) || !exists(result)) {
      Fail("merge {} names a token that does not exist", rank);
    }
    if (spec.tokens[left] + spec.tokens[right] != spec.tokens[result]) {
      Fail("merge {} gives a token that is not its parts together", rank);
    }
    // Text that spells a special token is ordinary text: it goes no further than the parts.
    if (is_special[static_cast<size_t>(result)]) continue;
    if (!merges.Insert(left, right, {static_cast<int32_t>(rank), result})) {
      Fail("merge {} is there twice", rank);
    }
  }
}

void Tokenizer::Tables::FindEndOfText() {
  for (const std::string_view name : kEndOfTextNames) {
    for (const AddedToken& token : spec.added) {
      if (token.text == name && end_of_text < 0) end_of_text = token.id;
    }
  }
}

const AddedToken* Tokenizer::Tables::AddedTokenAt(std::string_view text,
                                                  SpecialTokens special) const {
  for (const AddedToken* token : added[static_cast<unsigned char>(text[0])]) {
    const bool is_special_token = is_special[static_cast<size_t>(token->id)];
    if (is_special_token && special == SpecialTokens::kAsText) continue;
    if (text.starts_with(token->text)) return token;
  }
  return nullptr;
}

Tokenizer::Tokenizer(TokenizerSpec spec) {
  const auto tables = std::make_shared<Tables>(std::move(spec));
  tables->AddTokens();
  tables->IndexBytes();
  tables->IndexMerges();
  tables->FindEndOfText();
  tables_ = tables;
}

Tokenizer Tokenizer::Bytes() {
  TokenizerSpec spec;
  for (int byte = 0; byte < 256; ++byte) spec.tokens.emplace_back(1, static_cast<char>(byte));
  spec.added = {{std::string(kEndOfTextNames[0]), 256, true}};
  return Tokenizer(std::move(spec));
}

int64_t Tokenizer::vocab_size() const { return static_cast<int64_t>(spec().tokens.size()); }

bool Tokenizer::Has(int32_t id) const {
  return id >= 0 && id < vocab_size() && !spec().tokens[static_cast<size_t>(id)].empty();
}

int32_t Tokenizer::end_of_text() const { return tables_->end_of_text; }

const TokenizerSpec& Tokenizer::spec() const { return tables_->spec; }

std::vector<int32_t> Tokenizer::Encode(std::string_view text, SpecialTokens special) const {
  std::vector<int32_t> ids;
  TokenEncoder(*this).Append(text, ids, special);
  return ids;
}

std::string Tokenizer::Decode(std::span<const int32_t> ids) const {
  std::string text;
  for (size_t i = 0; i < ids.size(); ++i) {
    const int32_t id = ids[i];
    if (!Has(id)) {
      Fail("no token has the id {} (at position {}; the vocabulary has {})", id, i, vocab_size());
    }
    text += spec().tokens[id];
  }
  return text;
}

std::string_view Tokenizer::BytesOf(int32_t id) const {
  if (!Has(id)) {
    Fail("no token has the id {} (the vocabulary has {})", id, vocab_size());
  }
  return spec().tokens[id];
}

TokenEncoder::TokenEncoder(Tokenizer tokenizer)
    : tokenizer_(std::move(tokenizer)), words_(tokenizer_.tables_->splitter) {}

void TokenEncoder::Append(std::string_view text, std::vector<int32_t>& ids, SpecialTokens special) {
  const Tokenizer::Tables& tables = *tokenizer_.tables_;
  const bool plain = std::ranges::all_of(tables.spec.added, [&](const AddedToken& token) {
    return token.special && special == SpecialTokens::kAsText;
  });
  if (plain) return AppendText(text, 0, ids);
  size_t begin = 0;
  for (size_t i = 0; i < text.size();) {
    const AddedToken* token = tables.AddedTokenAt(text.substr(i), special);
    if (token == nullptr) {
      ++i;
      continue;
    }
    AppendText(text.substr(begin, i - begin), begin, ids);
    ids.push_back(token->id);
    i += token->text.size();
    begin = i;
  }
  AppendText(text.substr(begin), begin, ids);
}

void TokenEncoder::AppendText(std::string_view text, size_t offset, std::vector<int32_t>& ids) {
  const Tokenizer::Tables& tables = *tokenizer_.tables_;
  if (tables.spec.merges.empty() && !tables.spec.ignore_merges) {
    for (const char byte : text) {
      ids.push_back(tables.token_of_byte[static_cast<unsigned char>(byte)]);
    }
    return;
  }
  words_.Start(text, offset);
  std::string_view word;
  while (words_.Next(word)) {
    for (; word.size() > kMaxWordBytes; word.remove_prefix(kMaxWordBytes)) {
      AppendWord(word.substr(0, kMaxWordBytes), ids);
    }
    AppendWord(word, ids);
  }
}

void TokenEncoder::AppendWord(std::string_view word, std::vector<int32_t>& ids) {
  if (word.size() > CachedWord::kBytes) return MergeWord(word, ids);
  if (cache_.empty()) cache_.resize(kCacheWords);
  uint64_t key[3] = {};
  std::memcpy(key, word.data(), word.size());
  key[2] |= static_cast<uint64_t>(word.size()) << 56;
  const uint64_t hash = Mix(key[0] ^ Mix(key[1] ^ Mix(key[2])));
  CachedWord& cached = cache_[hash % kCacheWords];
  if (!std::equal(std::begin(key), std::end(key), std::begin(cached.key))) {
    const size_t first = ids.size();
    MergeWord(word, ids);
    const size_t count = ids.size() - first;
    if (count > CachedWord::kTokens) return;
    std::copy(std::begin(key), std::end(key), std::begin(cached.key));
    cached.count = static_cast<int32_t>(count);
    std::copy(ids.end() - static_cast<int64_t>(count), ids.end(), std::begin(cached.tokens));
    return;
  }
  ids.insert(ids.end(), cached.tokens, cached.tokens + cached.count);
}

void TokenEncoder::PushPair(uint32_t left, uint32_t right) {
  const auto merge = tokenizer_.tables_->merges.Find(symbols_[left].id, symbols_[right].id);
  if (merge.rank < 0) return;
  candidates_.push_back(static_cast<uint64_t>(merge.rank) << 32 | left);
}

void TokenEncoder::MergeWord(std::string_view word, std::vector<int32_t>& ids) {
  const Tokenizer::Tables& tables = *tokenizer_.tables_;
  if (tables.spec.ignore_merges) {
    const auto whole = tables.whole_words.find(word);
    if (whole != tables.whole_words.end()) {
      ids.push_back(whole->second);
      return;
    }
  }
  const uint32_t size = static_cast<uint32_t>(word.size());
  symbols_.resize(size);
  candidates_.clear();
  for (uint32_t i = 0; i < size; ++i) {
    symbols_[i] = {tables.token_of_byte[static_cast<unsigned char>(word[i])], i - 1, i + 1};
  }
  symbols_[0].previous = kNone;
  symbols_[size - 1].next = kNone;
  for (uint32_t i = 0; i + 1 < size; ++i) PushPair(i, i + 1);
  std::make_heap(candidates_.begin(), candidates_.end(), std::greater<>());

  while (!candidates_.empty()) {
    std::pop_heap(candidates_.begin(), candidates_.end(), std::greater<>());
    const uint32_t position = static_cast<uint32_t>(candidates_.back());
    const int32_t rank = static_cast<int32_t>(candidates_.back() >> 32);
    candidates_.pop_back();
    Symbol& left = symbols_[position];
    if (left.id < 0 || left.next == kNone) continue;
    Symbol& right = symbols_[left.next];
    const auto merge = tables.merges.Find(left.id, right.id);
    if (merge.rank != rank) continue;  // one of the two has changed since
    left.id = merge.result;
    right.id = -1;
    left.next = right.next;
    const auto push = [&](uint32_t first, uint32_t second) {
      const size_t before = candidates_.size();
      PushPair(first, second);
      if (candidates_.size() > before) {
        std::push_heap(candidates_.begin(), candidates_.end(), std::greater<>());
      }
    };
    if (left.next != kNone) {
      symbols_[left.next].previous = position;
      push(position, left.next);
    }
    if (left.previous != kNone) push(left.previous, position);
  }
  for (uint32_t i = 0; i != kNone; i = symbols_[i].next) ids.push_back(symbols_[i].id);
  // A single enormous word should not hold its memory for ever.
  if (size > 1 << 20) {
    symbols_ = {};
    candidates_ = {};
  }
}

}  // namespace terrace
