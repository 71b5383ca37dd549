#include "model/sub_layer.h"

#include <vector>

namespace terrace {

SubLayer::SubLayer(const LayerContext& context, std::string_view norm, const Path& path)
    : backend_(context.backend),
      norm_(context.Norm(norm)),
      dtype_(context.config.weight_dtype),
      path_(path) {}

void SubLayer::Normalize(TensorView x, Saved& saved) const {
  saved.x = x;
  saved.statistics = Activation(backend_, DType::kF32, {x.rows(), 2}, "norm.statistics");
  saved.y = Activation(backend_, dtype_, x.shape, "norm.y");
  norm_.Forward(backend_, x, saved.y, saved.statistics);
}

TensorView SubLayer::Forward(const Pass& pass, TensorView x, const char* name, Saved& saved,
                             LayerRouting* routing) const {
  const TensorView out = Activation(backend_, DType::kF32, x.shape, name);
  backend_.Copy(x, out);
  Normalize(x, saved);
  saved.path = path_.Forward(pass, saved.y, out, routing);
  return out;
}

void SubLayer::Backward(std::span<const Work> work, GradientSink& sink) const {
  const Arena::Frame frame(backend_.arena());
  std::vector<Path::Work> path_work;
  for (const Work& item : work) {
    const TensorView dy = Activation(backend_, DType::kF32, item.saved->y.shape, "norm.dy");
    path_work.push_back({item.pass, item.saved->y, item.saved->path.get(), item.dx, dy});
  }
  path_.Backward(path_work, sink);

  NormLayer::Slots slots = norm_.Begin(sink);
  for (size_t i = 0; i < work.size(); ++i) {
    const Saved& saved = *work[i].saved;
    norm_.Backward(backend_, path_work[i].dy, saved.x, saved.statistics, work[i].dx, slots);
  }
  norm_.End(sink, slots);
}

void SubLayer::Decode(TensorView x,
                      const std::function<void(TensorView y, TensorView out)>& path) const {
  const Arena::Frame frame(backend_.arena());
  Saved saved;
  Normalize(x, saved);
  path(saved.y, x);
}

}  // namespace terrace
