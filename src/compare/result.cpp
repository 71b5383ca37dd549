#include "compare/result.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "compare/json_parts.h"
#include "core/error.h"

namespace terrace {
namespace {

using Json = OrderedJson;

constexpr int64_t kFormat = 1;

// JSON has no word for what is not finite; it is written as null.
double NumberOf(const Json& json) {
  return json.is_null() ? std::numeric_limits<double>::quiet_NaN() : json.get<double>();
}

std::vector<Json> ParseLines(std::string_view text) {
  std::vector<Json> lines;
  size_t begin = 0;
  for (size_t end; (end = text.find('\n', begin)) != std::string_view::npos; begin = end + 1) {
    lines.push_back(Json::parse(text.substr(begin, end - begin)));
  }
  return lines;
}

double Imbalance(const Json& line) {
  double worst = 0;
  for (const Json& layer : line.value("layers", Json::array())) {
    worst = std::max(
        worst, NumberOf(layer.at("max_share")) * static_cast<double>(layer.at("counts").size()));
  }
  return worst;
}

// The mean of lines [first, last).
CurvePoint MeanOf(const std::vector<Json>& lines, size_t first, size_t last) {
  CurvePoint point;
  const double weight = 1.0 / static_cast<double>(last - first);
  for (size_t i = first; i < last; ++i) {
    const Json& line = lines[i];
    point.loss += weight * NumberOf(line.at("loss"));
    point.aux_loss += weight * NumberOf(line.at("aux_loss"));
    point.imbalance += weight * Imbalance(line);
    const Json floored = line.value("floored", Json::object());
    for (const auto& [name, share] : floored.items()) {
      for (int p = 0; p < kPopulations; ++p) {
        if (name != NameOf(Population(p))) continue;
        std::optional<double>& sum = point.floored[static_cast<size_t>(p)];
        sum = sum.value_or(0) + weight * NumberOf(share);
      }
    }
  }
  return point;
}

void AddLoads(const Json& line, std::vector<ExpertLoads>& loads) {
  size_t i = 0;
  for (const Json& layer : line.value("layers", Json::array())) {
    if (i == loads.size()) loads.push_back({layer.at("layer"), {}});
    const auto counts = layer.at("counts").get<std::vector<int64_t>>();
    loads[i].counts.resize(counts.size());
    for (size_t e = 0; e < counts.size(); ++e) loads[i].counts[e] += counts[e];
    ++i;
  }
}

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return 0.5 * (values[(values.size() - 1) / 2] + values[values.size() / 2]);
}

void AddMetrics(const std::vector<Json>& lines, RunResult& result) {
  const size_t count = lines.size();
  const size_t bucket =
      std::max<size_t>(1, (count + RunResult::kCurvePoints - 1) / RunResult::kCurvePoints);
  std::vector<double> speeds;
  for (size_t i = 0; i < count; ++i) {
    const Json& line = lines[i];
    result.steps = line.at("step");
    if (result.steps != static_cast<int64_t>(i) + 1) Fail("has no line of step {}", i + 1);
    result.tokens = line.at("tokens");
    result.seconds += NumberOf(line.at("seconds"));
    speeds.push_back(NumberOf(line.at("tokens_per_second")));
    if (i == 0) result.first_loss = NumberOf(line.at("loss"));
    if (line.contains("evaluation")) {
      const Json& evaluation = line.at("evaluation");
      result.unigram_entropy = NumberOf(evaluation.at("unigram_entropy"));
      result.validation.push_back(
          {result.steps, result.tokens, result.seconds, NumberOf(evaluation.at("loss"))});
    }
    if ((i + 1) % bucket == 0 || i + 1 == count) {
      CurvePoint point = MeanOf(lines, i / bucket * bucket, i + 1);
      point.step = result.steps;
      point.tokens = result.tokens;
      point.seconds = result.seconds;
      result.curve.push_back(point);
    }
    if (i >= count - (count + 9) / 10) AddLoads(line, result.loads);
  }
  result.tokens_per_second = Median(std::move(speeds));
}

// --- JSON ----------------------------------------------------------------------------------------

RunMemory MemoryOf(const Json& json) {
  RunMemory memory;
  memory.peak_bytes = json.at("peak_bytes");
  memory.state.total = json.at("state_bytes");
  for (int c = 0; c < kMemoryCategories; ++c) {
    memory.at_peak_bytes[static_cast<size_t>(c)] =
        json.at("at_peak_bytes").at(std::string(NameOf(Memory(c))));
  }
  for (int p = 0; p < kPopulations; ++p) {
    memory.state.by_population[static_cast<size_t>(p)] =
        json.at("state_bytes_by_population").at(std::string(NameOf(Population(p))));
  }
  return memory;
}

RunResult ResultOf(const Json& json) {
  RunResult result;
  RunFacts& facts = result.facts;
  facts.policy = json.at("policy");
  facts.learning_rate = json.at("learning_rate");
  facts.seed = json.at("seed");
  facts.policy_toml = json.at("policy_toml");
  facts.data = json.at("data");
  facts.threads = json.value("threads", int64_t{0});
  facts.memory = MemoryOf(json.at("memory"));
  if (json.contains("diverged")) {
    facts.diverged = Divergence{json.at("diverged").at("step"), json.at("diverged").at("reason")};
  }
  result.steps = json.at("steps");
  result.tokens = json.at("tokens");
  result.seconds = json.at("seconds");
  result.tokens_per_second = json.at("tokens_per_second");
  result.first_loss = NumberOf(json.at("first_loss"));
  result.unigram_entropy = NumberOf(json.at("unigram_entropy"));
  for (const Json& point : json.at("validation")) {
    result.validation.push_back(
        {point.at("step"), point.at("tokens"), point.at("seconds"), NumberOf(point.at("loss"))});
  }
  for (const Json& json_point : json.at("curve")) {
    CurvePoint point{.step = json_point.at("step"),
                     .tokens = json_point.at("tokens"),
                     .seconds = json_point.at("seconds"),
                     .loss = NumberOf(json_point.at("loss")),
                     .aux_loss = NumberOf(json_point.at("aux_loss")),
                     .imbalance = NumberOf(json_point.at("imbalance"))};
    for (int p = 0; p < kPopulations; ++p) {
      const std::string name(NameOf(Population(p)));
      const Json& floored = json_point.at("floored");
      if (floored.contains(name)) point.floored[static_cast<size_t>(p)] = floored.at(name);
    }
    result.curve.push_back(point);
  }
  for (const Json& layer : json.at("loads")) {
    result.loads.push_back({layer.at("layer"), layer.at("counts").get<std::vector<int64_t>>()});
  }
  if (!result.diverged() && result.validation.empty()) Fail("holds no validation");
  return result;
}

}  // namespace

RunResult MakeRunResult(RunFacts facts, std::string_view metrics_jsonl, std::string_view path) {
  RunResult result;
  result.facts = std::move(facts);
  try {
    AddMetrics(ParseLines(metrics_jsonl), result);
  } catch (const Json::exception&) {
    Fail("{}: is damaged; without the run's folder the run is made again", path);
  } catch (const Error& error) {
    Fail("{}: {}; without the run's folder the run is made again", path, error.what());
  }
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
  try {
    const Json json = Json::parse(text);
    if (json.at("format") != kFormat) Fail("was written by another version");
    return ResultOf(json);
  } catch (const Json::exception&) {
    Fail("{}: is damaged", path);
  } catch (const Error& error) {
    Fail("{}: {}", path, error.what());
  }
}

}  // namespace terrace
