#include "train/run_data.h"

#include <utility>

#include "core/counted.h"
#include "core/error.h"
#include "data/tokenizer_files.h"
#include "train/checkpoint.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;

// The tokenizer that `terrace data prepare` leaves with its shards; `data` may be one of these.
std::optional<fs::path> TokenizerBeside(const fs::path& data) {
  const fs::path folder = fs::is_directory(data) ? data : data.parent_path();
  fs::path path = folder / "tokenizer.json";
  if (!fs::exists(path)) return {};
  return path;
}

// What a configuration names may be gone when a run is resumed that keeps its own.
std::optional<Tokenizer> NamedTokenizer(const RunConfig& config, bool may_be_gone) {
  const std::string& name = config.data.tokenizer;
  if (may_be_gone && !name.empty() && name != "bytes" && !fs::exists(name)) return {};
  return TokenizerOf(config);
}

void CheckIds(const Tokenizer& tokenizer, const Dataset& dataset, const DataSample& sample) {
  for (const TokenFile& file : dataset.files()) {
    if (file.vocab_size() > tokenizer.vocab_size()) {
      Fail("the tokenizer has {}, fewer than the {} that {} was made for",
           Counted(tokenizer.vocab_size(), "token"), file.vocab_size(), file.path().string());
    }
  }
  if (sample.largest_id >= tokenizer.vocab_size()) {
    Fail("the tokenizer has {}, and {} has the id {}", Counted(tokenizer.vocab_size(), "token"),
         dataset.path().string(), sample.largest_id);
  }
}

void CheckSame(const std::optional<Fingerprint>& then, const std::optional<Fingerprint>& now,
               std::string_view what) {
  if (!then || !now || *then == *now) return;
  const std::string sizes =
      then->size == now->size
          ? fmt::format("as many tokens, {}, but others", now->size)
          : fmt::format("{}, the run has {}", Counted(now->size, "token"), then->size);
  Fail("cannot resume: {} differ from those of the run ({})", what, sizes);
}

}  // namespace

RunData OpenRunData(const RunConfig& config, const std::optional<Tokenizer>& own_tokenizer) {
  const std::string& folder = config.data.folder;
  if (!fs::exists(folder)) {
    Fail("data.folder = {}: there is no such folder; {}", folder,
         own_tokenizer ? "if it was moved, --set data.folder=FOLDER says where to"
                       : "`terrace data prepare` makes one");
  }
  if (!fs::is_directory(folder)) {
    Fail(
        "data.folder = {}: is a file; a folder with files for train and for val is needed, since "
        "a run cannot be validated on what it is trained on",
        folder);
  }
  RunData data{.train = Dataset(folder, Split::kTrain, config.model.vocab_size),
               .val = {},
               .tokenizer = NamedTokenizer(config, own_tokenizer.has_value()),
               .identity = {}};
  if (own_tokenizer) {
    if (data.tokenizer && !Extends(*own_tokenizer, *data.tokenizer)) {
      Fail(
          "cannot resume: the tokenizer of the data differs from the run's own ({}, the run has "
          "{})",
          Counted(data.tokenizer->vocab_size(), "token"), own_tokenizer->vocab_size());
    }
    data.tokenizer = own_tokenizer;
  }
  const DataSample train = SampleOf(data.train);
  data.identity.train = train.fingerprint;
  if (data.tokenizer) CheckIds(*data.tokenizer, data.train, train);
  if (config.training.eval_interval > 0) {
    data.val.emplace(folder, Split::kVal, config.model.vocab_size);
    const DataSample val = SampleOf(*data.val);
    data.identity.val = val.fingerprint;
    if (data.tokenizer) CheckIds(*data.tokenizer, *data.val, val);
    if (val.fingerprint == train.fingerprint) {
      Fail("data.folder = {}: train and val hold the same tokens", folder);
    }
  }
  if (data.tokenizer) {
    data.identity.vocabulary = FingerprintOf(*data.tokenizer);
    const std::optional<fs::path> beside = TokenizerBeside(folder);
    if (beside && !Extends(*data.tokenizer, LoadTokenizer(beside->string()))) {
      Fail("data.tokenizer = {}: is not the tokenizer of the data, {}", config.data.tokenizer,
           beside->string());
    }
  }
  return data;
}

void CheckSameData(const DataIdentity& then, const DataIdentity& now, const std::string& folder) {
  CheckSame(then.train, now.train, fmt::format("the training data in {}", folder));
  CheckSame(then.val, now.val, fmt::format("the validation data in {}", folder));
  CheckSame(then.vocabulary, now.vocabulary, "the tokens of the tokenizer");
}

DataIdentity Joined(const DataIdentity& then, DataIdentity now) {
  if (!now.train) now.train = then.train;
  if (!now.val) now.val = then.val;
  if (!now.vocabulary) now.vocabulary = then.vocabulary;
  return now;
}

std::optional<std::string> CheckDataOfModel(const StoredModel& model, const fs::path& data) {
  const std::optional<fs::path> beside = TokenizerBeside(data);
  if (!beside) {
    return fmt::format(
        "{} comes without a tokenizer: whether its ids are those of the model is not "
        "known",
        data.string());
  }
  const Tokenizer of_data = LoadTokenizer(beside->string());
  const std::optional<Tokenizer> own = OwnTokenizerOf(model.run());
  const std::optional<Fingerprint> known = LoadDataIdentity(model.checkpoint).vocabulary;
  if (!own && !known) {
    return fmt::format("{} has no tokenizer: whether it is that of {} is not known",
                       model.checkpoint.string(), data.string());
  }
  if (own ? !Extends(*own, of_data) : *known != FingerprintOf(of_data)) {
    Fail(
        "{}: its ids are of another tokenizer ({}, {}) than the model's ({}): no perplexity would "
        "mean anything",
        data.string(), Counted(of_data.vocab_size(), "token"), beside->string(),
        Counted(own ? own->vocab_size() : known->size, "token"));
  }
  return {};
}

}  // namespace terrace
