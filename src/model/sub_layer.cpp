#include "model/sub_layer.h"

#include <vector>

namespace terrace {

SubLayer::SubLayer(const LayerContext& context, int number, const Path& path)
    : backend_(context.backend),
      norm_(context.Norm(fmt::format("norm{}", number))),
      path_width_(context.config.width),
      dtype_(context.config.weight_dtype),
      path_(path) {
  if (context.config.HasHyperConnections()) {
    hyper_.emplace(context.config, context.parameters,
                   fmt::format("layers.{}.hyper{}", context.layer, number));
  }
}

void SubLayer::Normalize(TensorView x, Saved& saved) const {
  saved.x = x;
  if (hyper_) {
    saved.x = Activation(backend_, DType::kF32, {x.rows(), path_width_}, "hyper.read");
    hyper_->Read(backend_, x, saved.x, saved.hyper);
  }
  saved.statistics = Activation(backend_, DType::kF32, {x.rows(), 2}, "norm.statistics");
  saved.y = Activation(backend_, dtype_, saved.x.shape, "norm.y");
  norm_.Forward(backend_, saved.x, saved.y, saved.statistics);
}

TensorView SubLayer::Forward(const Pass& pass, TensorView x, const char* name, Saved& saved,
                             LayerRouting* routing) const {
  const TensorView out = Activation(backend_, DType::kF32, x.shape, name);
  if (!hyper_) backend_.Copy(x, out);
  Normalize(x, saved);
  if (!hyper_) {
    saved.path = path_.Forward(pass, saved.y, out, routing);
    return out;
  }
  saved.path_out = ZeroedActivation(backend_, saved.y.shape, "hyper.path_out");
  saved.path = path_.Forward(pass, saved.y, saved.path_out, routing);
  hyper_->Write(backend_, saved.hyper, saved.path_out, out);
  return out;
}

void SubLayer::Backward(std::span<const Work> work, GradientSink& sink) const {
  const Arena::Frame frame(backend_.arena());
  std::vector<Path::Work> path_work;
  std::vector<HyperLayer::Work> hyper_work;
  std::vector<TensorView> dx;  // f32 [N, D] of the norm's input
  for (const Work& item : work) {
    const Saved& saved = *item.saved;
    TensorView dout = item.dx;
    if (hyper_) {
      dout = Activation(backend_, DType::kF32, saved.y.shape, "hyper.dpath_out");
      const TensorView dweights =
          Activation(backend_, DType::kF32, saved.hyper.weights.shape, "hyper.dweights");
      hyper_->WriteBackward(backend_, saved.hyper, saved.path_out, item.dx, dout, dweights);
      dx.push_back(ZeroedActivation(backend_, saved.y.shape, "hyper.dread"));
      hyper_work.push_back({&saved.hyper, dx.back(), dweights, item.dx});
    } else {
      dx.push_back(item.dx);
    }
    const TensorView dy = Activation(backend_, DType::kF32, saved.y.shape, "norm.dy");
    path_work.push_back({item.pass, saved.y, saved.path.get(), dout, dy});
  }
  path_.Backward(path_work, sink);

  NormLayer::Slots slots = norm_.Begin(sink);
  for (size_t i = 0; i < work.size(); ++i) {
    const Saved& saved = *work[i].saved;
    norm_.Backward(backend_, path_work[i].dy, saved.x, saved.statistics, dx[i], slots);
  }
  norm_.End(sink, slots);
  if (hyper_) hyper_->ReadBackward(backend_, hyper_work, sink);
}

void SubLayer::Decode(TensorView x,
                      const std::function<void(TensorView y, TensorView out)>& path) const {
  const Arena::Frame frame(backend_.arena());
  Saved saved;
  Normalize(x, saved);
  if (!hyper_) {
    path(saved.y, x);
    return;
  }
  const TensorView path_out = ZeroedActivation(backend_, saved.y.shape, "hyper.path_out");
  const TensorView out = Activation(backend_, DType::kF32, x.shape, "hyper.out");
  path(saved.y, path_out);
  hyper_->Write(backend_, saved.hyper, path_out, out);
  backend_.Copy(out, x);
}

}  // namespace terrace
