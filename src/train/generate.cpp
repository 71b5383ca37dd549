#include "train/generate.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "core/counted.h"
#include "core/error.h"
#include "core/rng.h"

namespace terrace {
namespace {

// Sets this use of the seed apart from others.
constexpr uint64_t kSamplingPurpose = 0x73616d706c65;

// Ids of the tokens to draw from; best first where an option limits them.
std::vector<int32_t> Candidates(std::span<const float> logits, const SamplingOptions& options) {
  std::vector<int32_t> ids;
  for (int32_t id = 0; std::cmp_less(id, logits.size()); ++id) {
    const bool can_draw = !options.can_draw || options.can_draw(id);
    if (can_draw && std::isfinite(logits[static_cast<size_t>(id)])) ids.push_back(id);
  }
  if (ids.empty()) Fail("generation: the model's logits are not finite");
  const auto better = [&](int32_t a, int32_t b) {
    const float x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
    return x != y ? x > y : a < b;
  };
  int64_t kept = std::ssize(ids);
  if (options.temperature == 0) kept = 1;
  if (options.top_k > 0) kept = std::min(kept, options.top_k);
  if (kept < std::ssize(ids) || options.top_p < 1) {
    std::partial_sort(ids.begin(), ids.begin() + kept, ids.end(), better);
  }
  ids.resize(static_cast<size_t>(kept));
  return ids;
}

}  // namespace

void CheckSampling(const SamplingOptions& options) {
  if (options.max_tokens < 1) Fail("max_tokens = {} is not at least 1", options.max_tokens);
  if (!(options.temperature >= 0 && std::isfinite(options.temperature))) {
    Fail("temperature = {} is not a number from 0", options.temperature);
  }
  if (options.top_k < 0) Fail("top_k = {} is negative", options.top_k);
  if (!(options.top_p > 0 && options.top_p <= 1)) {
    Fail("top_p = {} is not above 0 and at most 1", options.top_p);
  }
}

int32_t SampleToken(std::span<const float> logits, const SamplingOptions& options,
                    int64_t position) {
  const std::vector<int32_t> ids = Candidates(logits, options);
  if (ids.size() == 1) return ids[0];
  double largest = -INFINITY;
  for (int32_t id : ids) largest = std::max(largest, double{logits[static_cast<size_t>(id)]});
  std::vector<double> weights;  // proportional to probabilities
  for (int32_t id : ids) {
    weights.push_back(
        std::exp((double{logits[static_cast<size_t>(id)]} - largest) / options.temperature));
  }
  double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  if (options.top_p < 1) {
    const double wanted = options.top_p * total;
    size_t kept = 0;
    total = 0;
    while (kept < weights.size() && total < wanted) total += weights[kept++];
    weights.resize(kept);
  }
  const uint64_t key = MixKeys(options.seed, kSamplingPurpose);
  double rest = total * RandomUniform(key, static_cast<uint64_t>(position));
  size_t chosen = 0;
  while (chosen + 1 < weights.size() && rest >= weights[chosen]) rest -= weights[chosen++];
  return ids[chosen];
}

void Generate(Model& model, std::span<const int32_t> prompt, const SamplingOptions& options,
              const std::function<void(int32_t)>& emit) {
  CheckSampling(options);
  const ModelConfig& config = model.config();
  const int64_t given = std::ssize(prompt);
  if (given >= config.max_positions) {
    Fail("generation: a prompt of {} leaves no room in model.max_positions = {}",
         Counted(given, "token"), config.max_positions);
  }
  const int64_t end = given + std::min(options.max_tokens, config.max_positions - given);

  Arena& arena = model.backend().arena();
  const Arena::Frame frame(arena);
  const TensorView logits =
      arena.Allocate(Memory::kActivations, DType::kF32, {config.vocab_size}, "logits");
  // The last token drawn is not run through the model.
  const std::unique_ptr<KvCache> cache = model.NewCache(end - 1);
  model.Decode(prompt, *cache, logits);
  if (model.backend().dry()) {
    const int32_t any = 0;
    if (given + 1 < end) model.Decode({&any, 1}, *cache, logits);
    return;
  }
  for (int64_t position = given; position < end; ++position) {
    const int32_t token = SampleToken(logits.span<float>(), options, position);
    if (token == options.end_token) break;
    emit(token);
    if (position + 1 < end) model.Decode({&token, 1}, *cache, logits);
  }
}

}  // namespace terrace
