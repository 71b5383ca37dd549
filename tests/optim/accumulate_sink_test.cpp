#include "optim/accumulate_sink.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "optim/rule_testing.h"
#include "support/message_of.h"

namespace terrace {
namespace {

using testing::HasSubstr;

constexpr float kRate = 0.01f;

// Tokens (tied: two contributions a pass), a norm, three experts.
class AccumulateSinkTest : public testing::Test {
 protected:
  AccumulateSinkTest() {
    Make("tokens", Population::kEmbedding, {20, 8}).contributions = 2;
    Make("norm", Population::kNorm, {8}, DType::kF32);
    for (const char* name : {"expert.0", "expert.1", "expert.2"}) {
      Make(name, Population::kExpert, {12, 8});
    }
    optimizer_ = std::make_unique<Optimizer>(PolicyNamed("skewadam"), parameters_, arena_, 1);
  }

  Parameter& Make(const std::string& name, Population population, Shape shape,
                  DType dtype = DType::kBF16) {
    Parameter& parameter = parameters_.emplace_back();
    parameter.name = name;
    parameter.population = population;
    parameter.id = static_cast<int64_t>(parameters_.size()) - 1;
    parameter.value = arena_.Allocate(Memory::kWeights, dtype, shape, parameter.name.c_str());
    Fill(parameter.value, RandomValues(shape.size(), 0.5, parameter.id));
    return parameter;
  }

  AccumulateSink& MakeSink(const Clipping& clipping, DType dtype = DType::kF32) {
    sink_ = std::make_unique<AccumulateSink>(parameters_, *optimizer_, arena_, dtype, clipping);
    return *sink_;
  }

  // One contribution of a constant, as a layer leaves it.
  void Give(int64_t id, float value) {
    const Parameter& parameter = parameters_[id];
    const GradientSlot slot = sink_->Begin(parameter);
    std::vector<float> sum(slot.view.size(), value);
    if (slot.add) {
      const std::vector<float> old = ValuesOf(slot.view);
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += old[i];
    }
    Fill(slot.view, sum);
    sink_->End(parameter, slot);
  }

  // One backward pass in which every tensor but the experts in `idle` gets `value` in all.
  void Pass(float value, const std::vector<int64_t>& idle = {}) {
    Give(0, value / 2);
    for (int64_t id = 2; id < 5; ++id) {
      if (std::count(idle.begin(), idle.end(), id - 2) > 0) {
        sink_->Skip(parameters_[id]);
      } else {
        Give(id, value);
      }
    }
    Give(1, value);
    Give(0, value / 2);
  }

  std::vector<std::vector<float>> Weights() const {
    std::vector<std::vector<float>> weights;
    for (const Parameter& parameter : parameters_) weights.push_back(ValuesOf(parameter.value));
    return weights;
  }

  Arena arena_{1 << 20};
  Parameters parameters_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<AccumulateSink> sink_;
};

constexpr int64_t kElements = 20 * 8 + 8 + 3 * 12 * 8;
constexpr Clipping kUnclipped{.kind = ClippingKind::kNone};

TEST_F(AccumulateSinkTest, SumsContributionsAndReplacesTheLastStep) {
  AccumulateSink& sink = MakeSink(kUnclipped);
  for (int step = 0; step < 2; ++step) {
    sink.BeginStep(3, kRate);
    for (int micro_batch = 0; micro_batch < 3; ++micro_batch) Pass(0.5f);
    for (const Parameter& parameter : parameters_) {
      for (float g : ValuesOf(sink.Gradient(parameter))) ASSERT_EQ(g, 1.5f) << parameter.name;
    }
    const StepResult result = sink.Finish();
    EXPECT_DOUBLE_EQ(result.gradient_norm, 1.5 * std::sqrt(kElements));
    EXPECT_EQ(result.gradient_scale, 1);
    EXPECT_EQ(result.updated_tensors, 5);
    EXPECT_EQ(result.skipped_tensors, 0);
    EXPECT_EQ(result.not_finite, nullptr);
    // Factored columns of the experts.
    EXPECT_EQ(result.reports[static_cast<int>(Population::kExpert)].entries, 3 * 8);
    EXPECT_EQ(optimizer_->steps()[0], step + 1);
  }
}

TEST_F(AccumulateSinkTest, MicroBatchesEqualOneBatch) {
  AccumulateSink& sink = MakeSink({});
  sink.BeginStep(4, kRate);
  for (int micro_batch = 0; micro_batch < 4; ++micro_batch) Pass(0.25f);
  sink.Finish();
  const auto split = Weights();

  for (Parameter& parameter : parameters_) {
    Fill(parameter.value, RandomValues(parameter.value.size(), 0.5, parameter.id));
  }
  Optimizer fresh(PolicyNamed("skewadam"), parameters_, arena_, 1);
  sink_ = std::make_unique<AccumulateSink>(parameters_, fresh, arena_, DType::kF32, Clipping{});
  sink_->BeginStep(1, kRate);
  Pass(1.0f);
  sink_->Finish();
  EXPECT_EQ(split, Weights());
}

TEST_F(AccumulateSinkTest, IdleExpertsStayAsTheyAre) {
  AccumulateSink& sink = MakeSink(kUnclipped);
  sink.BeginStep(2, kRate);
  Pass(1);
  Pass(1);
  sink.Finish();
  // First, last, all but one; in every micro-batch.
  for (const std::vector<int64_t>& idle :
       {std::vector<int64_t>{0}, std::vector<int64_t>{2}, std::vector<int64_t>{0, 2}}) {
    const auto before = Weights();
    const auto state_before = [&] {
      std::vector<std::vector<float>> values;
      for (const TensorView& view : optimizer_->state()) values.push_back(ValuesOf(view));
      return values;
    };
    const auto state = state_before();
    const std::vector<int64_t> steps(optimizer_->steps().begin(), optimizer_->steps().end());
    sink.BeginStep(2, kRate);
    Pass(0.5f, idle);
    Pass(0.5f, idle);
    const StepResult result = sink.Finish();
    const auto after = Weights();
    const auto state_after = state_before();
    const int64_t idle_count = static_cast<int64_t>(idle.size());
    EXPECT_EQ(result.skipped_tensors, idle_count);
    // The stale gradient of an idle expert is no part of the norm.
    EXPECT_DOUBLE_EQ(result.gradient_norm, std::sqrt(kElements - idle_count * 96));
    for (int64_t expert = 0; expert < 3; ++expert) {
      const bool is_idle = std::count(idle.begin(), idle.end(), expert) > 0;
      const int64_t id = 2 + expert;
      EXPECT_EQ(after[id] == before[id], is_idle) << expert;
      EXPECT_EQ(optimizer_->steps()[id], steps[id] + !is_idle);
    }
    for (size_t i = 0; i < state.size(); ++i) {
      const std::string name = optimizer_->state()[i].name;
      const bool is_idle =
          name.starts_with("expert.") && std::count(idle.begin(), idle.end(), name[7] - '0') > 0;
      EXPECT_EQ(state[i] == state_after[i], is_idle) << name;
    }
  }
}

TEST_F(AccumulateSinkTest, AllExpertsIdle) {
  AccumulateSink& sink = MakeSink({});
  sink.BeginStep(1, kRate);
  Pass(1, {0, 1, 2});
  const StepResult result = sink.Finish();
  EXPECT_EQ(result.not_finite, nullptr);
  EXPECT_EQ(result.skipped_tensors, 3);
  EXPECT_DOUBLE_EQ(result.gradient_norm, std::sqrt(168));
}

// Skipped first, then not, and the other way round: only what was given counts.
TEST_F(AccumulateSinkTest, SkipsMixWithContributions) {
  AccumulateSink& sink = MakeSink(kUnclipped);
  sink.BeginStep(1, kRate);
  Pass(7);
  sink.Finish();
  sink.BeginStep(3, kRate);
  Pass(1, {0, 1});
  Pass(2, {0});
  Pass(4, {1, 2});
  EXPECT_THAT(ValuesOf(sink.Gradient(parameters_[2])), testing::Each(4.0f));
  EXPECT_THAT(ValuesOf(sink.Gradient(parameters_[3])), testing::Each(2.0f));
  EXPECT_THAT(ValuesOf(sink.Gradient(parameters_[4])), testing::Each(3.0f));
  const StepResult result = sink.Finish();
  EXPECT_DOUBLE_EQ(result.gradient_norm, std::sqrt(168 * 49 + 96 * 16 + 96 * 4 + 96 * 9));
  EXPECT_EQ(result.skipped_tensors, 0);
}

TEST_F(AccumulateSinkTest, ClipsByGlobalNormPerTensorOrNot) {
  AccumulateSink& global = MakeSink({.max_norm = 2});
  global.BeginStep(1, kRate);
  Pass(1);
  StepResult result = global.Finish();
  const double norm = std::sqrt(kElements);
  EXPECT_DOUBLE_EQ(result.gradient_norm, norm);
  EXPECT_FLOAT_EQ(result.gradient_scale, static_cast<float>(2 / (norm + 1e-6)));

  global.BeginStep(1, kRate);
  Pass(1e-3f);
  EXPECT_EQ(global.Finish().gradient_scale, 1);

  // Momentum shows what scale each tensor had: 0.1 * scale * 1 at the first step.
  const auto first_momentum = [&](const Clipping& clipping, const std::string& name) {
    optimizer_ = std::make_unique<Optimizer>(PolicyNamed("skewadam"), parameters_, arena_, 1);
    AccumulateSink& sink = MakeSink(clipping);
    sink.BeginStep(1, kRate);
    Pass(1);
    sink.Finish();
    for (const TensorView& view : optimizer_->state()) {
      if (view.name == name) return view.as<float>()[0];
    }
    return -1.0f;
  };
  EXPECT_FLOAT_EQ(first_momentum(kUnclipped, "norm.momentum"), 0.1f);
  EXPECT_FLOAT_EQ(first_momentum({.max_norm = 2}, "norm.momentum"), static_cast<float>(0.2 / norm));
  const Clipping per_tensor{.kind = ClippingKind::kPerTensor, .max_norm = 2};
  EXPECT_FLOAT_EQ(first_momentum(per_tensor, "norm.momentum"),
                  static_cast<float>(0.2 / std::sqrt(8)));
  EXPECT_FLOAT_EQ(first_momentum(per_tensor, "tokens.momentum"),
                  static_cast<float>(0.2 / std::sqrt(160)));
}

TEST_F(AccumulateSinkTest, NonFiniteGradientsChangeNothingAndAreNamed) {
  for (float bad :
       {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    AccumulateSink& sink = MakeSink({}, DType::kBF16);
    const auto before = Weights();
    // One element alone, in two tensors: the first in the model's order is named.
    sink.BeginStep(1, kRate);
    Give(0, 1);
    Give(0, 1);
    for (int64_t id : {4, 3, 2, 1}) {
      const GradientSlot slot = sink.Begin(parameters_[id]);
      Fill(slot.view, std::vector<float>(slot.view.size(), 1));
      if (id == 2 || id == 4) slot.view.as<BF16>()[95] = ToBF16(bad);
      sink.End(parameters_[id], slot);
    }
    const StepResult result = sink.Finish();
    ASSERT_NE(result.not_finite, nullptr);
    EXPECT_EQ(result.not_finite->name, "expert.0");
    EXPECT_FALSE(std::isfinite(result.gradient_norm));
    EXPECT_EQ(result.updated_tensors, 0);
    EXPECT_EQ(Weights(), before);
    EXPECT_THAT(optimizer_->steps(), testing::Each(0));
  }
}

TEST_F(AccumulateSinkTest, GradientTypesFollowTheWeights) {
  AccumulateSink& sink = MakeSink({}, DType::kBF16);
  EXPECT_EQ(sink.Gradient(parameters_[0]).dtype, DType::kBF16);
  EXPECT_EQ(sink.Gradient(parameters_[1]).dtype, DType::kF32);  // its weight is float32
  const AccumulateSink& wide = MakeSink({}, DType::kF32);
  EXPECT_EQ(wide.Gradient(parameters_[0]).dtype, DType::kF32);
}

TEST_F(AccumulateSinkTest, DryRunsCountStepsOnly) {
  for (Parameter& parameter : parameters_) parameter.value.data = nullptr;
  Arena dry = Arena::Dry();
  Optimizer optimizer(PolicyNamed("skewadam"), parameters_, dry, 1);
  AccumulateSink sink(parameters_, optimizer, dry, DType::kF32, {});
  sink.BeginStep(1, kRate);
  for (const Parameter& parameter : parameters_) {
    for (int i = 0; i < parameter.contributions; ++i) sink.End(parameter, sink.Begin(parameter));
  }
  const StepResult result = sink.Finish();
  EXPECT_EQ(result.not_finite, nullptr);
  EXPECT_EQ(result.updated_tensors, 5);
}

TEST_F(AccumulateSinkTest, MisuseIsNamed) {
  AccumulateSink& sink = MakeSink({});
  const Parameter& norm = parameters_[1];
  EXPECT_THAT(MessageOf<InternalError>([&] { sink.Begin(norm); }),
              HasSubstr("norm: gradient outside a step"));
  EXPECT_THAT(MessageOf<InternalError>([&] { sink.Skip(norm); }),
              HasSubstr("norm: skipped outside a step"));
  EXPECT_THAT(MessageOf<InternalError>([&] { sink.Finish(); }), HasSubstr("Finish outside a step"));

  sink.BeginStep(1, kRate);
  EXPECT_THAT(MessageOf<InternalError>([&] { sink.End(norm, {}); }),
              HasSubstr("norm: End without its Begin"));
  const GradientSlot slot = sink.Begin(norm);
  EXPECT_THAT(MessageOf<InternalError>([&] { sink.Begin(norm); }), HasSubstr("norm: Begin twice"));
  EXPECT_THAT(MessageOf<InternalError>([&] { sink.Finish(); }),
              HasSubstr("norm: Begin without End"));
  sink.Begin(parameters_[2]);
  EXPECT_THAT(MessageOf<InternalError>([&] { sink.End(norm, slot); }),
              HasSubstr("norm: End without its Begin"));

  sink.BeginStep(1, kRate);
  Give(1, 1);
  EXPECT_THAT(MessageOf<InternalError>([&] { sink.Skip(norm); }),
              HasSubstr("norm: 2 gradient contributions, 1 were announced"));
  sink.BeginStep(2, kRate);
  Pass(1);
  EXPECT_THAT(MessageOf<InternalError>([&] { sink.Finish(); }),
              HasSubstr("tokens: 2 gradient contributions in 2 micro-batches, not 4"));

  EXPECT_THAT(MessageOf([&] { MakeSink({.max_norm = 0}); }), HasSubstr("clipping.max_norm"));
}

}  // namespace
}  // namespace terrace
