// Named model configurations.
#pragma once

#include <span>
#include <string_view>

#include "model/config.h"

namespace terrace {

// A base and what differs from it.
struct Preset {
  std::string_view name;
  std::string_view base;     // another preset's name; empty: ModelConfig's defaults
  std::string_view summary;  // one line for a table
  void (*change)(ModelConfig& config);
};
std::span<const Preset> Presets();
bool IsPreset(std::string_view name);

// Throws Error naming the nearest preset when there is none.
ModelConfig PresetNamed(std::string_view name);

}  // namespace terrace
