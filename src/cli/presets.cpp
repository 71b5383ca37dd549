// terrace presets

#include "model/presets.h"

#include <CLI/CLI.hpp>
#include <algorithm>

#include "cli/commands.h"
#include "cli/streams.h"
#include "core/error.h"

namespace terrace {
namespace {

// "6.78 B", "110.73 M"
std::string Millions(int64_t count) {
  const double millions = static_cast<double>(count) / 1e6;
  return millions >= 1000 ? fmt::format("{:.2f} B", millions / 1000)
                          : fmt::format("{:.2f} M", millions);
}

void ListPresets() {
  size_t width = 0;
  for (const Preset& preset : Presets()) width = std::max(width, preset.name.size());
  std::string text =
      fmt::format("{:{}}  {:>10}  {:>10}  summary\n", "preset", width, "parameters", "active");
  for (const Preset& preset : Presets()) {
    const ModelSize size = SizeOf(PresetNamed(preset.name));
    text +=
        fmt::format("{:{}}  {:>10}  {:>10}  {}\n", preset.name, width, Millions(size.parameters),
                    Millions(size.active_parameters), preset.summary);
  }
  WriteOutput("-", text);
}

}  // namespace

void AddPresetsCommand(CLI::App& app) {
  app.add_subcommand("presets",
                     "List the ready-made models: parameters, and those active for a token")
      ->callback(ListPresets);
}

}  // namespace terrace
