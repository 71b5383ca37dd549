#include "model/dense_ffn.h"

#include <vector>

namespace terrace {

struct DenseFfn::SavedFfn final : Saved {
  SwiGluPath::Saved path;
};

DenseFfn::DenseFfn(const LayerContext& context)
    : backend_(context.backend), dtype_(context.config.weight_dtype), path_(context, "ff") {}

std::unique_ptr<Path::Saved> DenseFfn::Forward(const Pass&, TensorView y, TensorView out,
                                               LayerRouting*) const {
  auto saved = std::make_unique<SavedFfn>();
  saved->path = path_.Forward(y, out);
  return saved;
}

void DenseFfn::Backward(std::span<const Work> work, GradientSink& sink) const {
  const Arena::Frame frame(backend_.arena());
  std::vector<SwiGluPath::Work> path_work;
  for (const Work& item : work) {
    const auto& saved = static_cast<const SavedFfn&>(*item.saved);
    const TensorView dout = Downcast(backend_, item.dout, dtype_, "ffn.dout");
    path_work.push_back({item.y, saved.path, dout, item.dy});
  }
  path_.Backward(path_work, sink);
}

}  // namespace terrace
