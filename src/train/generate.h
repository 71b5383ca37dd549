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
  int64_t vocab_size = INT64_MAX;  // ids from here on are not drawn (padding of the model's table)
  int32_t end_token = -1;          // ends the text, and is not part of it; -1: none
};

// Throws Error naming the option at fault.
void CheckSampling(const SamplingOptions& options);

// The token that (options, seed, position) draw from logits [V]. Ties go to the lower id. Throws
// Error when no logit is a finite number.
int32_t SampleToken(std::span<const float> logits, const SamplingOptions& options,
                    int64_t position);

// Continues `prompt` (at least one token) and gives each new token to `emit` as it is drawn, until
// max_tokens, the end token, or model.max_positions. On a dry backend: takes the same memory and
// emits nothing. Throws Error when the prompt fills all positions.
void Generate(Model& model, std::span<const int32_t> prompt, const SamplingOptions& options,
              const std::function<void(int32_t)>& emit);

}  // namespace terrace
