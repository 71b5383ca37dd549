#include "compare/result.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "compare/json_parts.h"
#include "compare/spikes.h"
#include "core/error.h"
#include "core/lines.h"

namespace terrace {
namespace {

using Json = OrderedJson;

constexpr int64_t kFormat = 1;

// --- Typed parts, so that an error names its key
// ---------------------------------------------------

const Json& At(const Json& json, std::string_view key) {
  if (!json.is_object()) Fail("holds {} in place of an object", json.type_name());
  const auto found = json.find(key);
  if (found == json.end()) Fail("{} is missing", key);
  return *found;
}

[[noreturn]] void FailType(const Json& value, std::string_view key, std::string_view wanted) {
  Fail("{} is no {} ({})", key, wanted, value.type_name());
}

int64_t Whole(const Json& value, std::string_view key) {
  const bool fits =
      value.is_number_integer() &&
      (!value.is_number_unsigned() ||
       value.get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()));
  if (!fits) FailType(value, key, "whole number");
  return value.get<int64_t>();
}

int64_t WholeAt(const Json& json, std::string_view key) { return Whole(At(json, key), key); }

// JSON has no word for what is not finite; it is written as null.
double Number(const Json& value, std::string_view key) {
  if (value.is_null()) return std::numeric_limits<double>::quiet_NaN();
  if (!value.is_number()) FailType(value, key, "number");
  return value.get<double>();
}

double NumberAt(const Json& json, std::string_view key) { return Number(At(json, key), key); }

std::string TextAt(const Json& json, std::string_view key) {
  const Json& value = At(json, key);
  if (!value.is_string()) FailType(value, key, "text");
  return value.get<std::string>();
}

const Json& ListAt(const Json& json, std::string_view key) {
  const Json& value = At(json, key);
  if (!value.is_array()) FailType(value, key, "list");
  return value;
}

// Empty without the key.
const Json& ListIfAny(const Json& json, std::string_view key) {
  static const Json kNone = Json::array();
  return json.contains(key) ? ListAt(json, key) : kNone;
}

ExpertLoads LoadsOf(const Json& layer) {
  ExpertLoads loads{WholeAt(layer, "layer"), {}};
  for (const Json& count : ListAt(layer, "counts")) loads.counts.push_back(Whole(count, "counts"));
  return loads;
}

std::array<std::optional<double>, kPopulations> FlooredOf(const Json& json) {
  std::array<std::optional<double>, kPopulations> shares{};
  if (!json.contains("floored")) return shares;
  const Json& floored = At(json, "floored");
  if (!floored.is_object()) FailType(floored, "floored", "object");
  for (size_t p = 0; p < kPopulations; ++p) {
    const std::string_view name = NameOf(Population(p));
    if (floored.contains(name)) shares[p] = NumberAt(floored, name);
  }
  return shares;
}

// --- Metrics -------------------------------------------------------------------------------------

double Imbalance(const Json& line) {
  double worst = 0;
  for (const Json& layer : ListIfAny(line, "layers")) {
    worst = std::max(
        worst, NumberAt(layer, "max_share") * static_cast<double>(ListAt(layer, "counts").size()));
  }
  return worst;
}

void AddLoads(const Json& line, std::vector<ExpertLoads>& loads) {
  size_t i = 0;
  for (const Json& layer : ListIfAny(line, "layers")) {
    const ExpertLoads here = LoadsOf(layer);
    if (i == loads.size()) loads.push_back({here.layer, {}});
    std::vector<int64_t>& counts = loads[i].counts;
    counts.resize(std::max(counts.size(), here.counts.size()));
    for (size_t e = 0; e < here.counts.size(); ++e) counts[e] += here.counts[e];
    ++i;
  }
}

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return 0.5 * (values[(values.size() - 1) / 2] + values[values.size() / 2]);
}

// Takes the lines of steps 1, 2, ... `count` in order.
class MetricsReader {
 public:
  MetricsReader(int64_t count, RunResult& result)
      : count_(count),
        bucket_(
            std::max<int64_t>(1, (count + RunResult::kCurvePoints - 1) / RunResult::kCurvePoints)),
        result_(result) {}

  void Add(const Json& line) {
    const int64_t before = result_.steps;
    const int64_t step = WholeAt(line, "step");
    if (step != before + 1) Fail("is of step {}, not of step {}", step, before + 1);
    result_.steps = step;
    result_.tokens = WholeAt(line, "tokens");
    result_.seconds += NumberAt(line, "seconds");
    speeds_.push_back(NumberAt(line, "tokens_per_second"));
    const double loss = NumberAt(line, "loss");
    if (step == 1) result_.first_loss = loss;
    spikes_.Add(loss);
    if (line.contains("evaluation")) {
      const Json& evaluation = At(line, "evaluation");
      result_.unigram_entropy = NumberAt(evaluation, "unigram_entropy");
      result_.validation.push_back(
          {step, result_.tokens, result_.seconds, NumberAt(evaluation, "loss")});
    }
    AddToCurve(line);
    if (before >= count_ - (count_ + 9) / 10) AddLoads(line, result_.loads);
  }

  void Finish() {
    result_.tokens_per_second = Median(std::move(speeds_));
    result_.spikes = spikes_.spikes();
  }

 private:
  // Its points are means over `bucket_` steps, or what is left of them.
  void AddToCurve(const Json& line) {
    const int64_t index = result_.steps - 1;
    if (index % bucket_ == 0) result_.curve.emplace_back();
    const int64_t first = index / bucket_ * bucket_;
    const double weight = 1.0 / static_cast<double>(std::min(bucket_, count_ - first));
    CurvePoint& point = result_.curve.back();
    point.step = result_.steps;
    point.tokens = result_.tokens;
    point.seconds = result_.seconds;
    point.loss += weight * NumberAt(line, "loss");
    point.aux_loss += weight * NumberAt(line, "aux_loss");
    point.imbalance += weight * Imbalance(line);
    const auto floored = FlooredOf(line);
    for (size_t p = 0; p < kPopulations; ++p) {
      if (floored[p]) point.floored[p] = point.floored[p].value_or(0) + weight * *floored[p];
    }
  }

  int64_t count_;
  int64_t bucket_;
  RunResult& result_;
  std::vector<double> speeds_;
  SpikeCounter spikes_;
};

void AddMetrics(std::istream& metrics, std::string_view path, RunResult& result) {
  const std::streampos start = metrics.tellg();
  LineReader counter(metrics);
  while (counter.Next()) {
  }
  metrics.clear();
  metrics.seekg(start);
  MetricsReader reader(counter.number(), result);
  for (LineReader lines(metrics); lines.Next();) {
    try {
      const Json line = Json::parse(lines.line(), nullptr, false);
      if (line.is_discarded()) Fail("is not JSON");
      reader.Add(line);
    } catch (const Error& error) {
      Fail("{}:{}: {}; without the run's folder the run is made again", path, lines.number(),
           error.what());
    }
  }
  reader.Finish();
}

// --- JSON ----------------------------------------------------------------------------------------

RunMemory MemoryOf(const Json& json) {
  RunMemory memory;
  memory.peak_bytes = WholeAt(json, "peak_bytes");
  memory.state.total = WholeAt(json, "state_bytes");
  for (size_t c = 0; c < kMemoryCategories; ++c) {
    memory.at_peak_bytes[c] = WholeAt(At(json, "at_peak_bytes"), NameOf(Memory(c)));
  }
  for (size_t p = 0; p < kPopulations; ++p) {
    memory.state.by_population[p] =
        WholeAt(At(json, "state_bytes_by_population"), NameOf(Population(p)));
  }
  return memory;
}

RunResult ResultOf(const Json& json) {
  RunResult result;
  RunFacts& facts = result.facts;
  facts.policy = TextAt(json, "policy");
  facts.learning_rate = NumberAt(json, "learning_rate");
  facts.seed = WholeAt(json, "seed");
  facts.policy_toml = TextAt(json, "policy_toml");
  facts.data = TextAt(json, "data");
  if (json.contains("threads")) facts.threads = WholeAt(json, "threads");
  facts.memory = MemoryOf(At(json, "memory"));
  if (json.contains("diverged")) {
    const Json& diverged = At(json, "diverged");
    facts.diverged = Divergence{WholeAt(diverged, "step"), TextAt(diverged, "reason")};
  }
  result.steps = WholeAt(json, "steps");
  result.tokens = WholeAt(json, "tokens");
  result.seconds = NumberAt(json, "seconds");
  result.tokens_per_second = NumberAt(json, "tokens_per_second");
  result.first_loss = NumberAt(json, "first_loss");
  if (json.contains("spikes")) result.spikes = WholeAt(json, "spikes");
  result.unigram_entropy = NumberAt(json, "unigram_entropy");
  for (const Json& point : ListAt(json, "validation")) {
    result.validation.push_back({WholeAt(point, "step"), WholeAt(point, "tokens"),
                                 NumberAt(point, "seconds"), NumberAt(point, "loss")});
  }
  for (const Json& point : ListAt(json, "curve")) {
    At(point, "floored");
    result.curve.push_back({.step = WholeAt(point, "step"),
                            .tokens = WholeAt(point, "tokens"),
                            .seconds = NumberAt(point, "seconds"),
                            .loss = NumberAt(point, "loss"),
                            .aux_loss = NumberAt(point, "aux_loss"),
                            .imbalance = NumberAt(point, "imbalance"),
                            .floored = FlooredOf(point)});
  }
  for (const Json& layer : ListAt(json, "loads")) result.loads.push_back(LoadsOf(layer));
  if (!result.diverged() && result.validation.empty()) Fail("holds no validation");
  return result;
}

}  // namespace

RunResult MakeRunResult(RunFacts facts, std::istream& metrics_jsonl, std::string_view path) {
  RunResult result;
  result.facts = std::move(facts);
  AddMetrics(metrics_jsonl, path, result);
  if (result.diverged()) return result;
  if (result.validation.empty()) Fail("{}: holds no validation", path);
  if (!std::isfinite(result.final_loss())) {
    result.facts.diverged = Divergence{result.steps, "the validation loss is not finite"};
  }
  return result;
}

std::string ToJson(const RunResult& result) {
  const RunFacts& facts = result.facts;
  Json json = {{"format", kFormat},
               {"policy", facts.policy},
               {"learning_rate", facts.learning_rate},
               {"seed", facts.seed}};
  if (facts.diverged) json["diverged"] = DivergedJson(facts.diverged);
  json["steps"] = result.steps;
  json["tokens"] = result.tokens;
  json["seconds"] = result.seconds;
  json["tokens_per_second"] = result.tokens_per_second;
  json["first_loss"] = result.first_loss;
  if (result.spikes) json["spikes"] = *result.spikes;
  json["unigram_entropy"] = result.unigram_entropy;
  json["memory"] = MemoryJson(facts.memory);
  json["policy_toml"] = facts.policy_toml;
  json["data"] = facts.data;
  json["threads"] = facts.threads;
  json["validation"] = Json::array();
  for (const ValidationPoint& point : result.validation) {
    json["validation"].push_back({{"step", point.step},
                                  {"tokens", point.tokens},
                                  {"seconds", point.seconds},
                                  {"loss", point.loss}});
  }
  json["curve"] = Json::array();
  for (const CurvePoint& point : result.curve) {
    json["curve"].push_back({{"step", point.step},
                             {"tokens", point.tokens},
                             {"seconds", point.seconds},
                             {"loss", point.loss},
                             {"aux_loss", point.aux_loss},
                             {"imbalance", point.imbalance},
                             {"floored", FlooredJson(point)}});
  }
  json["loads"] = LoadsJson(result.loads);
  return Dump(json, 1) + "\n";
}

RunResult ParseRunResult(std::string_view text, std::string_view path) {
  const Json json = Json::parse(text, nullptr, false);
  try {
    if (json.is_discarded()) Fail("is damaged (not JSON)");
    if (WholeAt(json, "format") != kFormat) Fail("was written by another version");
    return ResultOf(json);
  } catch (const Error& error) {
    Fail("{}: {}", path, error.what());
  }
}

}  // namespace terrace
