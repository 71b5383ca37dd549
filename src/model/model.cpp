// Letters as in backend/backend.h; P is max_positions.
#include "model/model.h"

#include <algorithm>
#include <utility>

#include "core/counted.h"
#include "core/nearest_name.h"
#include "model/block.h"
#include "model/initialize.h"
#include "model/sub_layer.h"

namespace terrace {

struct Model::Ends {
  ParameterIndex parameters;
  const Parameter* tokens;     // [V, D]
  const Parameter* positions;  // [P, D]; null with rope
  NormLayer norm;
  const Parameter* head;  // [V, D]; `tokens` when tied
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
      .norm = MakeNorm(config_, index, "norm_f"),
      .head = config_.tied_head ? tokens : index.at("lm_head.weight"),
  });
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
      Activation(backend_, DType::kF32, {batch.tokens(), config_.width}, "embedding");
  backend_.Embedding(batch.inputs, ends_->tokens->value,
                     ends_->positions ? ends_->positions->value : TensorView{}, batch.length, 0, x);
  return x;
}

double Model::HeadAndLoss(std::span<const EndWork> work, GradientSink* sink) {
  const Ends& ends = *ends_;
  double loss = 0;
  // Normalizes one micro-batch in a frame of its own and passes it on.
  const auto for_each = [&](const auto& body) {
    for (const EndWork& item : work) {
      const Arena::Frame frame(backend_.arena());
      const TensorView statistics =
          Activation(backend_, DType::kF32, {item.x.rows(), 2}, "head.statistics");
      const TensorView y = Activation(backend_, compute_dtype(), item.x.shape, "head.y");
      ends.norm.Forward(backend_, item.x, y, statistics);
      body(item, y, statistics);
    }
  };
  if (sink == nullptr) {
    for_each([&](const EndWork& item, TensorView y, TensorView) {
      loss += backend_.HeadLoss(y, ends.head->value, item.pass->batch.targets, 0, {}, {}, false);
    });
    return loss;
  }

  GradientSlot head_slot = sink->Begin(*ends.head);
  NormLayer::Slots norm_slots = ends.norm.Begin(*sink);
  for_each([&](const EndWork& item, TensorView y, TensorView statistics) {
    const TensorView dy = Activation(backend_, compute_dtype(), y.shape, "head.dy");
    loss += backend_.HeadLoss(y, ends.head->value, item.pass->batch.targets, item.pass->loss_scale,
                              dy, head_slot.view, head_slot.add);
    head_slot.add = head_slot.add.Next();
    backend_.Zero(item.dx);
    ends.norm.Backward(backend_, dy, item.x, statistics, item.dx, norm_slots);
  });
  ends.norm.End(*sink, norm_slots);
  sink->End(*ends.head, head_slot);
  return loss;
}

void Model::EmbedBackward(std::span<const EndWork> work, GradientSink& sink) {
  const auto leave = [&](const Parameter& parameter, const auto& backward) {
    GradientSlot slot = sink.Begin(parameter);
    for (const EndWork& item : work) {
      backward(item, slot);
      slot.add = slot.add.Next();
    }
    sink.End(parameter, slot);
  };
  if (ends_->positions) {
    leave(*ends_->positions, [&](const EndWork& item, const GradientSlot& slot) {
      backend_.PositionsBackward(item.dx, item.pass->batch.length, slot.view, slot.add);
    });
  }
  leave(*ends_->tokens, [&](const EndWork& item, const GradientSlot& slot) {
    backend_.EmbeddingBackward(item.dx, item.pass->batch.inputs, slot.view, slot.add);
  });
}

void Model::Logits(TensorView x, TensorView logits) {
  const Arena::Frame frame(backend_.arena());
  const TensorView statistics = Activation(backend_, DType::kF32, {x.rows(), 2}, "head.statistics");
  const TensorView y = Activation(backend_, compute_dtype(), x.shape, "head.y");
  ends_->norm.Forward(backend_, x, y, statistics);
  backend_.Linear(y, ends_->head->value, logits, false);
}

std::unique_ptr<KvCache> Model::NewCache(int64_t capacity) {
  auto cache = std::make_unique<KvCache>();
  cache->capacity = capacity;
  const Shape shape{capacity, config_.kv_heads * config_.HeadWidth()};
  for (size_t layer = 0; layer < blocks_.size(); ++layer) {
    cache->layers.push_back({Activation(backend_, compute_dtype(), shape, "cache.keys"),
                             Activation(backend_, compute_dtype(), shape, "cache.values")});
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
  const TensorView x = Activation(backend_, DType::kF32, {count, config_.width}, "embedding");
  backend_.Embedding(pass.batch.inputs, ends_->tokens->value,
                     ends_->positions ? ends_->positions->value : TensorView{}, count, first, x);
  for (size_t layer = 0; layer < blocks_.size(); ++layer) {
    blocks_[layer]->Decode(pass, first, cache.layers[layer], x);
  }
  Logits(x.Rows(count - 1, 1), logits.Reshaped({1, config_.vocab_size}));
  cache.length += count;
}

}  // namespace terrace
