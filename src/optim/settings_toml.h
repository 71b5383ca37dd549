// Settings from TOML.
#pragma once

#include <toml++/toml.h>

#include <string_view>

#include "optim/settings.h"

namespace terrace {

// Throws Error "KEY = ... has to be ..." for what no setting can be.
SettingValue SettingOf(std::string_view key, const toml::node& node);

}  // namespace terrace
