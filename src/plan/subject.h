// What is planned: a run's configuration, a preset, or a model that Hugging Face describes.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "plan/hugging_face_model.h"
#include "train/config.h"

namespace terrace {

struct Subject {
  std::string name;    // of the model, for people
  std::string policy;  // as it was named
  RunConfig config;
  // Of a model that this engine cannot run: config.model is a stand-in then, whose precision alone
  // means something.
  std::optional<HuggingFaceModel> hugging_face;

  ModelSize size() const { return hugging_face ? hugging_face->size : SizeOf(config.model); }
};

// `source` is a configuration (*.toml), a Hugging Face config.json (*.json, or a folder with one),
// or the name of a preset; the latter two start from the defaults of training. `assignments`
// ("key=value") are laid over it, then `policy`, a name or a file, unless empty. Throws Error on
// one line.
Subject LoadSubject(const std::string& source, const std::string& policy,
                    std::vector<std::string> assignments);

}  // namespace terrace
