// The momentum of a rule: how it may be stored, what that adds to the state of a tensor, and where
// a rule finds it there. Rules say what is averaged; kernels/stored-inl.h has the formats.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <span>
#include <vector>

#include "core/error.h"
#include "core/settings.h"
#include "optim/kernels/block_quantization.h"
#include "optim/rule.h"

namespace terrace {

// Bytes an element: 0, 4, 2, 1 (codes of 8 bits with a scale a block, block_quantization.h). What
// is not float32 is rounded stochastically, so that an average moves however slowly it does.
//
// Hidden: the tensor's gradient buffer itself, which outlives the step, is the momentum
// (StepSink); it takes 4 or 2 bytes of gradients and no state. There is none of 8 bits: with one
// gradient at a time (release) a stored momentum takes the same memory and rounds once a step, and
// a buffer that micro-batches are summed up in would round at each addition.
enum class Momentum : uint8_t { kNone, kF32, kBF16, kInt8, kHiddenF32, kHiddenBF16 };

// Names of the formats that a rule offers.
inline Names<Momentum> MomentumNames(std::initializer_list<Momentum> offered) {
  static const Names<Momentum> kAll = {{"none", Momentum::kNone},
                                       {"f32", Momentum::kF32},
                                       {"bf16", Momentum::kBF16},
                                       {"int8", Momentum::kInt8},
                                       {"hidden_f32", Momentum::kHiddenF32},
                                       {"hidden_bf16", Momentum::kHiddenBF16}};
  Names<Momentum> names;
  for (const auto& [name, momentum] : kAll) {
    if (std::find(offered.begin(), offered.end(), momentum) != offered.end()) {
      names.emplace_back(name, momentum);
    }
  }
  return names;
}
// For rules that need one, those that can do without, and those that take the gradient's buffer.
inline Names<Momentum> StoredMomentumNames() {
  return MomentumNames({Momentum::kF32, Momentum::kBF16, Momentum::kInt8});
}
inline Names<Momentum> MomentumOrNoneNames() {
  return MomentumNames({Momentum::kNone, Momentum::kF32, Momentum::kBF16, Momentum::kInt8});
}
inline Names<Momentum> AnyMomentumNames() {
  return MomentumNames({Momentum::kNone, Momentum::kF32, Momentum::kBF16, Momentum::kInt8,
                        Momentum::kHiddenF32, Momentum::kHiddenBF16});
}

constexpr bool IsHidden(Momentum momentum) {
  return momentum == Momentum::kHiddenF32 || momentum == Momentum::kHiddenBF16;
}
// Whether it is a state of its own.
constexpr bool IsStored(Momentum momentum) {
  return momentum != Momentum::kNone && !IsHidden(momentum);
}

// A state begins with its momentum: adds it, if it is stored.
inline void AddMomentum(Momentum momentum, const Shape& shape, std::vector<StateSpec>& state) {
  switch (momentum) {
    case Momentum::kF32:
      state.push_back({"momentum", DType::kF32, shape});
      break;
    case Momentum::kBF16:
      state.push_back({"momentum", DType::kBF16, shape});
      break;
    case Momentum::kInt8:
      state.push_back({"momentum", DType::kU8, shape});
      state.push_back({"momentum_scale", DType::kF32, kernels::QuantizationScales(shape)});
      break;
    case Momentum::kNone:
    case Momentum::kHiddenF32:
    case Momentum::kHiddenBF16:
      break;
  }
}

// A state ends with its hidden buffer: adds it, if the momentum is one.
inline void AddHiddenBuffer(Momentum momentum, const Parameter& parameter, double decay,
                            std::vector<StateSpec>& state) {
  if (!IsHidden(momentum)) return;
  const bool narrow = momentum == Momentum::kHiddenBF16;
  // As all gradients, which products of float32 do not leave in bfloat16.
  if (narrow && parameter.value.dtype != DType::kBF16) {
    Fail("momentum = 'hidden_bf16' needs weights of bf16, not {}", NameOf(parameter.value.dtype));
  }
  state.push_back({"gradient", narrow ? DType::kBF16 : DType::kF32, parameter.value.shape,
                   static_cast<float>(decay)});
}

// The stored momentum that `state` begins with, or nothing; `state` keeps the rest.
inline kernels::Stored TakeMomentum(Momentum momentum, std::span<const TensorView>& state) {
  if (!IsStored(momentum)) return TensorView{};
  const bool codes = momentum == Momentum::kInt8;
  const kernels::Stored stored{state[0], codes ? state[1] : TensorView{}};
  state = state.subspan(codes ? 2 : 1);
  return stored;
}

}  // namespace terrace
