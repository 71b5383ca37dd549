#include "plan/subject.h"

#include <filesystem>

#include "core/error.h"
#include "core/toml_text.h"
#include "model/presets.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;

Subject FromHuggingFace(const std::string& path, const std::vector<std::string>& assignments) {
  HuggingFaceModel model = ReadHuggingFaceModel(path);
  Subject subject;
  // Every such file is called config.json: the folder tells of which model.
  const fs::path stem = fs::path(path).stem();
  subject.name = stem == "config" ? fs::absolute(path).parent_path().filename() : stem;
  if (model.config) {
    subject.config = ConfigOfModel(*model.config, assignments);
    return subject;
  }
  for (const std::string& assignment : assignments) {
    if (assignment.starts_with("model.")) {
      Fail("{}: {}: this model's own settings cannot be changed (it has {}, which cannot be run)",
           path, assignment, model.not_runnable);
    }
  }
  ModelConfig stand_in = PresetNamed("gpt-moe-tiny");
  stand_in.max_positions = model.max_positions;
  stand_in.weight_dtype = model.weight_dtype;
  subject.config = ConfigOfModel(stand_in, assignments, /*stand_in=*/true);
  subject.hugging_face = std::move(model);
  return subject;
}

Subject Load(const std::string& source, const std::vector<std::string>& assignments) {
  std::error_code error;
  if (fs::is_directory(source, error))
    return FromHuggingFace(fs::path(source) / "config.json", assignments);
  if (source.ends_with(".json")) return FromHuggingFace(source, assignments);
  Subject subject;
  if (source.ends_with(".toml")) {
    subject.name = fs::path(source).stem();
    subject.config = LoadConfig(source, assignments);
    return subject;
  }
  if (fs::exists(source, error) && !IsPreset(source)) {
    Fail("{}: a configuration is a .toml file, a model of Hugging Face a .json file", source);
  }
  subject.name = source;
  subject.config = ConfigOfModel(PresetNamed(source), assignments);
  return subject;
}

}  // namespace

Subject LoadSubject(const std::string& source, const std::string& policy,
                    std::vector<std::string> assignments) {
  if (!policy.empty()) assignments.push_back("optimizer.policy=" + QuotedToml(policy));
  Subject subject = Load(source, assignments);
  const std::string& used = subject.config.optimizer.policy;
  subject.policy = used == kOwnPolicy && IsPolicyFile(policy) ? policy : used;
  return subject;
}

}  // namespace terrace
