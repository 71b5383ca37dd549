// Text from a model, token by token.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "model/model.h"

namespace terrace {

struct SamplingOptions {
  int64_t max_tokens = 128;
  float temperature = 0.8f;  // 0: always the likeliest token
  int64_t top_k = 0;         // of the likeliest tokens only; 0: all
  float top_p = 1;           // of the likeliest tokens whose probabilities reach this sum; 1: all
  uint64_t seed = 1;
  int32_t end_token = -1;  // ends the text, and is not part of it; -1: none
  // Of a token's id; ids without a token, and padding of the model's table, are not drawn. Empty:
  // all can be.
  std::function<bool(int32_t)> can_draw = {};
};

// Throws Error naming the option at fault.
void CheckSampling(const SamplingOptions& options);

// The token that (options, seed, position) draw from logits [V]. Ties go to the lower id. Throws
// Error when no logit of a token that can be drawn is a finite number.
int32_t SampleToken(std::span<const float> logits, const SamplingOptions& options,
                    int64_t position);

// Continues `prompt` (at least one token) and gives each new token to `emit` as it is drawn, until
// max_tokens, the end token, or model.max_positions. On a dry backend: takes the same memory and
// emits nothing. Throws Error when the prompt fills all positions.
void Generate(Model& model, std::span<const int32_t> prompt, const SamplingOptions& options,
              const std::function<void(int32_t)>& emit);

}  // namespace terrace
