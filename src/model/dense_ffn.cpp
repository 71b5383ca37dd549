#include "model/dense_ffn.h"

#include <vector>

namespace terrace {

struct DenseFfn::SavedFfn final : Saved {
  SwiGluPath::Saved path;
};

DenseFfn::DenseFfn(const LayerContext& context)
    : backend_(context.backend),
      norm_(context.Norm("norm2")),
      dtype_(context.config.weight_dtype),
      path_(context, "ff") {}

std::unique_ptr<SubLayer::Saved> DenseFfn::Forward(const Pass&, TensorView x, TensorView out,
                                                   LayerRouting*) {
  auto saved = std::make_unique<SavedFfn>();
  NormalizeInput(backend_, norm_, x, dtype_, *saved);
  saved->path = path_.Forward(saved->y, out);
  return saved;
}

void DenseFfn::Backward(std::span<const Work> work, GradientSink& sink) {
  const Arena::Frame frame(backend_.arena());
  std::vector<TensorView> dy;  // f32 [N, D] each
  std::vector<SwiGluPath::Work> path_work;
  for (const Work& item : work) {
    const auto& saved = static_cast<const SavedFfn&>(*item.saved);
    const TensorView dout = Downcast(backend_, item.dx, dtype_, "ffn.dout");
    dy.push_back(Activation(backend_, DType::kF32, item.dx.shape, "ffn.dy"));
    path_work.push_back({saved.y, saved.path, dout, dy.back()});
  }
  path_.Backward(path_work, sink);
  NormBackward(backend_, norm_, work, dy, sink);
}

}  // namespace terrace
