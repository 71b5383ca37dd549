#include "model/moe_ffn.h"

#include "core/rng.h"

namespace terrace {
namespace {

Routing AllocateRouting(Backend& backend, int64_t tokens, int64_t experts, int64_t top_k) {
  const int64_t rows = tokens * top_k;
  Routing routing;
  routing.probabilities =
      Activation(backend, DType::kF32, {tokens, experts}, "router.probabilities");
  routing.log_sums = Activation(backend, DType::kF32, {tokens}, "router.log_sums");
  routing.experts = Activation(backend, DType::kI32, {tokens, top_k}, "router.experts");
  routing.weights = Activation(backend, DType::kF32, {tokens, top_k}, "router.weights");
  routing.token_rows = Activation(backend, DType::kI64, {tokens, top_k}, "router.token_rows");
  routing.row_tokens = Activation(backend, DType::kI64, {rows}, "router.row_tokens");
  routing.row_weights = Activation(backend, DType::kF32, {rows}, "router.row_weights");
  routing.offsets = Activation(backend, DType::kI64, {experts + 1}, "router.offsets");
  routing.fractions = Activation(backend, DType::kF32, {experts}, "router.fractions");
  return routing;
}

}  // namespace

struct MoeFfn::SavedMoe final : Saved {
  Routing routing;
  TensorView gate, up;  // compute [R, F]; become their gradients
  SwiGluPath::Saved shared_expert;
};

MoeFfn::MoeFfn(const LayerContext& context)
    : backend_(context.backend),
      dtype_(context.config.weight_dtype),
      layer_(context.layer),
      experts_(context.config.experts),
      router_config_(context.config.router),
      router_(context.Find("ff.router")),
      selection_bias_(context.config.selection_bias != SelectionBias::kNone
                          ? context.Named("ff.router.bias")
                          : nullptr),
      gate_proj_(FindExperts(context, "gate_proj")),
      up_proj_(FindExperts(context, "up_proj")),
      down_proj_(FindExperts(context, "down_proj")) {
  if (context.config.shared_expert_width > 0) shared_expert_.emplace(context, "ff.shared_expert");
}

MoeFfn::ExpertMatrices MoeFfn::FindExperts(const LayerContext& context,
                                           std::string_view matrix) const {
  ExpertMatrices found;
  for (int64_t e = 0; e < experts_; ++e) {
    found.parameters.push_back(context.Find(fmt::format("ff.experts.{}.{}", e, matrix)));
    found.values.push_back(found.parameters.back()->value);
  }
  return found;
}

std::unique_ptr<Path::Saved> MoeFfn::Forward(const Pass& pass, TensorView y, TensorView out,
                                             LayerRouting* routing) const {
  const int64_t tokens = y.rows(), rows = tokens * router_config_.top_k;
  const int64_t width = y.columns(), ffn_width = gate_proj_.values[0].rows();
  auto saved = std::make_unique<SavedMoe>();
  saved->routing = AllocateRouting(backend_, tokens, experts_, router_config_.top_k);
  saved->gate = Activation(backend_, dtype_, {rows, ffn_width}, "moe.gate");
  saved->up = Activation(backend_, dtype_, {rows, ffn_width}, "moe.up");
  const TensorView offsets = saved->routing.offsets;
  if (shared_expert_) saved->shared_expert = shared_expert_->Forward(y, out);
  {
    const Arena::Frame temporaries(backend_.arena());
    const TensorView logits =
        Activation(backend_, DType::kF32, {tokens, experts_}, "router.logits");
    backend_.Linear(y, router_->value, logits, false);
    std::vector<int64_t> counts(static_cast<size_t>(experts_));
    std::optional<uint64_t> noise_key;
    if (pass.training) noise_key = MixKeys(pass.noise_key, layer_);
    const TensorView selection_bias = selection_bias_ ? selection_bias_->value : TensorView{};
    const RouterStatistics statistics =
        backend_.Route(router_config_, noise_key, logits, selection_bias, pass.batch.targets,
                       saved->routing, counts);
    if (routing != nullptr) *routing = {layer_, statistics, std::move(counts)};
  }
  {
    const Arena::Frame temporaries(backend_.arena());
    const TensorView rows_of_y = Activation(backend_, dtype_, {rows, width}, "moe.rows");
    backend_.GatherRows(y, saved->routing.row_tokens, rows_of_y);
    backend_.GroupedLinear(rows_of_y, offsets, gate_proj_.values, saved->gate, false);
    backend_.GroupedLinear(rows_of_y, offsets, up_proj_.values, saved->up, false);
  }
  const Arena::Frame temporaries(backend_.arena());
  const TensorView h = Activation(backend_, dtype_, {rows, ffn_width}, "moe.h");
  const TensorView rows_of_out = Activation(backend_, dtype_, {rows, width}, "moe.out_rows");
  backend_.SwiGlu(saved->gate, saved->up, saved->routing.row_weights, h);
  backend_.GroupedLinear(h, offsets, down_proj_.values, rows_of_out, false);
  backend_.AddGatheredRows(rows_of_out, saved->routing.token_rows, out);
  return saved;
}

void MoeFfn::Backward(std::span<const Work> work, GradientSink& sink) const {
  const Arena::Frame frame(backend_.arena());
  const int64_t width = router_->value.columns();
  std::vector<WeightProduct> router_products;
  for (const Work& item : work) {
    const int64_t tokens = item.y.rows();
    const TensorView dlogits =
        Activation(backend_, DType::kF32, {tokens, experts_}, "router.dlogits");
    router_products.push_back({dlogits, item.y});
  }

  if (shared_expert_) {
    const Arena::Frame shared_frame(backend_.arena());
    std::vector<SwiGluPath::Work> shared_work;
    for (const Work& item : work) {
      const auto& saved = static_cast<const SavedMoe&>(*item.saved);
      const TensorView dout = Downcast(backend_, item.dout, dtype_, "moe.dout");
      shared_work.push_back({item.y, saved.shared_expert, dout, item.dy});
    }
    shared_expert_->Backward(shared_work, sink);
  }

  {
    const Arena::Frame down_frame(backend_.arena());
    std::vector<GroupedProduct> down_proj_products;
    for (size_t i = 0; i < work.size(); ++i) {
      const auto& saved = static_cast<const SavedMoe&>(*work[i].saved);
      const Routing& routing = saved.routing;
      const int64_t rows = saved.gate.rows();
      const TensorView dout_rows = Activation(backend_, dtype_, {rows, width}, "moe.dout_rows");
      const TensorView h = Activation(backend_, dtype_, saved.gate.shape, "moe.h");
      down_proj_products.push_back({dout_rows, h, routing.offsets});
      {
        const Arena::Frame temporaries(backend_.arena());
        const TensorView dout = Downcast(backend_, work[i].dout, dtype_, "moe.dout");
        backend_.GatherRows(dout, routing.row_tokens, dout_rows);
      }
      {
        const Arena::Frame temporaries(backend_.arena());
        const TensorView drow_weights =
            Activation(backend_, DType::kF32, {rows}, "router.drow_weights");
        // dh, which h then replaces.
        backend_.GroupedLinearBackwardInput(dout_rows, routing.offsets, down_proj_.values, h,
                                            false);
        backend_.SwiGluBackward(h, saved.gate, saved.up, routing.row_weights, saved.gate, saved.up,
                                drow_weights);
        backend_.RouteBackward(router_config_, routing, work[i].pass->batch.targets, drow_weights,
                               work[i].pass->balance_scale, router_products[i].dy);
      }
      backend_.LinearBackwardInput(router_products[i].dy, router_->value, work[i].dy,
                                   shared_expert_.has_value());
      const Arena::Frame temporaries(backend_.arena());
      const TensorView drows = Activation(backend_, dtype_, {rows, width}, "moe.drows");
      backend_.GroupedLinearBackwardInput(saved.gate, routing.offsets, gate_proj_.values, drows,
                                          false);
      backend_.GroupedLinearBackwardInput(saved.up, routing.offsets, up_proj_.values, drows, true);
      backend_.AddGatheredRows(drows, routing.token_rows, work[i].dy);
    }
    for (const Parameter* down_proj : down_proj_.parameters) {
      LeaveExpertGradient(*down_proj, down_proj_products, sink);
    }
  }

  {
    const Arena::Frame up_frame(backend_.arena());
    std::vector<GroupedProduct> gate_proj_products, up_proj_products;
    for (const Work& item : work) {
      const auto& saved = static_cast<const SavedMoe&>(*item.saved);
      const Routing& routing = saved.routing;
      const TensorView rows_of_y =
          Activation(backend_, dtype_, {saved.gate.rows(), width}, "moe.rows");
      backend_.GatherRows(item.y, routing.row_tokens, rows_of_y);
      gate_proj_products.push_back({saved.gate, rows_of_y, routing.offsets});
      up_proj_products.push_back({saved.up, rows_of_y, routing.offsets});
    }
    for (int64_t e = 0; e < experts_; ++e) {
      LeaveExpertGradient(*up_proj_.parameters[e], up_proj_products, sink);
      LeaveExpertGradient(*gate_proj_.parameters[e], gate_proj_products, sink);
    }
  }
  LeaveWeightGradient(backend_, *router_, router_products, sink);
}

void MoeFfn::LeaveExpertGradient(const Parameter& parameter,
                                 std::span<const GroupedProduct> products,
                                 GradientSink& sink) const {
  std::vector<WeightProduct> own;
  for (const GroupedProduct& product : products) {
    if (backend_.dry()) {
      // As busy as the busiest: the sink's slot is what takes memory, not the rows.
      own.push_back({product.dy.Rows(0, 0), product.x.Rows(0, 0)});
      continue;
    }
    const int64_t* offset = product.offsets.as<int64_t>() + parameter.expert;
    const int64_t rows = offset[1] - offset[0];
    if (rows == 0) continue;
    own.push_back({product.dy.Rows(offset[0], rows), product.x.Rows(offset[0], rows)});
  }
  if (own.empty()) {
    sink.Skip(parameter);
  } else {
    LeaveWeightGradient(backend_, parameter, own, sink);
  }
}

}  // namespace terrace
