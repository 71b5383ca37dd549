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
    if (!parameter.trained()) {
      gradients_.push_back({});
      continue;
    }
    if (const TensorView hidden = optimizer.HiddenBuffer(parameter); !hidden.empty()) {
      gradients_.push_back({.view = hidden, .hidden = true});
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
  for (Buffer& buffer : gradients_) buffer = {.view = buffer.view, .hidden = buffer.hidden};
}

GradientSlot AccumulateSink::Begin(const Parameter& parameter) {
  TERRACE_CHECK(micro_batches_ > 0, "{}: gradient outside a step", parameter.name);
  for (int64_t id : open_) {
    TERRACE_CHECK(id != parameter.id, "{}: Begin twice without End", parameter.name);
  }
  open_.push_back(parameter.id);
  Buffer& buffer = gradients_[parameter.id];
  if (buffer.received == 0) {
    if (buffer.hidden) optimizer_.DecayHiddenBuffer(parameter);
    // The first contribution replaces what an earlier step left: no pass to zero it is needed.
    buffer.add = {buffer.hidden, optimizer_.GradientKey(parameter)};
  }
  return {buffer.view, buffer.add};
}

void AccumulateSink::End(const Parameter& parameter, const GradientSlot& slot) {
  TERRACE_CHECK(!open_.empty() && open_.back() == parameter.id, "{}: End without its Begin",
                parameter.name);
  open_.pop_back();
  Buffer& buffer = gradients_[parameter.id];
  buffer.add = {true, slot.add.rounding_key};
  ++buffer.received;
  CompleteWithLast(parameter);
}

void AccumulateSink::Skip(const Parameter& parameter) {
  TERRACE_CHECK(micro_batches_ > 0, "{}: skipped outside a step", parameter.name);
  ++gradients_[parameter.id].skipped;
  CompleteWithLast(parameter);
}

void AccumulateSink::CompleteWithLast(const Parameter& parameter) {
  Buffer& buffer = gradients_[parameter.id];
  const int64_t contributions = buffer.received + buffer.skipped;
  const int64_t expected = micro_batches_ * parameter.contributions;
  TERRACE_CHECK(contributions <= expected, "{}: {} gradient contributions, {} were announced",
                parameter.name, contributions, expected);
  // Now the gradient is likely to be in the caches still.
  if (contributions == expected && buffer.received > 0 && !dry_) {
    const double scale = optimizer_.HiddenBufferScale(parameter);
    buffer.squared_norm = scale * scale * optimizer_.Measure(parameter, buffer.view);
  }
}

StepResult AccumulateSink::Finish() {
  TERRACE_CHECK(micro_batches_ > 0, "Finish outside a step");
  TERRACE_CHECK(open_.empty(), "{}: Begin without End", parameters_[open_.back()].name);

  StepResult result;
  double squared_norm = 0;
  std::vector<Update> updates;
  for (const Parameter& parameter : parameters_) {
    const Buffer& buffer = gradients_[parameter.id];
    TERRACE_CHECK(buffer.received + buffer.skipped == micro_batches_ * parameter.contributions,
                  "{}: {} gradient contributions in {} micro-batches, not {}", parameter.name,
                  buffer.received + buffer.skipped, micro_batches_,
                  micro_batches_ * parameter.contributions);
    if (buffer.received == 0) continue;
    if (!std::isfinite(buffer.squared_norm) && result.not_finite == nullptr) {
      result.not_finite = &parameter;
    }
    squared_norm += buffer.squared_norm;
    updates.push_back({&parameter, buffer.view, 1});
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
  result.skipped_tensors = TrainedTensors(parameters_) - result.updated_tensors;
  result.reports = optimizer_.Apply(updates, learning_rate_);
  return result;
}

}  // namespace terrace
