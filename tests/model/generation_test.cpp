// Tokens decoded through a cache see what the whole sequence at once would see.
#include <numeric>

#include "model/harness.h"

namespace terrace {
namespace {

class GenerationTest : public ModelTest {
 protected:
  // Decodes `chunks` of tokens one after another; the logits that follow each chunk's last token.
  static std::vector<std::vector<float>> Decode(TestModel& model, std::span<const int32_t> tokens,
                                                const std::vector<int64_t>& chunks) {
    const Arena::Frame frame(model.arena());
    const auto cache = model->NewCache(std::ssize(tokens));
    const TensorView logits = model.arena().Allocate(Memory::kActivations, DType::kF32,
                                                     {model->config().vocab_size}, "logits");
    std::vector<std::vector<float>> results;
    size_t first = 0;
    for (const int64_t count : chunks) {
      model->Decode(tokens.subspan(first, count), *cache, logits);
      first += count;
      EXPECT_EQ(cache->length, static_cast<int64_t>(first));
      results.emplace_back(logits.span<float>().begin(), logits.span<float>().end());
    }
    return results;
  }
};

TEST_P(GenerationTest, CacheEqualsFullForward) {
  for (const PositionKind positions : {PositionKind::kRope, PositionKind::kLearned}) {
    ModelConfig config = SmallConfig();
    config.positions = positions;
    config.router.noise_scale = 1;  // of training only
    TestModel model(config, GetParam());
    model.Randomize(3, 0.3);
    HostBatch batch = RandomBatch(config, 1, 9, 4);
    const std::vector<float> full = model.Logits(PassOf(batch));
    const std::vector<std::vector<int64_t>> splits = {
        {1, 1, 1, 1, 1, 1, 1, 1, 1}, {9}, {4, 1, 3, 1}};
    for (const std::vector<int64_t>& chunks : splits) {
      const auto decoded = Decode(model, batch.inputs, chunks);
      int64_t last = -1;
      for (size_t i = 0; i < chunks.size(); ++i) {
        last += chunks[i];
        const auto expected = std::span(full).subspan(last * config.vocab_size, config.vocab_size);
        EXPECT_LE(RelativeError(decoded[i], expected), 1e-5) << "token " << last;
      }
    }
  }
}

TEST_P(GenerationTest, LoweredLengthGoesBack) {
  TestModel model(SmallConfig(), GetParam());
  model.Randomize(3, 0.3);
  const Arena::Frame frame(model.arena());
  const auto cache = model->NewCache(6);
  const TensorView logits =
      model.arena().Allocate(Memory::kActivations, DType::kF32, {23}, "logits");
  const std::vector<int32_t> start = {1, 2, 3}, wrong = {4, 5}, right = {6};
  const auto copy = [&] {
    return std::vector<float>(logits.span<float>().begin(), logits.span<float>().end());
  };
  model->Decode(start, *cache, logits);
  model->Decode(right, *cache, logits);
  const std::vector<float> expected = copy();
  cache->length = 3;
  model->Decode(wrong, *cache, logits);
  EXPECT_NE(copy(), expected);
  cache->length = 3;
  model->Decode(right, *cache, logits);
  EXPECT_EQ(copy(), expected);
}

TEST_P(GenerationTest, FullCacheAndWildTokensAreErrors) {
  TestModel model(SmallConfig(), GetParam());
  model.Randomize(3, 0.3);
  const Arena::Frame frame(model.arena());
  const auto cache = model->NewCache(20);
  const TensorView logits =
      model.arena().Allocate(Memory::kActivations, DType::kF32, {23}, "logits");
  const auto message = [&](std::vector<int32_t> tokens) -> std::string {
    try {
      model->Decode(tokens, *cache, logits);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message({0, 23}), "generation: token id 23 is not below model.vocab_size = 23");
  EXPECT_EQ(message({-1}), "generation: token id -1 is not below model.vocab_size = 23");
  EXPECT_EQ(message({}), "generation: no tokens to continue");
  EXPECT_EQ(cache->length, 0);
  EXPECT_EQ(message({1, 2, 3, 4, 5, 6, 7, 8}), "");
  EXPECT_EQ(message({1, 2}),
            "generation: 2 tokens after 8 exceed 9 (the cache's 20, model.max_positions = 9)");
}

TERRACE_ON_ALL_BACKENDS(GenerationTest);

}  // namespace
}  // namespace terrace
