// What result.json and compare.json write alike.
#pragma once

#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "compare/result.h"

namespace terrace {

// Keeps the order in which keys are added.
using OrderedJson = nlohmann::ordered_json;

// Names of files need not be UTF-8.
inline std::string Dump(const OrderedJson& json, int indent) {
  return json.dump(indent, ' ', false, OrderedJson::error_handler_t::replace);
}

// By the names of an enumeration's values.
template <size_t N, typename Enum>
OrderedJson BytesJson(const std::array<int64_t, N>& bytes, Enum) {
  OrderedJson json = OrderedJson::object();
  for (size_t i = 0; i < N; ++i) json[std::string(NameOf(Enum(i)))] = bytes[i];
  return json;
}

inline OrderedJson MemoryJson(const RunMemory& memory) {
  return {{"peak_bytes", memory.peak_bytes},
          {"at_peak_bytes", BytesJson(memory.at_peak_bytes, Memory{})},
          {"state_bytes", memory.state.total},
          {"state_bytes_by_population", BytesJson(memory.state.by_population, Population{})}};
}

// Populations that have a second moment.
inline OrderedJson FlooredJson(const CurvePoint& point) {
  OrderedJson json = OrderedJson::object();
  for (size_t p = 0; p < kPopulations; ++p) {
    if (point.floored[p]) json[std::string(NameOf(Population(p)))] = *point.floored[p];
  }
  return json;
}

inline OrderedJson LoadsJson(const std::vector<ExpertLoads>& loads) {
  OrderedJson json = OrderedJson::array();
  for (const ExpertLoads& layer : loads) {
    json.push_back({{"layer", layer.layer}, {"counts", layer.counts}});
  }
  return json;
}

inline OrderedJson DivergedJson(const std::optional<Divergence>& diverged) {
  if (!diverged) return {};
  return {{"step", diverged->step}, {"reason", diverged->reason}};
}

}  // namespace terrace
