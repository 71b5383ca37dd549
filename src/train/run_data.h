// The data of a run, and whether they are the ones that they have to be.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "data/dataset.h"
#include "data/fingerprint.h"
#include "data/tokenizer.h"
#include "train/config.h"
#include "train/run_folder.h"

namespace terrace {

struct RunData {
  Dataset train;
  std::optional<Dataset> val;  // where the configuration evaluates
  std::optional<Tokenizer> tokenizer;
  DataIdentity identity;
};

// Opens what `config` names and looks at samples of it. `own_tokenizer`: the one that a run to be
// resumed keeps, which then is the run's whatever else is named; empty for a new run. Throws Error
// when
//   - there is no such folder, or it is a single file: what is trained on cannot be validated on;
//   - train and val hold the same tokens;
//   - the tokenizer knows fewer ids than the data hold or were made for, gives them another meaning
//     than the data's own, or is not the run's.
RunData OpenRunData(const RunConfig& config, const std::optional<Tokenizer>& own_tokenizer);

// Throws Error on one line when what a run was trained on so far, `then`, differs from `now`. What
// either does not know is no difference.
void CheckSameData(const DataIdentity& then, const DataIdentity& now, const std::string& folder);

// `now`, with what only `then` knows.
DataIdentity Joined(const DataIdentity& then, DataIdentity now);

// Throws Error when the ids of `data` are not those of the model's tokenizer; returns a notice
// where that cannot be known, since the data (made by another program) come without a tokenizer.
std::optional<std::string> CheckDataOfModel(const StoredModel& model,
                                            const std::filesystem::path& data);

}  // namespace terrace
