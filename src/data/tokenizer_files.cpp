#include "data/tokenizer_files.h"

#include <nlohmann/json.hpp>
#include <optional>
#include <unordered_map>
#include <utility>

#include "core/error.h"
#include "data/byte_level.h"
#include "data/files.h"
#include "data/quoted.h"

namespace terrace {
namespace {

using nlohmann::json;

json ParseJson(std::string_view text, const std::string& name) {
  try {
    return json::parse(text);
  } catch (const json::parse_error& error) {
    Fail("{}: invalid JSON at byte {}", name, error.byte);
  }
}

// A member that may be missing or null; null then.
const json& Member(const json& object, const char* key) {
  static const json null;
  if (!object.is_object()) return null;
  const auto found = object.find(key);
  return found == object.end() ? null : *found;
}

bool IsOn(const json& object, const char* key, bool fallback) {
  const json& value = Member(object, key);
  return value.is_boolean() ? value.get<bool>() : fallback;
}

std::string TextOf(const json& value) {
  return value.is_string() ? value.get<std::string>() : std::string();
}

// The definition in the making, with what its files refer to by spelling.
struct Builder {
  const std::string& name;
  TokenizerSpec spec;
  std::unordered_map<std::string, int32_t> ids;  // by byte-level spelling

  void AddVocabulary(const json& vocabulary, const std::vector<AddedToken>& added);
  void AddMerge(const std::string& left, const std::string& right);
  int32_t IdOf(const std::string& spelling) const;
};

void Builder::AddVocabulary(const json& vocabulary, const std::vector<AddedToken>& added) {
  if (!vocabulary.is_object()) Fail("{}: the vocabulary is not an object", name);
  std::unordered_map<std::string_view, int32_t> added_ids;
  for (const AddedToken& token : added) added_ids.emplace(token.text, token.id);
  for (const auto& [spelling, value] : vocabulary.items()) {
    const int64_t id = value.is_number_integer() ? value.get<int64_t>() : -1;
    if (id < 0 || id >= Tokenizer::kMaxVocabSize) {
      Fail("{}: token {} has no id in [0, {})", name, Quoted(spelling), Tokenizer::kMaxVocabSize);
    }
    const auto found = added_ids.find(spelling);
    const bool is_added = found != added_ids.end();
    if (is_added && found->second != id) {
      Fail("{}: token {} has the id {} in the vocabulary, but {} in added_tokens", name,
           Quoted(spelling), id, found->second);
    }
    const std::optional<std::string> bytes =
        is_added ? std::optional(spelling) : FromByteLevel(spelling);
    if (!bytes || bytes->empty()) Fail("{}: token {} is not byte-level", name, Quoted(spelling));
    if (std::cmp_greater_equal(id, spec.tokens.size())) {
      spec.tokens.resize(static_cast<size_t>(id) + 1);
    }
    if (!spec.tokens[id].empty()) Fail("{}: two tokens have the id {}", name, id);
    spec.tokens[id] = *bytes;
    ids.emplace(spelling, static_cast<int32_t>(id));
  }
  spec.added = added;
}

int32_t Builder::IdOf(const std::string& spelling) const {
  const auto found = ids.find(spelling);
  if (found == ids.end()) {
    Fail("{}: merge {} needs the token {}, which is not in the vocabulary", name,
         spec.merges.size(), Quoted(spelling));
  }
  return found->second;
}

void Builder::AddMerge(const std::string& left, const std::string& right) {
  spec.merges.push_back({IdOf(left), IdOf(right), IdOf(left + right)});
}

void AddSpelledMerge(Builder& builder, const std::string& merge) {
  const size_t space = merge.find(' ');
  if (space == std::string::npos || merge.find(' ', space + 1) != std::string::npos) {
    Fail("{}: merge {} ({}) is not two tokens", builder.name, builder.spec.merges.size(),
         Quoted(merge));
  }
  builder.AddMerge(merge.substr(0, space), merge.substr(space + 1));
}

std::vector<AddedToken> ReadAddedTokens(const json& list, const std::string& name) {
  std::vector<AddedToken> added;
  if (list.is_null()) return added;
  if (!list.is_array()) Fail("{}: added_tokens is not a list", name);
  for (const json& entry : list) {
    const json& id = Member(entry, "id");
    const std::string text = TextOf(Member(entry, "content"));
    const int64_t value = id.is_number_integer() ? id.get<int64_t>() : -1;
    if (text.empty() || value < 0 || value >= Tokenizer::kMaxVocabSize) {
      Fail("{}: added token {} lacks its content or a valid id", name, added.size());
    }
    for (const char* key : {"single_word", "lstrip", "rstrip"}) {
      if (IsOn(entry, key, false)) {
        Fail("{}: added token {} uses {}, which is not supported", name, Quoted(text), key);
      }
    }
    added.push_back({text, static_cast<int32_t>(value), IsOn(entry, "special", false)});
  }
  return added;
}

void CheckModel(const json& model, const std::string& name) {
  const std::string type = TextOf(Member(model, "type"));
  // Files of early versions do not name the type.
  if (!type.empty() && type != "BPE") {
    Fail("{}: a {} model; only byte-level BPE is supported", name, Quoted(type));
  }
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (!TextOf(Member(model, key)).empty()) Fail("{}: model.{} is not supported", name, key);
  }
  if (IsOn(model, "byte_fallback", false)) {
    Fail("{}: BPE on characters with byte fallback; only byte-level BPE is supported", name);
  }
  const json& dropout = Member(model, "dropout");
  if (dropout.is_number() && dropout.get<double>() != 0) {
    Fail("{}: model.dropout is not supported", name);
  }
}

// Splitting and byte level, in that order of work.
struct PreTokenizer {
  std::vector<std::string> patterns;
  bool byte_level = false;
};

void ReadPreTokenizer(const json& entry, const std::string& name, PreTokenizer& result) {
  const std::string type = TextOf(Member(entry, "type"));
  if (type == "Sequence") {
    const json& parts = Member(entry, "pretokenizers");
    if (!parts.is_array()) Fail("{}: pre_tokenizer.pretokenizers is not a list", name);
    for (const json& part : parts) {
      if (TextOf(Member(part, "type")) == "Sequence") Fail("{}: nested pre-tokenizers", name);
      ReadPreTokenizer(part, name, result);
    }
  } else if (type == "Split" && !result.byte_level) {
    const std::string behavior = TextOf(Member(entry, "behavior"));
    result.patterns.push_back(TextOf(Member(Member(entry, "pattern"), "Regex")));
    if (result.patterns.back().empty() || behavior != "Isolated" || IsOn(entry, "invert", false)) {
      Fail("{}: only a Split by a regular expression, isolated and not inverted, is supported",
           name);
    }
  } else if (type == "ByteLevel" && !result.byte_level) {
    result.byte_level = true;
    if (IsOn(entry, "add_prefix_space", true)) {
      Fail("{}: add_prefix_space would change the text; it is not supported", name);
    }
    if (IsOn(entry, "use_regex", true)) result.patterns.push_back(kGpt2Pattern);
  } else {
    Fail("{}: unsupported pre-tokenizer {}; only ByteLevel, and Split before it, are supported",
         name, Quoted(type));
  }
}

// An error that the parts show only together is reported with the file's name too.
Tokenizer Finish(Builder builder) {
  try {
    return Tokenizer(std::move(builder.spec));
  } catch (const Error& error) {
    Fail("{}: {}", builder.name, error.what());
  }
}

std::string PreTokenizerJson(std::vector<std::string> patterns) {
  // ByteLevel can split by GPT-2's pattern itself.
  const bool use_regex = !patterns.empty() && patterns.back() == kGpt2Pattern;
  if (use_regex) patterns.pop_back();
  const std::string byte_level =
      fmt::format(R"({{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, )"
                  R"("use_regex": {}}})",
                  use_regex);
  if (patterns.empty()) return byte_level;
  std::string text = R"({"type": "Sequence", "pretokenizers": [)";
  for (const std::string& pattern : patterns) {
    text += fmt::format(R"({{"type": "Split", "pattern": {{"Regex": {}}}, "behavior": "Isolated", )"
                        R"("invert": false}}, )",
                        Quoted(pattern));
  }
  return text + byte_level + "]}";
}

}  // namespace

Tokenizer ParseTokenizerJson(std::string_view text, const std::string& name) {
  const json file = ParseJson(text, name);
  const json& model = Member(file, "model");
  if (!model.is_object()) Fail("{}: not a tokenizer.json: it has no model", name);
  CheckModel(model, name);
  if (!Member(file, "normalizer").is_null()) {
    Fail("{}: normalizer {} would change the text; it is not supported", name,
         Quoted(TextOf(Member(Member(file, "normalizer"), "type"))));
  }
  PreTokenizer pre_tokenizer;
  ReadPreTokenizer(Member(file, "pre_tokenizer"), name, pre_tokenizer);
  if (!pre_tokenizer.byte_level) Fail("{}: the pre-tokenizer is not byte-level", name);
  if (TextOf(Member(Member(file, "decoder"), "type")) != "ByteLevel") {
    Fail("{}: the decoder is not ByteLevel", name);
  }

  Builder builder{name, {}, {}};
  builder.AddVocabulary(Member(model, "vocab"),
                        ReadAddedTokens(Member(file, "added_tokens"), name));
  const json& merges = Member(model, "merges");
  if (!merges.is_array()) Fail("{}: model.merges is not a list", name);
  for (const json& merge : merges) {
    if (merge.is_array() && merge.size() == 2) {
      builder.AddMerge(TextOf(merge[0]), TextOf(merge[1]));
    } else {
      AddSpelledMerge(builder, TextOf(merge));
    }
  }
  builder.spec.patterns = pre_tokenizer.patterns;
  builder.spec.ignore_merges = IsOn(model, "ignore_merges", false);
  return Finish(std::move(builder));
}

Tokenizer ParseGpt2Files(std::string_view vocab_json, std::string_view merges,
                         const std::string& name) {
  const json vocabulary = ParseJson(vocab_json, name + "/vocab.json");
  std::vector<AddedToken> added;
  const json& end_of_text = Member(vocabulary, "<|endoftext|>");
  if (end_of_text.is_number_integer()) {
    const int64_t id = end_of_text.get<int64_t>();
    if (id < 0 || id >= Tokenizer::kMaxVocabSize) {
      Fail("{}/vocab.json: <|endoftext|> has no valid id", name);
    }
    added.push_back({"<|endoftext|>", static_cast<int32_t>(id), true});
  }
  Builder builder{name, {}, {}};
  builder.AddVocabulary(vocabulary, added);
  builder.spec.patterns = {kGpt2Pattern};
  for (size_t begin = 0; begin < merges.size();) {
    const size_t end = std::min(merges.find('\n', begin), merges.size());
    std::string line(merges.substr(begin, end - begin));
    if (line.ends_with('\r')) line.pop_back();
    const bool is_header = begin == 0 && line.starts_with("#version");
    if (!line.empty() && !is_header) AddSpelledMerge(builder, line);
    begin = end + 1;
  }
  return Finish(std::move(builder));
}

Tokenizer LoadTokenizer(const std::string& name) {
  if (name == "bytes") return Tokenizer::Bytes();
  const std::filesystem::path path = name;
  const auto read_json = [](const std::filesystem::path& file) {
    const std::string text = ReadWhole(file);
    if (text.empty()) Fail("{} is empty", file.string());
    return ParseTokenizerJson(text, file.string());
  };
  std::error_code ignored;
  if (!std::filesystem::is_directory(path, ignored)) return read_json(path);
  if (std::filesystem::exists(path / "tokenizer.json", ignored)) {
    return read_json(path / "tokenizer.json");
  }
  if (!std::filesystem::exists(path / "vocab.json", ignored) ||
      !std::filesystem::exists(path / "merges.txt", ignored)) {
    Fail("{} holds neither tokenizer.json nor vocab.json and merges.txt", name);
  }
  const std::string vocabulary = ReadWhole(path / "vocab.json");
  const std::string merges = ReadWhole(path / "merges.txt");
  return ParseGpt2Files(vocabulary, merges, name);
}

std::string ToTokenizerJson(const Tokenizer& tokenizer) {
  const TokenizerSpec& spec = tokenizer.spec();
  std::vector<std::string> spellings;
  spellings.reserve(spec.tokens.size());
  for (const std::string& token : spec.tokens) spellings.push_back(ToByteLevel(token));
  for (const AddedToken& token : spec.added) spellings[token.id] = token.text;

  std::string text = "{\n  \"version\": \"1.0\",\n  \"truncation\": null,\n  \"padding\": null,\n";
  text += "  \"added_tokens\": [";
  const char* separator = "\n";
  for (const AddedToken& token : spec.added) {
    text +=
        fmt::format(R"({}    {{"id": {}, "content": {}, "single_word": false, "lstrip": false, )"
                    R"("rstrip": false, "normalized": false, "special": {}}})",
                    separator, token.id, Quoted(token.text), token.special);
    separator = ",\n";
  }
  text += "\n  ],\n  \"normalizer\": null,\n";
  text += fmt::format("  \"pre_tokenizer\": {},\n", PreTokenizerJson(spec.patterns));
  text += "  \"post_processor\": null,\n";
  text +=
      "  \"decoder\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false, "
      "\"trim_offsets\": true, \"use_regex\": true},\n";
  text +=
      "  \"model\": {\n    \"type\": \"BPE\",\n    \"dropout\": null,\n"
      "    \"unk_token\": null,\n    \"continuing_subword_prefix\": null,\n"
      "    \"end_of_word_suffix\": null,\n    \"fuse_unk\": false,\n"
      "    \"byte_fallback\": false,\n";
  text += fmt::format("    \"ignore_merges\": {},\n    \"vocab\": {{", spec.ignore_merges);
  separator = "\n";
  for (size_t id = 0; id < spellings.size(); ++id) {
    if (spec.tokens[id].empty()) continue;
    text += fmt::format("{}      {}: {}", separator, Quoted(spellings[id]), id);
    separator = ",\n";
  }
  text += "\n    },\n    \"merges\": [";
  separator = "\n";
  for (const auto& merge : spec.merges) {
    text += fmt::format("{}      {}", separator,
                        Quoted(spellings[merge.left] + " " + spellings[merge.right]));
    separator = ",\n";
  }
  text += "\n    ]\n  }\n}\n";
  return text;
}

}  // namespace terrace
