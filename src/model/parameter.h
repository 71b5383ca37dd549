// Parameters and their populations.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>

#include "core/tensor.h"

namespace terrace {

// The role of a parameter. Optimizer policies map populations to update rules.
enum class Population : uint8_t {
  kEmbedding,
  kHead,
  kAttention,
  kDenseFfn,
  kSharedExpert,
  kExpert,
  kRouter,
  kNorm,
};
inline constexpr int kPopulations = 8;
// "embedding", "head", "attention", "dense_ffn", "shared_expert", "expert", "router", "norm"
std::string_view NameOf(Population population);

struct Parameter {
  std::string name;  // as in checkpoints: "layers.1.ff.experts.0.gate_proj.weight"
  Population population;
  TensorView value;  // dtype and shape; `value.name` is `name`
  int64_t id;        // position in the model's list; keys random numbers
  int64_t layer = -1;
  int64_t expert = -1;
  // The dimension that counts neurons: 1 for the projection down from a feed-forward's hidden
  // width.
  int neuron_axis = 0;
  // How many gradients one backward pass adds up for it (2 for a tied embedding and head).
  // 0: it is not trained (a selection bias, say), and has neither gradient nor optimizer state, but
  // is saved, planned and loaded like the others.
  int contributions = 1;
  bool trained() const { return contributions > 0; }
  float init_std = 0;  // of N(0, init_std^2); 0: constant `init_constant`
  float init_constant = 0;
};

// Stable addresses: views and sinks keep pointers.
using Parameters = std::deque<Parameter>;

}  // namespace terrace
