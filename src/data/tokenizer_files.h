// Tokenizers on disk.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "data/tokenizer.h"

namespace terrace {

// `name` is "bytes" (Tokenizer::Bytes), a Hugging Face tokenizer.json, or a folder that holds
// tokenizer.json or GPT-2's pair of vocab.json and merges.txt. Throws Error naming the file and
// what is wrong with it.
//
// Of tokenizer.json the byte-level BPE family is understood: model "BPE" without dropout, word
// affixes or byte fallback; no normalizer; pre-tokenizer "ByteLevel" (GPT-2's pattern, or none),
// or a sequence of any number of "Split" by a regular expression (split_pattern.h), isolated, and
// that; decoder "ByteLevel".
// Post-processors are ignored: no tokens are added around a text.
Tokenizer LoadTokenizer(const std::string& name);

// The two parsers, on contents; `name` is for errors.
Tokenizer ParseTokenizerJson(std::string_view json, const std::string& name);
Tokenizer ParseGpt2Files(std::string_view vocab_json, std::string_view merges,
                         const std::string& name);

// As tokenizer.json; what ParseTokenizerJson reads back gives the same ids, and so does Hugging
// Face's library.
std::string ToTokenizerJson(const Tokenizer& tokenizer);

}  // namespace terrace
