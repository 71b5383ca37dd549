// Letters as in backend/backend.h.
#include "model/block.h"

#include <vector>

#include "model/attention.h"
#include "model/dense_ffn.h"
#include "model/moe_ffn.h"
#include "model/nanowhale_attention.h"
#include "model/sub_layer.h"

namespace terrace {
namespace {

// Of reports on memory.
constexpr const char* kAttention = "attention";
constexpr const char* kFeedForward = "feed-forward";

std::unique_ptr<AttentionPath> MakeAttention(const LayerContext& context) {
  if (context.config.attention == AttentionKind::kNanowhaleMla) {
    return std::make_unique<NanowhaleAttention>(context);
  }
  return std::make_unique<GqaAttention>(context);
}

std::unique_ptr<Path> MakeFeedForward(const LayerContext& context) {
  if (context.config.FeedForwardOf(context.layer) == FeedForwardKind::kDense) {
    return std::make_unique<DenseFfn>(context);
  }
  return std::make_unique<MoeFfn>(context);
}

class DecoderBlock final : public Block {
 public:
  explicit DecoderBlock(const LayerContext& context)
      : kind_(context.config.FeedForwardOf(context.layer)),
        arena_(context.backend.arena()),
        attention_path_(MakeAttention(context)),
        feed_forward_path_(MakeFeedForward(context)),
        attention_(context, 1, *attention_path_),
        feed_forward_(context, 2, *feed_forward_path_) {}

  TensorView Forward(const Pass& pass, TensorView x, std::unique_ptr<Saved>& saved,
                     LayerRouting* routing) override {
    auto halves = std::make_unique<SavedHalves>();
    TensorView middle;
    {
      const Arena::PhaseScope phase(arena_, kAttention);
      middle = attention_.Forward(pass, x, "block.middle", halves->attention, nullptr);
    }
    const Arena::PhaseScope phase(arena_, kFeedForward);
    const TensorView out =
        feed_forward_.Forward(pass, middle, "block.out", halves->feed_forward, routing);
    saved = std::move(halves);
    return out;
  }

  void Backward(std::span<const Work> work, GradientSink& sink) override {
    std::vector<SubLayer::Work> attention_work, feed_forward_work;
    for (const Work& item : work) {
      const auto& halves = static_cast<const SavedHalves&>(*item.saved);
      attention_work.push_back({item.pass, &halves.attention, item.dx});
      feed_forward_work.push_back({item.pass, &halves.feed_forward, item.dx});
    }
    {
      const Arena::PhaseScope phase(arena_, kFeedForward);
      feed_forward_.Backward(feed_forward_work, sink);
    }
    const Arena::PhaseScope phase(arena_, kAttention);
    attention_.Backward(attention_work, sink);
  }

  FeedForwardKind feed_forward() const override { return kind_; }

  Cache NewCache(int64_t capacity) const override { return attention_path_->NewCache(capacity); }

  void Decode(const Pass& pass, int64_t first_position, const Cache& cache, TensorView x) override {
    attention_.Decode(x, [&](TensorView y, TensorView out) {
      attention_path_->Decode(pass, first_position, cache, y, out);
    });
    feed_forward_.Decode(x, [&](TensorView y, TensorView out) {
      feed_forward_path_->Forward(pass, y, out, nullptr);
    });
  }

 private:
  struct SavedHalves final : Saved {
    SubLayer::Saved attention, feed_forward;
  };

  FeedForwardKind kind_;
  Arena& arena_;
  std::unique_ptr<AttentionPath> attention_path_;
  std::unique_ptr<Path> feed_forward_path_;
  SubLayer attention_, feed_forward_;
};

}  // namespace

std::unique_ptr<Block> MakeBlock(const LayerContext& context) {
  return std::make_unique<DecoderBlock>(context);
}

}  // namespace terrace
