// What the tests of rules share: parameters in an arena of their own, and the formulas in plain
// double arithmetic.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/arena.h"
#include "core/rng.h"
#include "optim/rules/rules.h"

namespace terrace {

enum class EpsMode { kAbsolute, kRelative };
enum class SecondMoment { kFactored, kExact };

// Settings of skewadam, or those of adamw among them, as the formulas below read them.
struct RuleSettings {
  float weight_decay = 0;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  EpsMode eps_mode = EpsMode::kAbsolute;
  std::string momentum = "f32";
  SecondMoment second_moment = SecondMoment::kFactored;
  double rms_clip = 1;
};

inline Settings SettingsFor(std::string_view rule, const RuleSettings& settings) {
  Settings all = {{"beta1", settings.beta1}, {"beta2", settings.beta2}, {"eps", settings.eps}};
  if (rule != "skewadam") return all;
  const bool relative = settings.eps_mode == EpsMode::kRelative;
  const bool exact = settings.second_moment == SecondMoment::kExact;
  all["eps_mode"] = relative ? "relative" : "absolute";
  all["momentum"] = settings.momentum;
  all["second_moment"] = exact ? "exact" : "factored";
  all["rms_clip"] = settings.rms_clip;
  if (settings.momentum == "none") all.erase("beta1");
  return all;
}

inline void Fill(TensorView view, const std::vector<float>& values) {
  ASSERT_EQ(view.size(), static_cast<int64_t>(values.size()));
  for (int64_t i = 0; i < view.size(); ++i) {
    if (view.dtype == DType::kF32) {
      view.as<float>()[i] = values[i];
    } else {
      view.as<BF16>()[i] = ToBF16(values[i]);
    }
  }
}

inline std::vector<float> ValuesOf(TensorView view) {
  std::vector<float> values(view.size());
  for (int64_t i = 0; i < view.size(); ++i) {
    values[i] = view.dtype == DType::kF32 ? view.as<float>()[i] : ToFloat(view.as<BF16>()[i]);
  }
  return values;
}

// Uniform with mean 0, rounded to what bfloat16 holds so that both dtypes can start alike.
inline std::vector<float> RandomValues(int64_t size, double stddev, uint64_t key) {
  std::vector<float> values(size);
  const double width = stddev * std::sqrt(12.0);
  for (int64_t i = 0; i < size; ++i) {
    values[i] = ToFloat(ToBF16(static_cast<float>(width * (RandomUniform(key, i) - 0.5))));
  }
  return values;
}

// One parameter, its gradient and its state under one rule.
class RuleBench {
 public:
  RuleBench(const std::string& rule, const RuleSettings& settings, Shape shape,
            DType weight_dtype = DType::kF32, DType gradient_dtype = DType::kF32)
      : RuleBench(rule, SettingsFor(rule, settings), settings.weight_decay, shape, weight_dtype,
                  gradient_dtype) {}

  RuleBench(std::string_view rule, const Settings& settings, float weight_decay, Shape shape,
            DType weight_dtype = DType::kF32, DType gradient_dtype = DType::kF32,
            int neuron_axis = 0)
      : rule_(MakeRule(rule, settings)),
        arena_(BytesFor(*rule_, weight_dtype, gradient_dtype, shape, neuron_axis)) {
    parameter_ = ParameterOf(shape, neuron_axis);
    parameter_.value = arena_.Allocate(Memory::kWeights, weight_dtype, shape, "tensor");
    gradient_ = arena_.Allocate(Memory::kGradients, gradient_dtype, shape, "gradient");
    for (const StateSpec& spec : rule_->State(parameter_)) {
      state_.push_back(arena_.Allocate(Memory::kOptimizer, spec.dtype, spec.shape, "state"));
      std::memset(state_.back().data, 0, state_.back().bytes());
      if (spec.hidden_decay) gradient_ = state_.back();
      decay_ = spec.hidden_decay;
    }
    const int64_t scratch_bytes = rule_->ScratchBytes(parameter_, /*all_threads=*/true);
    context_ = {.learning_rate = 0.01f,
                .weight_decay = weight_decay,
                .gradient_scale = 1,
                .tensor_step = 0,
                .rounding_key = 0,
                .scratch = arena_.Allocate(Memory::kScratch, DType::kU8, {scratch_bytes}, "").data};
  }

  const Rule& rule() const { return *rule_; }
  const Parameter& parameter() const { return parameter_; }
  TensorView weight() const { return parameter_.value; }
  TensorView gradient() const { return gradient_; }
  std::vector<TensorView>& state() { return state_; }
  StepContext& context() { return context_; }

  // Into the hidden buffer, where the rule has one, as a sink would.
  void SetGradient(const std::vector<float>& values) {
    if (!decay_) return Fill(gradient_, values);
    std::vector<float> sums = ValuesOf(gradient_);
    for (size_t i = 0; i < sums.size(); ++i) sums[i] = sums[i] * *decay_ + values[i];
    Fill(gradient_, sums);
  }

  UpdateReport Step() {
    ++context_.tensor_step;
    context_.rounding_key = MixKeys(17, context_.tensor_step);
    return rule_->Apply(parameter_, gradient_, state_, context_);
  }

  // The same by a gradient that was measured first, as a sink does it. Returns its sum of squares.
  double StepMeasured() {
    std::vector<float> measured(rule_->MeasuredFloats(parameter_), std::nanf(""));
    float* const left = measured.empty() ? nullptr : measured.data();
    const double squares =
        rule_->Measure(parameter_, gradient_, state_, context_.tensor_step + 1, left);
    context_.measured = left;
    Step();
    context_.measured = nullptr;
    return squares;
  }

 private:
  static Parameter ParameterOf(const Shape& shape, int neuron_axis) {
    Parameter parameter;
    parameter.name = "tensor";
    parameter.population = Population::kExpert;
    parameter.id = 0;
    parameter.neuron_axis = neuron_axis;
    parameter.value.shape = shape;
    return parameter;
  }

  // What the constructor takes; a rule's scratch depends on the processor.
  static int64_t BytesFor(const Rule& rule, DType weight_dtype, DType gradient_dtype,
                          const Shape& shape, int neuron_axis) {
    Parameter parameter = ParameterOf(shape, neuron_axis);
    parameter.value.dtype = weight_dtype;
    Arena dry = Arena::Dry();
    dry.Allocate(Memory::kWeights, weight_dtype, shape, "tensor");
    dry.Allocate(Memory::kGradients, gradient_dtype, shape, "gradient");
    dry.Allocate(Memory::kScratch, DType::kU8, {rule.ScratchBytes(parameter, /*all_threads=*/true)},
                 "scratch");
    for (const StateSpec& spec : rule.State(parameter)) {
      dry.Allocate(Memory::kOptimizer, spec.dtype, spec.shape, "state");
    }
    return dry.ledger().total_peak_bytes;
  }

  std::unique_ptr<Rule> rule_;
  Arena arena_;
  Parameter parameter_;
  TensorView gradient_;
  std::optional<float> decay_;
  std::vector<TensorView> state_;
  StepContext context_;
};

// Errors that parity tests must be able to see.
enum class Mutation { kNone, kDecayAfterUpdate, kAddedEps };

// The formulas of rules/skewadam.cpp and rules/adamw.cpp, in double.
class PlainRule {
 public:
  PlainRule(bool adamw, const RuleSettings& settings, double learning_rate, int64_t rows,
            int64_t columns, bool factored, Mutation mutation = Mutation::kNone)
      : adamw_(adamw),
        s_(settings),
        lr_(learning_rate),
        rows_(rows),
        columns_(columns),
        factored_(factored),
        mutation_(mutation),
        m_(rows * columns),
        v_(rows * columns),
        vr_(rows),
        vc_(columns) {}

  void Step(std::vector<double>& w, const std::vector<float>& g) {
    ++step_;
    const int64_t size = rows_ * columns_;
    const double keep = 1 - lr_ * s_.weight_decay;
    if (mutation_ != Mutation::kDecayAfterUpdate) Scale(w, keep);

    const std::vector<double> denominator = Denominators(g);
    const double b1 = 1 - std::pow(s_.beta1, step_);
    const double b2 = std::sqrt(1 - std::pow(s_.beta2, step_));
    std::vector<double> u(size);
    for (int64_t i = 0; i < size; ++i) {
      m_[i] = s_.beta1 * m_[i] + (1 - s_.beta1) * g[i];
      if (adamw_) {
        u[i] = m_[i] / b1 / (denominator[i] / b2 + s_.eps);
      } else {
        u[i] = (s_.momentum != "none" ? m_[i] * b2 / b1 : g[i] * b2) / denominator[i];
      }
    }
    double squares = 0;
    for (double x : u) squares += x * x;
    const double rms = std::sqrt(squares / static_cast<double>(size));
    const double clip = s_.rms_clip > 0 ? std::max(1.0, rms / s_.rms_clip) : 1;
    for (int64_t i = 0; i < size; ++i) w[i] -= lr_ * u[i] / clip;
    if (mutation_ == Mutation::kDecayAfterUpdate) Scale(w, keep);
  }

 private:
  static void Scale(std::vector<double>& w, double factor) {
    for (double& x : w) x *= factor;
  }

  // sqrt of v, above the floor.
  double Root(double v, double eps) const {
    if (adamw_) return std::sqrt(v);
    return mutation_ == Mutation::kAddedEps ? std::sqrt(v) + eps : std::sqrt(std::max(v, eps));
  }

  static double Mean(const std::vector<double>& v) {
    double sum = 0;
    for (double x : v) sum += x;
    return sum / static_cast<double>(v.size());
  }

  std::vector<double> Denominators(const std::vector<float>& g) {
    std::vector<double> result(rows_ * columns_);
    const bool relative = s_.eps_mode == EpsMode::kRelative;
    if (!factored_) {
      for (int64_t i = 0; i < rows_ * columns_; ++i) {
        v_[i] = s_.beta2 * v_[i] + (1 - s_.beta2) * double{g[i]} * g[i];
      }
      const double eps = relative ? std::max(s_.eps * Mean(v_), 1e-30) : s_.eps;
      for (int64_t i = 0; i < rows_ * columns_; ++i) result[i] = Root(v_[i], eps);
      return result;
    }
    std::vector<double> r(rows_), c(columns_);
    for (int64_t i = 0; i < rows_; ++i) {
      for (int64_t j = 0; j < columns_; ++j) {
        const double square = double{g[i * columns_ + j]} * g[i * columns_ + j];
        r[i] += square / static_cast<double>(columns_);
        c[j] += square / static_cast<double>(rows_);
      }
    }
    for (int64_t i = 0; i < rows_; ++i) vr_[i] = s_.beta2 * vr_[i] + (1 - s_.beta2) * r[i];
    for (int64_t j = 0; j < columns_; ++j) vc_[j] = s_.beta2 * vc_[j] + (1 - s_.beta2) * c[j];
    const double mean = std::max(Mean(vr_), relative ? 1e-30 : 1e-15);
    const double eps = relative ? std::max(s_.eps * Mean(vc_), 1e-30) : s_.eps;
    for (int64_t i = 0; i < rows_; ++i) {
      for (int64_t j = 0; j < columns_; ++j) {
        result[i * columns_ + j] = Root(vr_[i] / mean, s_.eps) * Root(vc_[j], eps);
      }
    }
    return result;
  }

  bool adamw_;
  RuleSettings s_;
  double lr_;
  int64_t rows_;
  int64_t columns_;
  bool factored_;
  Mutation mutation_;
  int step_ = 0;
  std::vector<double> m_, v_, vr_, vc_;
};

}  // namespace terrace
