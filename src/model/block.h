// One decoder layer of an attention and a feed-forward.
#pragma once

#include <memory>

#include "model/attention.h"
#include "model/sub_layer.h"

namespace terrace {

std::unique_ptr<Block> MakeBlock(const LayerContext& context);

}  // namespace terrace
