#include "optim/release_sink.h"

#include <cmath>

namespace terrace {

void RefuseRelease(const std::string& parameter) {
  Fail(
      "training.sink = \"release\" updates tensor by tensor; the policy updates {} together with "
      "others",
      parameter);
}

ReleaseSink::ReleaseSink(const Parameters& parameters, Optimizer& optimizer, Arena& arena,
                         DType gradient_dtype, const Clipping& clipping)
    : parameters_(parameters),
      optimizer_(optimizer),
      arena_(arena),
      gradient_dtype_(gradient_dtype),
      clipping_(clipping),
      units_(parameters.size()) {
  clipping.Check();
  for (const Parameter& parameter : parameters) {
    if (!optimizer.UpdatesAlone(parameter)) RefuseRelease(parameter.name);
    Unit& unit = units_[parameter.id];
    unit.buffer = optimizer.HiddenBuffer(parameter);
    unit.hidden = !unit.buffer.empty();
    if (parameter.contributions > 1 && !unit.hidden) {
      unit.buffer = arena.Allocate(Memory::kGradients, GradientTypeOf(parameter, gradient_dtype_),
                                   parameter.value.shape, parameter.name.c_str());
    }
  }
}

void ReleaseSink::BeginStep(int64_t, float learning_rate) {
  learning_rate_ = learning_rate;
  in_step_ = true;
  measuring_ = clipping_.kind == ClippingKind::kGlobalNorm;
  result_ = {};
  open_.clear();
  for (Unit& unit : units_) {
    unit = {.buffer = unit.buffer, .hidden = unit.hidden};
  }
}

GradientSlot ReleaseSink::Begin(const Parameter& parameter) {
  TERRACE_CHECK(in_step_, "{}: gradient outside a step", parameter.name);
  Unit& unit = units_[parameter.id];
  Open& open = open_.emplace_back(Open{&parameter, std::nullopt});
  const Adding first{unit.hidden, optimizer_.GradientKey(parameter)};
  if (unit.buffer.empty() || HasGradient(unit)) {
    open.frame.emplace(arena_);
    return {arena_.Allocate(Memory::kGradients, GradientTypeOf(parameter, gradient_dtype_),
                            parameter.value.shape, parameter.name.c_str()),
            {false, first.rounding_key}};
  }
  if (unit.received == 0) {
    if (unit.hidden) optimizer_.DecayHiddenBuffer(parameter);
    unit.add = first;
  }
  return {unit.buffer, unit.add};
}

void ReleaseSink::End(const Parameter& parameter, const GradientSlot& slot) {
  TERRACE_CHECK(!open_.empty() && open_.back().parameter == &parameter, "{}: End without its Begin",
                parameter.name);
  Unit& unit = units_[parameter.id];
  unit.add = {true, slot.add.rounding_key};
  ++unit.received;
  CompleteWithLast(parameter, slot.view);
  open_.pop_back();
}

void ReleaseSink::Skip(const Parameter& parameter) {
  TERRACE_CHECK(in_step_, "{}: skipped outside a step", parameter.name);
  CompleteWithLast(parameter, units_[parameter.id].buffer);
}

bool ReleaseSink::HasGradient(const Unit& unit) const {
  return unit.hidden && clipping_.kind == ClippingKind::kGlobalNorm && !measuring_;
}

void ReleaseSink::CompleteWithLast(const Parameter& parameter, TensorView gradient) {
  Unit& unit = units_[parameter.id];
  ++unit.contributions;
  TERRACE_CHECK(unit.contributions <= parameter.contributions,
                "{}: {} gradient contributions, {} were announced", parameter.name,
                unit.contributions, parameter.contributions);
  if (unit.contributions == parameter.contributions && unit.received > 0) {
    Complete(parameter, unit.hidden ? unit.buffer : gradient);
  }
}

void ReleaseSink::Complete(const Parameter& parameter, TensorView gradient) {
  Unit& unit = units_[parameter.id];
  const bool second_pass = clipping_.kind == ClippingKind::kGlobalNorm && !measuring_;
  if (!second_pass && !arena_.dry()) {
    const double scale = optimizer_.HiddenBufferScale(parameter);
    unit.squared_norm = scale * scale * optimizer_.Measure(parameter, gradient);
    if (!std::isfinite(unit.squared_norm) && result_.not_finite == nullptr) {
      result_.not_finite = &parameter;
    }
  }
  if (measuring_ || result_.not_finite != nullptr) return;
  float scale = result_.gradient_scale;
  if (clipping_.kind == ClippingKind::kPerTensor) {
    scale = ClippingScale(std::sqrt(unit.squared_norm), clipping_.max_norm);
  }
  result_.reports[static_cast<int>(parameter.population)] +=
      optimizer_.Apply({&parameter, gradient, scale}, learning_rate_);
  ++result_.updated_tensors;
}

void ReleaseSink::CheckPass() const {
  TERRACE_CHECK(in_step_, "the end of a pass outside a step");
  TERRACE_CHECK(open_.empty(), "{}: Begin without End", open_.back().parameter->name);
  for (const Parameter& parameter : parameters_) {
    const int64_t contributions = units_[parameter.id].contributions;
    TERRACE_CHECK(contributions == parameter.contributions,
                  "{}: {} gradient contributions in a pass, not {}", parameter.name, contributions,
                  parameter.contributions);
  }
}

bool ReleaseSink::AnotherPass() {
  if (!measuring_) return false;
  CheckPass();
  if (result_.not_finite != nullptr) return false;
  measuring_ = false;
  result_.gradient_scale = ClippingScale(Norm(), clipping_.max_norm);
  for (Unit& unit : units_) unit.contributions = unit.received = 0;
  return true;
}

StepResult ReleaseSink::Finish() {
  CheckPass();
  in_step_ = false;
  result_.gradient_norm = Norm();
  result_.skipped_tensors = TrainedTensors(parameters_) - result_.updated_tensors;
  return result_;
}

double ReleaseSink::Norm() const {
  double squares = 0;
  for (const Unit& unit : units_) squares += unit.squared_norm;
  return std::sqrt(squares);
}

}  // namespace terrace
