// What the model's tests share: backends by name, a model with its arena, batches, a training pass.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "core/rng.h"
#include "model/model.h"
#include "support/reference_backend.h"

namespace terrace {

struct BackendChoice {
  const char* name;
  std::unique_ptr<Backend> (*make)(Arena& arena);
};
inline std::ostream& operator<<(std::ostream& out, const BackendChoice& choice) {
  return out << choice.name;
}

inline constexpr BackendChoice kReference = {"Reference",
                                             [](Arena& arena) -> std::unique_ptr<Backend> {
                                               return std::make_unique<ReferenceBackend>(arena);
                                             }};
inline constexpr BackendChoice kCpu = {"Cpu", [](Arena& arena) -> std::unique_ptr<Backend> {
                                         return std::make_unique<CpuBackend>(arena);
                                       }};

// Every test of a suite of this kind runs on every backend.
class ModelTest : public testing::TestWithParam<BackendChoice> {};
#define TERRACE_ON_ALL_BACKENDS(suite)                                         \
  INSTANTIATE_TEST_SUITE_P(Backends, suite, testing::Values(kReference, kCpu), \
                           [](const auto& about) { return std::string(about.param.name); })

// Tokens and targets of one micro-batch, on the host.
struct HostBatch {
  int64_t sequences, length;
  std::vector<int32_t> inputs, targets;

  MicroBatch View() {
    const Shape shape{sequences * length};
    return {sequences,
            length,
            {reinterpret_cast<std::byte*>(inputs.data()), DType::kI32, shape, "inputs"},
            {reinterpret_cast<std::byte*>(targets.data()), DType::kI32, shape, "targets"}};
  }
  int64_t Counted() const {
    return std::ssize(targets) - std::count(targets.begin(), targets.end(), kIgnoredTarget);
  }
};

inline HostBatch RandomBatch(const ModelConfig& config, int64_t sequences, int64_t length,
                             uint64_t seed) {
  HostBatch batch{sequences, length, {}, {}};
  const auto draw = [&](uint64_t counter) {
    return static_cast<int32_t>(RandomBits(seed, counter) % config.vocab_size);
  };
  for (int64_t n = 0; n < sequences * length; ++n) {
    batch.inputs.push_back(draw(2 * n));
    batch.targets.push_back(draw(2 * n + 1));
  }
  return batch;
}

// A pass whose loss is the mean over the batch's counted tokens.
inline Pass PassOf(HostBatch& batch) {
  Pass pass;
  pass.batch = batch.View();
  pass.loss_scale = 1.0f / static_cast<float>(std::max<int64_t>(batch.Counted(), 1));
  return pass;
}

// Keeps every gradient, and holds layers to the contract of model/gradient_sink.h.
class TestSink final : public GradientSink {
 public:
  GradientSlot Begin(const Parameter& parameter) override {
    EXPECT_TRUE(open_.empty() || open_.back() != &parameter) << parameter.name << " begun twice";
    open_.push_back(&parameter);
    std::vector<float>& gradient = gradients[parameter.name];
    const bool add = !gradient.empty();
    // Garbage where a layer is told to replace: NaN.
    if (!add) gradient.assign(parameter.value.size(), std::nanf(""));
    return {{reinterpret_cast<std::byte*>(gradient.data()), DType::kF32, parameter.value.shape,
             parameter.name.c_str()},
            add};
  }
  void End(const Parameter& parameter, const GradientSlot& slot) override {
    ASSERT_FALSE(open_.empty());
    EXPECT_EQ(open_.back(), &parameter) << "interleaved";
    EXPECT_EQ(slot.view.shape, parameter.value.shape);
    open_.pop_back();
    ++ends[parameter.name];
    // A sink may update the parameter now: a layer that still reads it would see this.
    if (spoil_after_end && ends[parameter.name] == parameter.contributions) {
      std::memset(parameter.value.data, 0xff, parameter.value.bytes());
    }
  }
  void Skip(const Parameter& parameter) override {
    EXPECT_TRUE(open_.empty());
    ++skips[parameter.name];
  }

  bool spoil_after_end = false;  // overwrite a parameter with NaN once its gradient is complete
  std::map<std::string, std::vector<float>> gradients;
  std::map<std::string, int> ends, skips;

 private:
  std::vector<const Parameter*> open_;
};

// For dry runs and ledgers: slots in scratch, alive between Begin and End, as a sink that applies
// updates at once has them.
class ScratchSink final : public GradientSink {
 public:
  explicit ScratchSink(Arena& arena) : arena_(arena) {}
  GradientSlot Begin(const Parameter& parameter) override {
    frames_.emplace_back(arena_);
    return {arena_.Allocate(Memory::kGradients, DType::kF32, parameter.value.shape, "slot"), false};
  }
  void End(const Parameter&, const GradientSlot&) override { frames_.pop_back(); }
  void Skip(const Parameter&) override {}

 private:
  Arena& arena_;
  std::vector<Arena::Frame> frames_;
};

struct Losses {
  double tokens = 0;   // sum over all tokens, in nats
  double balance = 0;  // auxiliary and z losses of all layers and micro-batches
  std::vector<LayerRouting> routings;
};

// A model on an arena of its own, with some room for activations.
class TestModel {
 public:
  TestModel(const ModelConfig& config, const BackendChoice& choice)
      : TestModel(config, choice, Arena(kCapacityBytes)) {}
  TestModel(const ModelConfig& config, const BackendChoice& choice, Arena arena)
      : arena_(std::move(arena)), backend_(choice.make(arena_)), model_(config, *backend_) {}

  Arena& arena() { return arena_; }
  Backend& backend() { return *backend_; }
  Model& model() { return model_; }
  Model* operator->() { return &model_; }
  TensorView Value(const std::string& name) { return model_.Find(name).value; }
  void Set(const std::string& name, const std::vector<float>& values) {
    const TensorView value = Value(name);
    ASSERT_EQ(std::ssize(values), value.size());
    for (int64_t i = 0; i < value.size(); ++i) SetElement(value, i, values[i]);
  }

  // All parameters N(0, deviation^2), router included; norm weights around 1.
  void Randomize(uint64_t seed, double stddev) {
    for (Parameter& parameter : model_.parameters()) {
      for (int64_t i = 0; i < parameter.value.size(); ++i) {
        const double noise = stddev * RandomNormal(MixKeys(seed, parameter.id), i);
        SetElement(parameter.value, i, parameter.init_constant + noise);
      }
    }
  }

  Losses Forward(const Pass& pass) { return Run({&pass, 1}, nullptr); }
  Losses Step(const Pass& pass, GradientSink& sink) { return Run({&pass, 1}, &sink); }

  // Forward and, with a sink, backward of all passes together.
  Losses Run(std::span<const Pass> passes, GradientSink* sink) {
    const Arena::Frame frame(arena_);
    Losses losses;
    const auto blocks = model_.blocks();
    std::vector<Model::EndWork> ends;
    std::vector<std::vector<std::unique_ptr<Block::Saved>>> saved(passes.size());
    for (size_t i = 0; i < passes.size(); ++i) {
      TensorView x = model_.Embed(passes[i]);
      saved[i].resize(blocks.size());
      for (size_t layer = 0; layer < blocks.size(); ++layer) {
        LayerRouting routing;
        x = blocks[layer]->Forward(passes[i], x, saved[i][layer], &routing);
        if (blocks[layer]->feed_forward() != FeedForwardKind::kMoe) continue;
        losses.balance += routing.statistics.aux_loss + routing.statistics.z_loss;
        losses.routings.push_back(std::move(routing));
      }
      ends.push_back({&passes[i], x, {}});
    }
    if (sink != nullptr) {
      for (Model::EndWork& end : ends) {
        end.dx = arena_.Allocate(Memory::kActivations, DType::kF32, end.x.shape, "dx");
      }
    }
    losses.tokens = model_.HeadAndLoss(ends, sink);
    if (sink == nullptr) return losses;
    for (size_t layer = blocks.size(); layer-- > 0;) {
      std::vector<Block::Work> work;
      for (size_t i = 0; i < passes.size(); ++i) {
        work.push_back({&passes[i], saved[i][layer].get(), ends[i].dx});
      }
      blocks[layer]->Backward(work, *sink);
    }
    model_.EmbedBackward(ends, *sink);
    return losses;
  }

  // f32 [N * V] of one pass.
  std::vector<float> Logits(const Pass& pass) {
    const Arena::Frame frame(arena_);
    TensorView x = model_.Embed(pass);
    std::vector<std::unique_ptr<Block::Saved>> saved(model_.blocks().size());
    for (size_t layer = 0; layer < saved.size(); ++layer) {
      x = model_.blocks()[layer]->Forward(pass, x, saved[layer], nullptr);
    }
    const TensorView logits = arena_.Allocate(Memory::kActivations, DType::kF32,
                                              {x.rows(), model_.config().vocab_size}, "logits");
    model_.Logits(x, logits);
    const auto span = logits.span<float>();
    return {span.begin(), span.end()};
  }

 private:
  static constexpr int64_t kCapacityBytes = int64_t{64} << 20;

  Arena arena_;
  std::unique_ptr<Backend> backend_;
  Model model_;
};

// A small model with every feature on: two layers, dense then MoE.
inline ModelConfig SmallConfig() {
  ModelConfig config;
  config.vocab_size = 23;
  config.max_positions = 9;
  config.width = 16;
  config.layers = 2;
  config.heads = 4;
  config.kv_heads = 2;
  config.ffn_width = 24;
  config.ffn = {FeedForwardKind::kDense, FeedForwardKind::kMoe};
  config.experts = 5;
  config.expert_width = 20;
  config.router.top_k = 2;
  config.router.aux_coefficient = 0.05f;
  config.router.z_coefficient = 1e-3f;
  return config;
}

inline double Norm(const std::vector<float>& values) {
  double sum = 0;
  for (float value : values) sum += static_cast<double>(value) * value;
  return std::sqrt(sum);
}

// Largest difference over the largest entry of `expected`; NaN anywhere gives NaN.
template <typename Actual, typename Expected>
double RelativeError(const Actual& actual, const Expected& expected) {
  EXPECT_EQ(std::size(actual), std::size(expected));
  double difference = 0, largest = 0;
  for (size_t i = 0; i < std::size(expected); ++i) {
    const double delta = std::abs(static_cast<double>(actual[i]) - expected[i]);
    if (!(delta <= difference)) difference = delta;
    largest = std::max(largest, std::abs(static_cast<double>(expected[i])));
    if (std::isnan(delta)) return delta;
  }
  return largest == 0 ? difference : difference / largest;
}

// Every gradient of `expected` is in `actual`, within `tolerance` of the tensor's largest entry.
inline void ExpectGradientsNear(const TestSink& actual, const TestSink& expected,
                                double tolerance) {
  EXPECT_EQ(actual.gradients.size(), expected.gradients.size());
  for (const auto& [name, gradient] : expected.gradients) {
    const auto found = actual.gradients.find(name);
    ASSERT_NE(found, actual.gradients.end()) << name;
    EXPECT_LE(RelativeError(found->second, gradient), tolerance) << name;
  }
}

}  // namespace terrace
