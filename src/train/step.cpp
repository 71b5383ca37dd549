// Letters as in backend/backend.h; M is the number of micro-batches of a step, S is 1 without
// hyper-connections.
#include "train/step.h"

#include <cmath>
#include <memory>

#include "core/rng.h"

namespace terrace {
namespace {

// Frames of the blocks, given back in reverse order also when an error passes through.
class FrameStack {
 public:
  explicit FrameStack(Arena& arena) : arena_(arena) {}
  ~FrameStack() {
    while (!frames_.empty()) Pop();
  }
  void Push() { frames_.emplace_back(arena_); }
  void Pop() { frames_.pop_back(); }

 private:
  Arena& arena_;
  std::vector<Arena::Frame> frames_;
};

int64_t CountedTokens(std::span<const MicroBatch> micro_batches) {
  int64_t tokens = 0;
  for (const MicroBatch& batch : micro_batches) {
    if (batch.targets.data == nullptr) {  // a dry run
      tokens += batch.tokens();
      continue;
    }
    for (int32_t target : batch.targets.span<int32_t>()) tokens += target == kIgnoredTarget ? 0 : 1;
  }
  return tokens;
}

TensorView NewActivation(Model& model, const MicroBatch& batch, const char* name) {
  return model.backend().arena().Allocate(Memory::kActivations, DType::kF32,
                                          {batch.tokens(), model.config().StreamWidth()}, name);
}

// The block's output, without what backward would need.
TensorView ForwardOnly(Model& model, Block& block, const Pass& pass, TensorView x,
                       LayerRouting* routing) {
  const TensorView out = NewActivation(model, pass.batch, "kept.out");
  const Arena::Frame frame(model.backend().arena());
  std::unique_ptr<Block::Saved> saved;
  model.backend().Copy(block.Forward(pass, x, saved, routing), out);
  return out;
}

// Replaces x by the block's output: two activations serve any number of blocks.
void ForwardInPlace(Model& model, Block& block, const Pass& pass, TensorView x) {
  const Arena::Frame frame(model.backend().arena());
  model.backend().Copy(ForwardOnly(model, block, pass, x, nullptr), x);
}

// The first weight or, in the order of computation, the first block whose output holds NaN or
// infinity; empty when all are finite.
std::string FirstNonFinite(Model& model, std::span<const MicroBatch> micro_batches,
                           uint64_t noise_key) {
  Backend& backend = model.backend();
  for (const Parameter& parameter : model.parameters()) {
    if (!std::isfinite(backend.SumOfSquares(parameter.value))) return parameter.name;
  }
  for (size_t m = 0; m < micro_batches.size(); ++m) {
    const Pass pass{
        .batch = micro_batches[m], .training = true, .noise_key = MixKeys(noise_key, m)};
    const Arena::Frame frame(backend.arena());
    TensorView x = model.Embed(pass);
    if (!std::isfinite(backend.SumOfSquares(x))) return "the embedding's output";
    for (size_t i = 0; i < model.blocks().size(); ++i) {
      ForwardInPlace(model, *model.blocks()[i], pass, x);
      if (!std::isfinite(backend.SumOfSquares(x))) return fmt::format("layers.{}'s output", i);
    }
  }
  return "";
}

void AddRouting(const std::vector<LayerRouting>& layers, double weight, StepLosses& result) {
  if (result.routing.empty()) result.routing.resize(layers.size());
  for (size_t i = 0; i < layers.size(); ++i) {
    const RouterStatistics& statistics = layers[i].statistics;
    LayerRouting& sum = result.routing[i];
    sum.layer = layers[i].layer;
    sum.statistics.aux_loss += weight * statistics.aux_loss;
    sum.statistics.z_loss += weight * statistics.z_loss;
    // A mean over tokens: weighted by them here, divided by their sum at the end.
    sum.statistics.entropy += statistics.entropy * static_cast<double>(statistics.tokens);
    sum.statistics.tokens += statistics.tokens;
    sum.counts.resize(layers[i].counts.size());
    for (size_t e = 0; e < sum.counts.size(); ++e) sum.counts[e] += layers[i].counts[e];
  }
}

// Sum of token losses of micro-batches that go through the model together, layer by layer; their
// gradients are left in `sink`, statistics of MoE layers in `routing`, by micro-batch.
double RunTogether(Model& model, std::span<const Pass> passes, bool checkpointing,
                   GradientSink& sink, std::vector<std::vector<LayerRouting>>& routing) {
  const auto blocks = model.blocks();
  const size_t count = passes.size();
  Arena& arena = model.backend().arena();
  const Arena::Frame frame(arena);
  std::vector<Model::EndWork> ends;
  const Arena::PhaseScope start(arena, {"forward", "embedding"});
  for (const Pass& pass : passes) {
    ends.push_back({&pass, {}, NewActivation(model, pass.batch, "dx")});  // [N, S * D]
  }
  FrameStack frames(arena);

  std::vector<std::vector<TensorView>> inputs(blocks.size());  // [N, S * D] of every block
  std::vector<std::vector<std::unique_ptr<Block::Saved>>> saved(blocks.size());
  routing.resize(count);
  for (Model::EndWork& end : ends) end.x = model.Embed(*end.pass);
  for (size_t i = 0; i < blocks.size(); ++i) {
    const Arena::PhaseScope phase(arena, {"forward", "", static_cast<int64_t>(i)});
    frames.Push();
    saved[i].resize(count);
    for (size_t m = 0; m < count; ++m) {
      TensorView& x = ends[m].x;
      inputs[i].push_back(x);
      LayerRouting layer;
      x = checkpointing ? ForwardOnly(model, *blocks[i], passes[m], x, &layer)
                        : blocks[i]->Forward(passes[m], x, saved[i][m], &layer);
      if (blocks[i]->feed_forward() != FeedForwardKind::kMoe) continue;
      routing[m].push_back(std::move(layer));
    }
  }

  double loss = 0;
  {
    const Arena::PhaseScope phase(arena, {"forward and backward", "head"});
    loss = model.HeadAndLoss(ends, &sink);
  }
  for (size_t i = blocks.size(); i-- > 0;) {
    {
      const Arena::Frame recomputed(arena);
      std::vector<Block::Work> work;
      for (size_t m = 0; m < count; ++m) {
        if (checkpointing) {
          const Arena::PhaseScope phase(arena, {"recomputation", "", static_cast<int64_t>(i)});
          blocks[i]->Forward(passes[m], inputs[i][m], saved[i][m], nullptr);
        }
        work.push_back({&passes[m], saved[i][m].get(), ends[m].dx});
      }
      const Arena::PhaseScope phase(arena, {"backward", "", static_cast<int64_t>(i)});
      blocks[i]->Backward(work, sink);
      saved[i].clear();
    }
    frames.Pop();
  }
  const Arena::PhaseScope end(arena, {"backward", "embedding"});
  model.EmbedBackward(ends, sink);
  return loss;
}

}  // namespace

StepLosses ForwardBackward(Model& model, std::span<const MicroBatch> micro_batches,
                           const PassSettings& settings, GradientSink& sink) {
  StepLosses result;
  result.tokens = CountedTokens(micro_batches);
  const double share = 1.0 / static_cast<double>(micro_batches.size());
  const double per_token = result.tokens == 0 ? 0 : 1.0 / static_cast<double>(result.tokens);
  std::vector<Pass> passes;
  for (size_t m = 0; m < micro_batches.size(); ++m) {
    passes.push_back({.batch = micro_batches[m],
                      .training = true,
                      .noise_key = MixKeys(settings.noise_key, m),
                      .loss_scale = static_cast<float>(per_token),
                      .balance_scale = static_cast<float>(share)});
  }
  const size_t group = settings.together ? passes.size() : 1;
  for (size_t first = 0; first < passes.size(); first += group) {
    std::vector<std::vector<LayerRouting>> routing;
    result.loss += per_token * RunTogether(model, std::span(passes).subspan(first, group),
                                           settings.checkpointing, sink, routing);
    for (const std::vector<LayerRouting>& layers : routing) AddRouting(layers, share, result);
  }
  for (LayerRouting& layer : result.routing) {
    if (layer.statistics.tokens > 0) {
      layer.statistics.entropy /= static_cast<double>(layer.statistics.tokens);
    }
    result.aux_loss += layer.statistics.aux_loss;
    result.z_loss += layer.statistics.z_loss;
  }
  return result;
}

StepReport TrainStep(Model& model, std::span<const MicroBatch> micro_batches,
                     const StepSettings& settings, StepSink& sink) {
  sink.BeginStep(std::ssize(micro_batches), settings.learning_rate);
  const PassSettings passes{settings.noise_key, settings.checkpointing, sink.together()};
  StepReport report;
  bool finite_loss = true;
  do {
    report.losses = ForwardBackward(model, micro_batches, passes, sink);
    finite_loss = std::isfinite(report.losses.loss);
  } while (finite_loss && sink.AnotherPass());
  if (finite_loss) {
    const Arena::PhaseScope phase(model.backend().arena(), Phase{"update of the weights"});
    report.update = sink.Finish();
  }
  if (!finite_loss || report.update.not_finite != nullptr) {
    const std::string first = FirstNonFinite(model, micro_batches, settings.noise_key);
    if (!finite_loss) {
      throw NotFiniteError(
          fmt::format("the loss is not finite, first {}", first.empty() ? "in the head" : first));
    }
    throw NotFiniteError(fmt::format("the gradient of {} is not finite{}",
                                     report.update.not_finite->name,
                                     first.empty() ? "" : ", first " + first));
  }
  // Nothing will ever change again, but for the decay of weights.
  if (report.update.gradient_norm == 0 && report.losses.tokens > 0 &&
      !model.backend().arena().dry()) {
    throw NotFiniteError("all gradients are 0: squares of activations are beyond float32");
  }
  model.BalanceRouters(report.losses.routing);
  return report;
}

double ForwardLoss(Model& model, const MicroBatch& batch) {
  const Pass pass{.batch = batch};
  Arena& arena = model.backend().arena();
  const Arena::Frame frame(arena);
  const Arena::PhaseScope evaluation(arena, {"evaluation", "embedding"});
  TensorView x = model.Embed(pass);
  for (size_t i = 0; i < model.blocks().size(); ++i) {
    const Arena::PhaseScope phase(arena, {"evaluation", "", static_cast<int64_t>(i)});
    ForwardInPlace(model, *model.blocks()[i], pass, x);
  }
  const Arena::PhaseScope phase(arena, "head");
  return model.HeadAndLoss(pass, x, {}, nullptr);
}

std::vector<MicroBatch> AllocateMicroBatches(Arena& arena, int64_t count, int64_t B, int64_t T) {
  std::vector<MicroBatch> batches;
  for (int64_t m = 0; m < count; ++m) {
    batches.push_back(
        {.sequences = B,
         .length = T,
         .inputs = arena.Allocate(Memory::kActivations, DType::kI32, {B * T}, "inputs"),
         .targets = arena.Allocate(Memory::kActivations, DType::kI32, {B * T}, "targets")});
  }
  return batches;
}

}  // namespace terrace
