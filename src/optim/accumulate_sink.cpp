#include "optim/accumulate_sink.h"

#include <cmath>

namespace terrace {

AccumulateSink::AccumulateSink(const Parameters& parameters, Optimizer& optimizer, Arena& arena,
                               DType gradient_dtype, const Clipping& clipping)
    : parameters_(parameters), optimizer_(optimizer), dry_(arena.dry()), clipping_(clipping) {
  clipping.Check();
  TERRACE_CHECK(gradient_dtype == DType::kF32 || gradient_dtype == DType::kBF16, "gradients of {}",
                NameOf(gradient_dtype));
  for (const Parameter& parameter : parameters) {
    if (const TensorView kept = optimizer.KeptGradient(parameter); !kept.empty()) {
      gradients_.push_back({.view = kept, .outlives_step = true});
      continue;
    }
    const DType dtype = GradientTypeOf(parameter, gradient_dtype);
    gradients_.push_back({.view = arena.Allocate(Memory::kGradients, dtype, parameter.value.shape,
                                                 parameter.name.c_str())});
  }
}

void AccumulateSink::BeginStep(int64_t micro_batches, float learning_rate) {
  TERRACE_CHECK(micro_batches >= 1, "{} micro-batches", micro_batches);
  micro_batches_ = micro_batches;
  learning_rate_ = learning_rate;
  open_.clear();
  for (Kept& kept : gradients_) kept = {.view = kept.view, .outlives_step = kept.outlives_step};
}

GradientSlot AccumulateSink::Begin(const Parameter& parameter) {
  TERRACE_CHECK(micro_batches_ > 0, "{}: gradient outside a step", parameter.name);
  for (int64_t id : open_) {
    TERRACE_CHECK(id != parameter.id, "{}: Begin twice without End", parameter.name);
  }
  open_.push_back(parameter.id);
  const Kept& kept = gradients_[parameter.id];
  if (kept.received == 0 && kept.outlives_step) optimizer_.DecayKeptGradient(parameter);
  // The first contribution replaces what an earlier step left: no pass to zero it is needed.
  return {kept.view, kept.received > 0 || kept.outlives_step};
}

void AccumulateSink::End(const Parameter& parameter, const GradientSlot&) {
  TERRACE_CHECK(!open_.empty() && open_.back() == parameter.id, "{}: End without its Begin",
                parameter.name);
  open_.pop_back();
  Count(parameter, &Kept::received);
}

void AccumulateSink::Skip(const Parameter& parameter) {
  TERRACE_CHECK(micro_batches_ > 0, "{}: skipped outside a step", parameter.name);
  Count(parameter, &Kept::skipped);
}

void AccumulateSink::Count(const Parameter& parameter, int64_t Kept::*counter) {
  Kept& kept = gradients_[parameter.id];
  ++(kept.*counter);
  const int64_t contributions = kept.received + kept.skipped;
  const int64_t expected = micro_batches_ * parameter.contributions;
  TERRACE_CHECK(contributions <= expected, "{}: {} gradient contributions, {} were announced",
                parameter.name, contributions, expected);
  // Now the gradient is likely to be in the caches still.
  if (contributions == expected && kept.received > 0 && !dry_) {
    const double scale = kept.outlives_step ? optimizer_.KeptGradientScale(parameter) : 1;
    kept.squared_norm = scale * scale * SquaredNorm(kept.view);
  }
}

StepResult AccumulateSink::Finish() {
  TERRACE_CHECK(micro_batches_ > 0, "Finish outside a step");
  TERRACE_CHECK(open_.empty(), "{}: Begin without End", parameters_[open_.back()].name);

  StepResult result;
  double squared_norm = 0;
  std::vector<Update> updates;
  for (const Parameter& parameter : parameters_) {
    const Kept& kept = gradients_[parameter.id];
    TERRACE_CHECK(kept.received + kept.skipped == micro_batches_ * parameter.contributions,
                  "{}: {} gradient contributions in {} micro-batches, not {}", parameter.name,
                  kept.received + kept.skipped, micro_batches_,
                  micro_batches_ * parameter.contributions);
    if (kept.received == 0) continue;
    if (!std::isfinite(kept.squared_norm) && result.not_finite == nullptr)
      result.not_finite = &parameter;
    squared_norm += kept.squared_norm;
    updates.push_back({&parameter, kept.view, 1});
  }
  micro_batches_ = 0;
  result.gradient_norm = std::sqrt(squared_norm);
  if (result.not_finite != nullptr) return result;

  if (clipping_.kind == ClippingKind::kGlobalNorm) {
    result.gradient_scale = ClippingScale(result.gradient_norm, clipping_.max_norm);
  }
  for (Update& update : updates) {
    update.gradient_scale = result.gradient_scale;
    if (clipping_.kind == ClippingKind::kPerTensor) {
      const double norm = std::sqrt(gradients_[update.parameter->id].squared_norm);
      update.gradient_scale = ClippingScale(norm, clipping_.max_norm);
    }
  }
  result.updated_tensors = static_cast<int64_t>(updates.size());
  result.skipped_tensors = static_cast<int64_t>(parameters_.size()) - result.updated_tensors;
  result.reports = optimizer_.Apply(updates, learning_rate_);
  return result;
}

}  // namespace terrace
