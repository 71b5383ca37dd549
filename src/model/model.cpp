// Letters as in backend/backend.h; P is max_positions.
#include "model/model.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/counted.h"
#include "core/nearest_name.h"
#include "model/block.h"
#include "model/hyper_layer.h"
#include "model/initialize.h"
#include "model/path.h"

namespace terrace {

struct Model::Ends {
  ParameterIndex parameters;
  const Parameter* tokens;     // [V, D]
  const Parameter* positions;  // [P, D]; null with rope
  std::optional<HyperLayer> hyper;
  NormLayer norm;
  const Parameter* head;  // [V, D]; `tokens` when tied

  // Fills x f32 [N, S * D].
  void Embed(Backend& backend, TensorView ids, int64_t length, int64_t first_position,
             TensorView x) const {
    const TensorView positions_table = positions ? positions->value : TensorView{};
    if (!hyper) {
      backend.Embedding(ids, tokens->value, positions_table, length, first_position, x);
      return;
    }
    const Arena::Frame frame(backend.arena());
    const TensorView y =
        Activation(backend, DType::kF32, {x.rows(), tokens->value.columns()}, "embedding.tokens");
    backend.Embedding(ids, tokens->value, positions_table, length, first_position, y);
    hyper->Spread(backend, y, x);
  }
  // What the final norm sees of x f32 [N, S * D], f32 [N, D]: x itself without streams.
  TensorView Read(Backend& backend, TensorView x, HyperLayer::Saved& saved) const {
    if (!hyper) return x;
    const TensorView z =
        Activation(backend, DType::kF32, {x.rows(), tokens->value.columns()}, "head.read");
    hyper->Read(backend, x, z, saved);
    return z;
  }
  // z f32 [N, D] normalized for the head.
  struct Normalized {
    TensorView statistics;  // f32 [N, 2]
    TensorView y;           // compute [N, D]
  };
  Normalized Normalize(Backend& backend, TensorView z) const {
    const Normalized normalized{Activation(backend, DType::kF32, {z.rows(), 2}, "head.statistics"),
                                Activation(backend, head->value.dtype, z.shape, "head.y")};
    norm.Forward(backend, z, normalized.y, normalized.statistics);
    return normalized;
  }
};

Model::Model(const ModelConfig& config, Backend& backend) : config_(config), backend_(backend) {
  config_.Check();
  for (Parameter& declared : ParametersOf(config_)) {
    Parameter& parameter = parameters_.emplace_back(std::move(declared));
    parameter.value = backend_.arena().Allocate(Memory::kWeights, parameter.value.dtype,
                                                parameter.value.shape, parameter.name.c_str());
  }
  ParameterIndex index;
  for (Parameter& parameter : parameters_) index.emplace(parameter.name, &parameter);
  for (int64_t layer = 0; layer < config_.layers; ++layer) {
    blocks_.push_back(MakeBlock({config_, backend_, index, layer}));
  }
  const Parameter* tokens = index.at("tok_emb.weight");
  ends_ = std::make_unique<Ends>(Ends{
      .parameters = {},
      .tokens = tokens,
      .positions =
          config_.positions == PositionKind::kLearned ? index.at("pos_emb.weight") : nullptr,
      .hyper = {},
      .norm = MakeNorm(config_, index, "norm_f"),
      .head = config_.tied_head ? tokens : index.at("lm_head.weight"),
  });
  if (config_.HasHyperConnections()) ends_->hyper.emplace(config_, index, "hyper_f");
  ends_->parameters = std::move(index);
}

Model::~Model() = default;

Parameter& Model::Find(std::string_view name) {
  const auto found = ends_->parameters.find(name);
  if (found != ends_->parameters.end()) return *found->second;
  std::vector<std::string_view> names;
  for (const Parameter& parameter : parameters_) names.push_back(parameter.name);
  Fail("the model has no parameter \"{}\"; the nearest is \"{}\"", name, NearestName(name, names));
}

void Model::Initialize(uint64_t seed) {
  if (backend_.dry()) return;
  for (const Parameter& parameter : parameters_) InitializeParameter(parameter, seed);
}

TensorView Model::Embed(const Pass& pass) {
  const MicroBatch& batch = pass.batch;
  if (batch.length > config_.max_positions) {
    Fail("sequences of {} exceed model.max_positions = {}", Counted(batch.length, "token"),
         config_.max_positions);
  }
  const TensorView x =
      Activation(backend_, DType::kF32, {batch.tokens(), config_.StreamWidth()}, "embedding");
  ends_->Embed(backend_, batch.inputs, batch.length, 0, x);
  return x;
}

double Model::HeadAndLoss(std::span<const EndWork> work, GradientSink* sink) {
  const Ends& ends = *ends_;
  double loss = 0;
  if (sink == nullptr) {
    for (const EndWork& item : work) {
      const Arena::Frame frame(backend_.arena());
      HyperLayer::Saved read;
      const TensorView y = ends.Normalize(backend_, ends.Read(backend_, item.x, read)).y;
      loss += backend_.HeadLoss(y, ends.head->value, item.pass->batch.targets, 0, {}, {}, false);
    }
    return loss;
  }

  const Arena::Frame read_frame(backend_.arena());
  std::vector<HyperLayer::Saved> reads(work.size());
  std::vector<TensorView> zs, dzs;
  for (size_t i = 0; i < work.size(); ++i) {
    zs.push_back(ends.Read(backend_, work[i].x, reads[i]));
    dzs.push_back(ends.hyper ? Activation(backend_, DType::kF32, zs[i].shape, "head.dread")
                             : work[i].dx);
    backend_.Zero(dzs[i]);
  }
  GradientSlot head_slot = sink->Begin(*ends.head);
  NormLayer::Slots norm_slots = ends.norm.Begin(*sink);
  for (size_t i = 0; i < work.size(); ++i) {
    const Arena::Frame frame(backend_.arena());
    const auto [statistics, y] = ends.Normalize(backend_, zs[i]);
    const TensorView dy = Activation(backend_, compute_dtype(), zs[i].shape, "head.dy");
    loss += backend_.HeadLoss(y, ends.head->value, work[i].pass->batch.targets,
                              work[i].pass->loss_scale, dy, head_slot.view, head_slot.add);
    head_slot.add = head_slot.add.Next();
    ends.norm.Backward(backend_, dy, zs[i], statistics, dzs[i], norm_slots);
  }
  ends.norm.End(*sink, norm_slots);
  sink->End(*ends.head, head_slot);
  if (!ends.hyper) return loss;

  std::vector<HyperLayer::Work> hyper_work;
  for (size_t i = 0; i < work.size(); ++i) {
    const TensorView dweights =
        Activation(backend_, DType::kF32, reads[i].weights.shape, "head.dweights");
    backend_.Zero(work[i].dx);
    hyper_work.push_back({&reads[i], dzs[i], dweights, work[i].dx});
  }
  ends.hyper->ReadBackward(backend_, hyper_work, *sink);
  return loss;
}

void Model::EmbedBackward(std::span<const EndWork> work, GradientSink& sink) {
  const Arena::Frame frame(backend_.arena());
  std::vector<TensorView> dys;  // f32 [N, D], of the tables' sums
  for (const EndWork& item : work) {
    dys.push_back(item.dx);
    if (!ends_->hyper) continue;
    dys.back() = Activation(backend_, DType::kF32, {item.dx.rows(), config_.width}, "embedding.dy");
    ends_->hyper->SpreadBackward(backend_, item.dx, dys.back());
  }
  const auto leave = [&](const Parameter& parameter, const auto& backward) {
    GradientSlot slot = sink.Begin(parameter);
    for (size_t i = 0; i < work.size(); ++i) {
      backward(work[i].pass->batch, dys[i], slot);
      slot.add = slot.add.Next();
    }
    sink.End(parameter, slot);
  };
  if (ends_->positions) {
    leave(*ends_->positions, [&](const MicroBatch& batch, TensorView dy, const GradientSlot& slot) {
      backend_.PositionsBackward(dy, batch.length, slot.view, slot.add);
    });
  }
  leave(*ends_->tokens, [&](const MicroBatch& batch, TensorView dy, const GradientSlot& slot) {
    backend_.EmbeddingBackward(dy, batch.inputs, slot.view, slot.add);
  });
}

TensorView Model::SelectionBias(int64_t layer) const {
  const auto found = ends_->parameters.find(fmt::format("layers.{}.ff.router.bias", layer));
  return found == ends_->parameters.end() ? TensorView{} : found->second->value;
}

void Model::BalanceRouters(std::span<const LayerRouting> layers) {
  if (config_.selection_bias != SelectionBias::kBalancing || backend_.dry()) return;
  for (const LayerRouting& layer : layers) {
    const std::span<float> bias = SelectionBias(layer.layer).span<float>();
    // Compared as totals: a mean of counts need not be whole.
    const int64_t experts = std::ssize(layer.counts);
    const int64_t total = std::accumulate(layer.counts.begin(), layer.counts.end(), int64_t{0});
    for (size_t e = 0; e < bias.size(); ++e) {
      const int64_t excess = layer.counts[e] * experts - total;
      if (excess > 0) bias[e] -= config_.selection_bias_rate;
      if (excess < 0) bias[e] += config_.selection_bias_rate;
    }
  }
}

void Model::Logits(TensorView x, TensorView logits) {
  const Arena::Frame frame(backend_.arena());
  HyperLayer::Saved read;
  const TensorView y = ends_->Normalize(backend_, ends_->Read(backend_, x, read)).y;
  backend_.Linear(y, ends_->head->value, logits, false);
}

std::unique_ptr<KvCache> Model::NewCache(int64_t capacity) {
  auto cache = std::make_unique<KvCache>();
  cache->capacity = capacity;
  for (const std::unique_ptr<Block>& block : blocks_) {
    cache->layers.push_back(block->NewCache(capacity));
  }
  return cache;
}

void Model::Decode(std::span<const int32_t> tokens, KvCache& cache, TensorView logits) {
  const int64_t count = std::ssize(tokens), first = cache.length;
  const int64_t room = std::min(cache.capacity, config_.max_positions) - first;
  if (count < 1) Fail("generation: no tokens to continue");
  if (count > room) {
    Fail("generation: {} after {} exceed {} (the cache's {}, model.max_positions = {})",
         Counted(count, "token"), first, first + room, cache.capacity, config_.max_positions);
  }
  for (const int32_t token : tokens) {
    if (token < 0 || token >= config_.vocab_size) {
      Fail("generation: token id {} is not below model.vocab_size = {}", token, config_.vocab_size);
    }
  }

  const Arena::Frame frame(backend_.arena());
  // Views on host memory; a dry run has none.
  const auto host_view = [&](const int32_t* data, const char* name) {
    auto* bytes = reinterpret_cast<std::byte*>(const_cast<int32_t*>(data));
    return TensorView{backend_.dry() ? nullptr : bytes, DType::kI32, {count}, name};
  };
  const std::vector<int32_t> no_targets(tokens.size(), kIgnoredTarget);
  Pass pass;
  pass.batch = {.sequences = 1,
                .length = count,
                .inputs = host_view(tokens.data(), "generation.tokens"),
                .targets = host_view(no_targets.data(), "generation.targets")};
  const TensorView x =
      Activation(backend_, DType::kF32, {count, config_.StreamWidth()}, "embedding");
  ends_->Embed(backend_, pass.batch.inputs, count, first, x);
  for (size_t layer = 0; layer < blocks_.size(); ++layer) {
    blocks_[layer]->Decode(pass, first, cache.layers[layer], x);
  }
  Logits(x.Rows(count - 1, 1), logits.Reshaped({1, config_.vocab_size}));
  cache.length += count;
}

}  // namespace terrace
