#include "compare/report.h"

#include <cmath>

#include "compare/json_parts.h"
#include "compare/page.h"
#include "compare/spikes.h"
#include "core/error.h"

namespace terrace {
namespace {

using Json = OrderedJson;

template <typename T>
Json JsonOf(const std::optional<T>& value) {
  return value ? Json(*value) : Json();
}

Json JsonOf(const MeanSpread& value) {
  return {{"mean", value.mean}, {"std", JsonOf(value.stddev)}};
}

Json CurveJson(const std::vector<CurvePoint>& curve) {
  Json json = Json::array();
  for (const CurvePoint& point : curve) {
    json.push_back({{"tokens", point.tokens},
                    {"seconds", point.seconds},
                    {"loss", point.loss},
                    {"aux_loss", point.aux_loss},
                    {"imbalance", point.imbalance},
                    {"floored", FlooredJson(point)}});
  }
  return json;
}

Json PolicyJson(const PolicyRow& row) {
  Json json = {{"policy", row.policy},
               {"base", row.base.empty() ? Json() : Json(row.base)},
               {"learning_rate", JsonOf(row.learning_rate)},
               {"rates", row.rates},
               {"sweep_complete", row.chosen.complete},
               {"at_edge", row.chosen.at_edge},
               {"seeds", row.seeds},
               {"diverged", row.diverged},
               {"spikes", JsonOf(row.spikes)},
               {"on_front", row.on_front}};
  if (row.seeds == 0) return json;
  json["toml"] = row.toml;
  json["loss"] = JsonOf(row.loss);
  json["perplexity"] = JsonOf(row.perplexity);
  json["tokens_per_second"] = JsonOf(row.tokens_per_second);
  json["aux_loss"] = JsonOf(row.aux_loss);
  json["imbalance"] = JsonOf(row.imbalance);
  json["memory"] = MemoryJson(row.memory);
  json["bytes_per_parameter"] = row.bytes_per_parameter;
  json["validation"] = Json::array();
  for (const MeanValidationPoint& point : row.validation) {
    json["validation"].push_back({{"step", point.step},
                                  {"tokens", point.tokens},
                                  {"seconds", point.seconds},
                                  {"loss", JsonOf(point.loss)},
                                  {"perplexity", JsonOf(point.perplexity)}});
  }
  json["curve"] = CurveJson(row.curve);
  json["loads"] = LoadsJson(row.loads);
  return json;
}

Json ComparisonJson(const Comparison& comparison) {
  Json json = {{"title", comparison.title},
               {"facts", Json::array()},
               {"data", comparison.data},
               {"parameters", comparison.parameters},
               {"spike_definition", SpikeDefinition()},
               {"runs_done", comparison.runs_done},
               {"runs_total", comparison.runs_total},
               {"unigram_entropy", comparison.unigram_entropy},
               {"policies", Json::array()},
               {"sweep", Json::array()},
               {"runs", Json::array()}};
  for (const auto& [name, text] : comparison.facts) {
    json["facts"].push_back({{"name", name}, {"text", text}});
  }
  for (const PolicyRow& row : comparison.policies) json["policies"].push_back(PolicyJson(row));
  for (const SweepRow& row : comparison.sweep) {
    json["sweep"].push_back({{"policy", row.policy},
                             {"learning_rate", row.learning_rate},
                             {"finished", row.finished},
                             {"chosen", row.chosen},
                             {"at_edge", row.at_edge},
                             {"loss", JsonOf(row.loss)},
                             {"spikes", JsonOf(row.spikes)},
                             {"worse_than_untrained", row.worse_than_untrained()},
                             {"diverged", DivergedJson(row.diverged)}});
  }
  for (const RunResult& run : comparison.runs) {
    json["runs"].push_back(
        {{"policy", run.facts.policy},
         {"learning_rate", run.facts.learning_rate},
         {"seed", run.facts.seed},
         {"threads", run.facts.threads},
         {"steps", run.steps},
         {"tokens", run.tokens},
         {"seconds", run.seconds},
         {"tokens_per_second", run.tokens_per_second},
         {"first_loss", run.first_loss},
         {"spikes", JsonOf(run.spikes)},
         {"loss", run.diverged() ? Json() : Json(run.final_loss())},
         {"perplexity", run.diverged() ? Json() : Json(std::exp(run.final_loss()))},
         {"diverged", DivergedJson(run.facts.diverged)}});
  }
  return json;
}

// As the content of a script element: nothing in it can end the element or begin a comment.
std::string ForScript(std::string_view json) {
  std::string text;
  for (const char c : json) {
    if (c == '<') {
      text += "\\u003c";
    } else {
      text += c;
    }
  }
  return text;
}

void Replace(std::string& page, std::string_view mark, std::string_view text) {
  const size_t found = page.find(mark);
  TERRACE_CHECK(found != std::string::npos, "the page has no {}", mark);
  page.replace(found, mark.size(), text);
}

}  // namespace

std::string ToJson(const Comparison& comparison) {
  return Dump(ComparisonJson(comparison), 1) + "\n";
}

std::string ToHtml(const Comparison& comparison) {
  std::string page(PageTemplate());
  // The data last: it may hold any text.
  Replace(page, "/*{{chart.js}}*/", ChartLibrary());
  Replace(page, "{{data}}", ForScript(Dump(ComparisonJson(comparison), -1)));
  return page;
}

}  // namespace terrace
