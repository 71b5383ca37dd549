#include "compare/runner.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "compare/report.h"
#include "compare/tables.h"
#include "core/atomic_file.h"
#include "core/error.h"
#include "core/parallel.h"
#include "core/toml_text.h"
#include "data/dataset.h"
#include "data/hash.h"
#include "train/measure.h"
#include "train/run_data.h"
#include "train/run_folder.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;

// Settings that say how a run is kept, or where its data lie, not what comes out of it.
constexpr std::string_view kFree[] = {"training.checkpoint_interval", "training.keep", "data."};
// Prefixes of settings that differ from run to run of one study.
constexpr std::string_view kVaried[] = {"optimizer.policy", "policy.", "optimizer.learning_rate",
                                        "training.seed"};

struct StudyFolder {
  fs::path path;

  fs::path runs() const { return path / "runs"; }
  fs::path run(const RunSpec& spec) const { return runs() / NameOf(spec); }
  fs::path json() const { return path / "compare.json"; }
  fs::path html() const { return path / "report.html"; }
  static fs::path ResultIn(const fs::path& run) { return run / "result.json"; }
};

// What a study's results say of their data: the size, and a hash of tokens from all over it. It is
// in the files of studies, so it does not change; what runs keep (SampleOf) looks at more.
std::string DataTextOf(const Dataset& dataset) {
  constexpr int64_t kSamples = 64;
  constexpr int64_t kSampleTokens = 256;
  Hasher hasher;
  std::vector<int32_t> tokens(static_cast<size_t>(std::min(kSampleTokens, dataset.size())));
  const int64_t last_start = dataset.size() - std::ssize(tokens);
  for (int64_t i = 0; i < kSamples; ++i) {
    dataset.Read(last_start / (kSamples - 1) * i, tokens);
    hasher.Add({reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(int32_t)});
  }
  return fmt::format("{} tokens, {:016x}", dataset.size(), hasher.value());
}

bool Matches(const std::string& key, std::span<const std::string_view> prefixes) {
  return std::any_of(prefixes.begin(), prefixes.end(),
                     [&](std::string_view prefix) { return key.starts_with(prefix); });
}

// Throws Error naming the first setting in which a run that is there differs from what it has to
// be. `varied`: whether policy, learning rate and seed count.
void CheckSameConfig(const fs::path& run, RunConfig wanted, bool varied) {
  RunConfig stored = LoadSavedConfig(RunFolder{run}.config());
  const std::vector<Field> stored_fields = FieldsOf(stored);
  const std::vector<Field> wanted_fields = FieldsOf(wanted);
  for (size_t i = 0; i < stored_fields.size(); ++i) {
    const std::string& key = stored_fields[i].key;
    if (Matches(key, kFree) || (!varied && Matches(key, kVaried))) continue;
    const std::string there = ValueText(stored_fields[i]);
    const std::string here = ValueText(wanted_fields[i]);
    if (there == here) continue;
    const auto shown = [](const std::string& text) { return text.empty() ? "nothing" : text; };
    Fail("{}: was run with {} = {}, not {}; another study needs another folder", run.string(), key,
         shown(there), shown(here));
  }
}

// A policy's name may have got another meaning since. Settings that only one of the two knows say
// nothing: they are newer, with a default that is what was.
void CheckSamePolicy(const fs::path& run, const std::string& there, const std::string& here) {
  if (there == here) return;
  const PolicyTables old_tables = ParsePolicy(there, run.string());
  const PolicyTables new_tables = ParsePolicy(here, run.string());
  for (size_t p = 0; p < kPopulations; ++p) {
    for (const auto& [key, value] : old_tables.populations[p]) {
      const auto found = new_tables.populations[p].find(key);
      if (found == new_tables.populations[p].end() || found->second == value) continue;
      Fail("{}: was run with {}.{} = {}, which is {} by now; another study needs another folder",
           run.string(), NameOf(Population(p)), key, TextOf(value), TextOf(found->second));
    }
  }
}

// The names of all runs that the study may come to have, whatever rates are chosen.
std::set<std::string> PossibleRuns(const Study& study) {
  std::set<std::string> names;
  for (const StudyPolicy& policy : study.policies) {
    for (const double rate : (policy.ablation() ? study.Named(policy.base) : policy).rates) {
      for (int64_t i = 0; i < study.seeds; ++i) {
        names.insert(NameOf(RunSpec{policy.name, rate, study.first_seed() + i}));
      }
    }
  }
  return names;
}

class Runner {
 public:
  Runner(const Study& study, const fs::path& folder, const StudyOptions& options,
         const StudyCallbacks& callbacks)
      : study_(study), folder_{folder}, options_(options), callbacks_(callbacks) {}

  StudyOutcome Run() {
    PlanPolicies();
    FingerprintData();
    CheckFolder();
    std::error_code error;
    fs::create_directories(folder_.runs(), error);
    if (error) Fail("{}: cannot create: {}", folder_.runs().string(), error.message());
    const FolderLock lock(folder_.path);
    ReadResults();
    if (callbacks_.start) callbacks_.start(Start());
    StudyOutcome outcome;
    outcome.comparison = WriteReports();
    while (const std::optional<RunSpec> next = NextRun()) {
      if (!RunOne(*next)) {
        outcome.interrupted = true;
        break;
      }
      // A learning rate may have been chosen whose other seeds are there from an earlier study.
      ReadResults();
      outcome.comparison = WriteReports();
    }
    return outcome;
  }

 private:
  // Every policy is resolved, and a step of it is run dry, before any of them trains.
  void PlanPolicies() {
    const Parameters parameters = [&] {
      const std::vector<Parameter> list = ParametersOf(study_.base.model);
      return Parameters(list.begin(), list.end());
    }();
    int64_t most = 0;
    for (const StudyPolicy& policy : study_.policies) {
      const StudyPolicy& tuned = policy.ablation() ? study_.Named(policy.base) : policy;
      const ResolvedRun run =
          ResolvedOf(study_, {policy.name, tuned.rates.front(), study_.first_seed()});
      RunMemory memory;
      try {
        Policy resolved = run.policy;
        resolved.name = policy.name;
        memory.state = StateBytesOf(resolved, parameters);
        const Ledger plan = PlanTraining(run);
        memory.peak_bytes = plan.total_peak_bytes;
        memory.at_peak_bytes = plan.at_peak_bytes;
        policy_texts_[policy.name] = ToToml(resolved);
      } catch (const Error& error) {
        if (std::string_view(error.what()).starts_with("policy ")) throw;
        Fail("policy {}: {}", policy.name, error.what());
      }
      memory_[policy.name] = memory;
      most = std::max(most, memory.peak_bytes);
    }
    RequireMemory(most, AvailableMemoryBytes());
  }

  void FingerprintData() {
    const RunConfig& base = study_.base;
    const RunData data = OpenRunData(base, {});
    TERRACE_CHECK(data.val.has_value(), "a study without validation");
    data_ = fmt::format("train {}; val {}", DataTextOf(data.train), DataTextOf(*data.val));
    context_.data = data_;
    context_.command = options_.command;
    context_.machine = options_.machine;
    context_.train_tokens = data.train.size();
    context_.val_tokens = data.val->size();
  }

  // Refuses a folder that holds something else, before anything is written.
  void CheckFolder() const {
    if (!fs::exists(folder_.path)) return;
    if (!fs::is_directory(folder_.path)) Fail("{}: is no folder", folder_.path.string());
    if (!fs::exists(folder_.runs())) {
      if (!fs::is_empty(folder_.path)) {
        Fail("{}: is not empty and holds no comparison", folder_.path.string());
      }
      return;
    }
    // It is written after compare.json, so that here it is somebody else's.
    const bool known = fs::exists(folder_.json());
    if (!known && fs::exists(folder_.html())) {
      Fail("{}: has a report.html, but no compare.json: is no comparison", folder_.path.string());
    }
    if (known) CheckSameData();
    for (const auto& entry : fs::directory_iterator(folder_.runs())) {
      if (RunFolder{entry.path()}.HoldsRun()) CheckSameConfig(entry.path(), study_.base, false);
    }
  }

  // Runs that are not finished do not say what they were trained on.
  void CheckSameData() const {
    const auto json = nlohmann::json::parse(ReadFile(folder_.json()), nullptr, false);
    if (!json.is_object() || !json.contains("data")) return;  // damaged: it is rewritten
    if (json["data"] == data_) return;
    Fail(
        "{}: is of other data ({}) than data.folder = {} has by now ({}); another study needs "
        "another folder",
        folder_.path.string(), json["data"].dump(), study_.base.data.folder, data_);
  }

  // Reads what is known, run by run: the results of some decide which others there are.
  void ReadResults() {
    for (bool again = true; again;) {
      again = false;
      for (const RunSpec& run : KnownRuns(study_, results_)) {
        const std::string name = NameOf(run);
        if (results_.contains(name) || !RunFolder{folder_.run(run)}.HoldsRun()) continue;
        if (checked_.insert(name).second) {
          CheckSameConfig(folder_.run(run), ResolvedOf(study_, run).config, true);
        }
        const fs::path path = StudyFolder::ResultIn(folder_.run(run));
        if (!fs::exists(path)) continue;
        RunResult result = ParseRunResult(ReadFile(path), path.string());
        CheckResultOf(run, result, path);
        CheckSamePolicy(folder_.run(run), result.facts.policy_toml, policy_texts_.at(run.policy));
        if (result.facts.data != data_) {
          Fail("{}: was trained on other data ({}) than data.folder = {} has by now ({})",
               folder_.run(run).string(), result.facts.data, study_.base.data.folder, data_);
        }
        results_.emplace(name, std::move(result));
        DropCheckpoints(run);  // a kill may have come before that
        again = true;
      }
    }
  }

  // Throws Error for a result that another run, or another model, has given.
  void CheckResultOf(const RunSpec& run, const RunResult& result, const fs::path& path) const {
    const RunFacts& facts = result.facts;
    const RunSpec there{facts.policy, facts.learning_rate, facts.seed};
    if (there != run) {
      Fail("{}: is of {}, not of {}", path.string(), NameOf(there), NameOf(run));
    }
    if (result.diverged()) return;
    const ModelConfig& model = study_.base.model;
    const bool complete =
        result.steps == study_.base.training.steps && !result.curve.empty() &&
        std::isfinite(result.final_loss()) && std::ssize(result.loads) == model.MoeLayers() &&
        std::all_of(result.loads.begin(), result.loads.end(), [&](const ExpertLoads& layer) {
          return std::ssize(layer.counts) == model.experts;
        });
    if (!complete)
      Fail("{}: is incomplete; without the run's folder the run is made again", path.string());
  }

  StudyStart Start() const {
    StudyStart start;
    start.size = SizeOf(study_.base.model);
    start.tokens = study_.base.training.steps * study_.base.training.StepTokens();
    for (const StudyPolicy& policy : study_.policies) {
      start.policies.push_back({policy.name, memory_.at(policy.name)});
    }
    start.runs = KnownRuns(study_, results_);
    std::copy_if(start.runs.begin(), start.runs.end(), std::back_inserter(start.done),
                 [&](const RunSpec& run) { return results_.contains(NameOf(run)); });
    start.undecided = UndecidedRuns(study_, results_);
    start.threads = ThreadsOf(results_);
    const std::set<std::string> possible = PossibleRuns(study_);
    for (const auto& entry : fs::directory_iterator(folder_.runs())) {
      const std::string name = entry.path().filename().string();
      if (!possible.contains(name) && fs::exists(StudyFolder::ResultIn(entry.path()))) {
        start.others.push_back(name);
      }
    }
    std::sort(start.others.begin(), start.others.end());
    return start;
  }

  std::optional<RunSpec> NextRun() const {
    for (const RunSpec& run : KnownRuns(study_, results_)) {
      if (!results_.contains(NameOf(run))) return run;
    }
    return {};
  }

  // False when it was interrupted.
  bool RunOne(const RunSpec& run) {
    const fs::path path = folder_.run(run);
    const std::vector<RunSpec> known = KnownRuns(study_, results_);
    const int64_t total = std::ssize(known) + UndecidedRuns(study_, results_);
    TrainCallbacks callbacks;
    if (callbacks_.run) callbacks = callbacks_.run(run, std::ssize(results_) + 1, total);
    if (callbacks.stop && callbacks.stop()) return false;

    RunFacts facts{.policy = run.policy,
                   .policy_toml = policy_texts_.at(run.policy),
                   .learning_rate = run.learning_rate,
                   .seed = run.seed,
                   .data = data_,
                   .threads = MaxThreads(),
                   .memory = memory_.at(run.policy),
                   .diverged = {}};
    try {
      const TrainResult trained =
          Train(ResolvedOf(study_, run), path, {.resume = RunFolder{path}.HoldsRun()}, callbacks);
      if (trained.interrupted) return false;
    } catch (const DivergedError& error) {
      facts.diverged = Divergence{error.step(), error.reason()};
    }
    const fs::path metrics = RunFolder{path}.metrics();
    std::ifstream lines(metrics, std::ios::binary);  // a run that diverged at once has none
    if (!lines && fs::exists(metrics)) Fail("{}: cannot read", metrics.string());
    RunResult result = MakeRunResult(std::move(facts), lines, metrics.string());
    WriteFileAtomically(StudyFolder::ResultIn(path), ToJson(result));
    if (callbacks_.finished) callbacks_.finished(run, result);
    results_.emplace(NameOf(run), std::move(result));
    DropCheckpoints(run);
    return true;
  }

  void DropCheckpoints(const RunSpec& run) const {
    if (options_.keep_checkpoints) return;
    std::error_code ignored;  // costs disk space, but no result
    fs::remove_all(RunFolder{folder_.run(run)}.checkpoints(), ignored);
  }

  Comparison WriteReports() const {
    Comparison comparison = Compare(study_, results_, context_);
    const fs::path& path = folder_.path;
    WriteFileAtomically(path / "compare.md", ToMarkdown(comparison));
    WriteFileAtomically(path / "compare.csv", ToCsv(comparison));
    WriteFileAtomically(path / "runs.csv", RunsToCsv(comparison));
    WriteFileAtomically(folder_.json(), ToJson(comparison));
    WriteFileAtomically(folder_.html(), ToHtml(comparison));
    return comparison;
  }

  const Study& study_;
  const StudyFolder folder_;
  const StudyOptions& options_;
  const StudyCallbacks& callbacks_;
  StudyContext context_;
  std::string data_;
  std::map<std::string, RunMemory> memory_;          // by policy
  std::map<std::string, std::string> policy_texts_;  // likewise, resolved
  std::set<std::string> checked_;
  RunResults results_;
};

}  // namespace

StudyOutcome RunStudy(const Study& study, const fs::path& folder, const StudyOptions& options,
                      const StudyCallbacks& callbacks) {
  return Runner(study, folder, options, callbacks).Run();
}

}  // namespace terrace
