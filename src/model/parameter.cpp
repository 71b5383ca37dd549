#include "model/parameter.h"

namespace terrace {

std::string_view NameOf(Population population) {
  static constexpr std::string_view kNames[kPopulations] = {
      "embedding", "head", "attention", "dense_ffn", "shared_expert", "expert", "router", "norm"};
  return kNames[static_cast<int>(population)];
}

}  // namespace terrace
