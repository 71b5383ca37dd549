// Letters as in backend/backend.h.
#include "model/block.h"

#include <vector>

#include "model/dense_ffn.h"
#include "model/moe_ffn.h"

namespace terrace {
namespace {

// Of reports on memory.
constexpr const char* kAttention = "attention";
constexpr const char* kFeedForward = "feed-forward";

class DecoderBlock final : public Block {
 public:
  explicit DecoderBlock(const LayerContext& context)
      : backend_(context.backend),
        kind_(context.config.FeedForwardOf(context.layer)),
        attention_(context) {
    if (kind_ == FeedForwardKind::kDense) {
      feed_forward_ = std::make_unique<DenseFfn>(context);
    } else {
      feed_forward_ = std::make_unique<MoeFfn>(context);
    }
  }

  TensorView Forward(const Pass& pass, TensorView x, std::unique_ptr<Saved>& saved,
                     LayerRouting* routing) override {
    // x f32 [N, D] -> middle f32 [N, D] -> out f32 [N, D]
    const TensorView middle = Activation(backend_, DType::kF32, x.shape, "block.middle");
    const TensorView out = Activation(backend_, DType::kF32, x.shape, "block.out");
    auto halves = std::make_unique<SavedHalves>();
    backend_.Copy(x, middle);
    {
      const Arena::PhaseScope phase(backend_.arena(), kAttention);
      halves->attention = attention_.Forward(pass, x, middle, nullptr);
    }
    backend_.Copy(middle, out);
    const Arena::PhaseScope phase(backend_.arena(), kFeedForward);
    halves->feed_forward = feed_forward_->Forward(pass, middle, out, routing);
    saved = std::move(halves);
    return out;
  }

  void Backward(std::span<const Work> work, GradientSink& sink) override {
    std::vector<SubLayer::Work> attention_work, feed_forward_work;
    for (const Work& item : work) {
      const auto& halves = static_cast<const SavedHalves&>(*item.saved);
      attention_work.push_back({item.pass, halves.attention.get(), item.dx});
      feed_forward_work.push_back({item.pass, halves.feed_forward.get(), item.dx});
    }
    {
      const Arena::PhaseScope phase(backend_.arena(), kFeedForward);
      feed_forward_->Backward(feed_forward_work, sink);
    }
    const Arena::PhaseScope phase(backend_.arena(), kAttention);
    attention_.Backward(attention_work, sink);
  }

  FeedForwardKind feed_forward() const override { return kind_; }

  void Decode(const Pass& pass, int64_t first_position, const Cache& cache, TensorView x) override {
    attention_.Decode(pass, first_position, cache, x);
    const Arena::Frame frame(backend_.arena());
    const TensorView middle = Activation(backend_, DType::kF32, x.shape, "block.middle");
    backend_.Copy(x, middle);
    feed_forward_->Forward(pass, middle, x, nullptr);
  }

 private:
  struct SavedHalves final : Saved {
    std::unique_ptr<SubLayer::Saved> attention;
    std::unique_ptr<SubLayer::Saved> feed_forward;
  };

  Backend& backend_;
  FeedForwardKind kind_;
  GqaAttention attention_;
  std::unique_ptr<SubLayer> feed_forward_;
};

}  // namespace

std::unique_ptr<Block> MakeBlock(const LayerContext& context) {
  return std::make_unique<DecoderBlock>(context);
}

}  // namespace terrace
