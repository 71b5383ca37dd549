// One decoder layer of an attention and a feed-forward.
#pragma once

#include <memory>

#include "model/path.h"

namespace terrace {

std::unique_ptr<Block> MakeBlock(const LayerContext& context);

}  // namespace terrace
