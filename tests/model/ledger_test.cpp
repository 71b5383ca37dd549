// A dry run takes the memory of a real one, whatever the data.
#include "model/harness.h"
#include "model/presets.h"

namespace terrace {
namespace {

class LedgerTest : public ModelTest {};

Arena BigArena() { return Arena(int64_t{256} << 20); }

// One step of `micro_batches` micro-batches, each of its own or all in one backward call.
Ledger LedgerOfStep(const ModelConfig& config, const BackendChoice& choice, Arena arena,
                    int64_t micro_batches, bool together, uint64_t seed) {
  TestModel model(config, choice, std::move(arena));
  if (!model.backend().dry()) model.Randomize(seed, 0.1);
  std::vector<HostBatch> batches;
  for (int64_t i = 0; i < micro_batches; ++i) {
    batches.push_back(RandomBatch(config, 2, 8, seed + i));
    // A batch of one token only sends all rows to the same experts.
    if (seed == 0) std::fill(batches[i].inputs.begin(), batches[i].inputs.end(), 3);
  }
  std::vector<Pass> passes;
  for (HostBatch& batch : batches) passes.push_back(PassOf(batch));
  ScratchSink sink(model.arena());
  if (together) {
    model.Run(passes, &sink);
  } else {
    for (const Pass& pass : passes) model.Step(pass, sink);
  }
  return model.arena().ledger();
}

void ExpectEqual(const Ledger& actual, const Ledger& expected) {
  EXPECT_EQ(actual.current_bytes, expected.current_bytes);
  EXPECT_EQ(actual.peak_bytes, expected.peak_bytes);
  EXPECT_EQ(actual.at_peak_bytes, expected.at_peak_bytes);
  EXPECT_EQ(actual.total_peak_bytes, expected.total_peak_bytes);
}

TEST_P(LedgerTest, DryEqualsRealForAnyData) {
  for (const FeedForwardKind kind : {FeedForwardKind::kDense, FeedForwardKind::kMoe}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const bool together : {false, true}) {
        ModelConfig config = SmallConfig();
        config.ffn = {kind};
        config.weight_dtype = dtype;
        const Ledger dry = LedgerOfStep(config, GetParam(), Arena::Dry(), 3, together, /*seed=*/1);
        EXPECT_GT(dry.peak_bytes[static_cast<int>(Memory::kActivations)], 0);
        for (const uint64_t seed : {0, 1, 2}) {
          SCOPED_TRACE(testing::Message()
                       << static_cast<int>(kind) << NameOf(dtype) << together << seed);
          ExpectEqual(LedgerOfStep(config, GetParam(), BigArena(), 3, together, seed), dry);
        }
      }
    }
  }
}

TEST_P(LedgerTest, PlansTheLargeModelWithoutMemory) {
  const ModelConfig config = PresetNamed("skewadam-6.78b");
  Arena arena = Arena::Dry();
  const std::unique_ptr<Backend> backend = GetParam().make(arena);
  Model model(config, *backend);
  model.Initialize(1);
  // 2 bytes each, but for norms and the router at 4; every tensor is a multiple of 64 bytes, and
  // in debug builds has a guard of 64 behind it.
  int64_t expected_bytes = 0, tensors = 0;
  for (const Parameter& parameter : model.parameters()) {
    const int64_t size = parameter.value.size();
    const bool narrow =
        parameter.population != Population::kNorm && parameter.population != Population::kRouter;
    expected_bytes += (narrow ? 2 : 4) * size;
    ++tensors;
  }
  const int64_t held_bytes = arena.ledger().total_bytes;
  EXPECT_TRUE(held_bytes == expected_bytes ||
              held_bytes == expected_bytes + tensors * Arena::kAlignment)
      << held_bytes << " for " << expected_bytes;
}

// Frames give everything back, and generation works without data too.
TEST_P(LedgerTest, NothingStaysBehind) {
  TestModel model(SmallConfig(), GetParam(), Arena::Dry());
  const int64_t weights_bytes = model.arena().ledger().total_bytes;
  HostBatch batch = RandomBatch(SmallConfig(), 1, 4, 1);
  ScratchSink sink(model.arena());
  model.Step(PassOf(batch), sink);
  EXPECT_EQ(model.arena().ledger().total_bytes, weights_bytes);
  {
    const Arena::Frame frame(model.arena());
    const auto cache = model->NewCache(5);
    const TensorView logits =
        model.arena().Allocate(Memory::kActivations, DType::kF32, {23}, "logits");
    const int64_t before_bytes = model.arena().ledger().total_bytes;
    model->Decode(batch.inputs, *cache, logits);
    EXPECT_EQ(model.arena().ledger().total_bytes, before_bytes);
  }
  EXPECT_EQ(model.arena().ledger().total_bytes, weights_bytes);
}

TERRACE_ON_ALL_BACKENDS(LedgerTest);

}  // namespace
}  // namespace terrace
