// Five optimizer steps against PyTorch's, under both policies.
#include "model/reference_model.h"
#include "optim/accumulate_sink.h"
#include "train/step.h"

namespace terrace {
namespace {

// The reference gives an expert without tokens a gradient of zero, where this program skips it:
// momentum and decay then act on it all the same.
class ZeroForSkipped final : public StepSink {
 public:
  ZeroForSkipped(StepSink& sink, Backend& backend) : sink_(sink), backend_(backend) {}
  void BeginStep(int64_t micro_batches, float learning_rate) override {
    sink_.BeginStep(micro_batches, learning_rate);
  }
  GradientSlot Begin(const Parameter& parameter) override { return sink_.Begin(parameter); }
  void End(const Parameter& parameter, const GradientSlot& slot) override {
    sink_.End(parameter, slot);
  }
  void Skip(const Parameter& parameter) override {
    const GradientSlot slot = Begin(parameter);
    if (!slot.add) backend_.Zero(slot.view);
    End(parameter, slot);
  }
  StepResult Finish() override { return sink_.Finish(); }

 private:
  StepSink& sink_;
  Backend& backend_;
};

class TrajectoryTest : public ReferenceModelTest {
 protected:
  void Train(const std::string& policy_name) {
    constexpr float kLearningRate = 3e-3f;
    Policy policy = PolicyNamed(policy_name);
    for (PolicyEntry& entry : policy.entries) {
      entry.weight_decay = entry.population == Population::kRouter ? 0 : 0.05f;
      const auto momentum = entry.settings.find("momentum");
      if (momentum == entry.settings.end() || momentum->second != SettingValue("none")) {
        entry.settings["beta1"] = 0.9;
      }
      entry.settings["beta2"] = 0.999;
      entry.settings["eps"] = 1e-8;
    }
    TestModel model(Config(), GetParam());
    LoadWeights(model.model());
    Optimizer optimizer(policy, model->parameters(), model.arena(), /*seed=*/1);
    AccumulateSink kept(model->parameters(), optimizer, model.arena(), DType::kF32,
                        {ClippingKind::kGlobalNorm, 1.0f});
    ZeroForSkipped sink(kept, model.backend());

    const nlohmann::json& trajectory = reference_.at(policy_name + "_trajectory");
    for (size_t step = 0; step < trajectory.size(); ++step) {
      HostBatch batch = Batch(step);
      const MicroBatch view = batch.View();
      const StepReport report = TrainStep(model.model(), {&view, 1}, {kLearningRate}, sink);
      const double loss = trajectory[step][0], router_loss = trajectory[step][1];
      const double norm = trajectory[step][2];
      EXPECT_NEAR(report.losses.loss, loss, 1e-4) << "step " << step;
      EXPECT_NEAR(report.losses.aux_loss + report.losses.z_loss, router_loss, 1e-4)
          << "step " << step;
      EXPECT_NEAR(report.update.gradient_norm, norm, 1e-3 * norm) << "step " << step;
    }
    for (const Parameter& parameter : model->parameters()) {
      const TensorView expected = Find("after_" + policy_name + ".", parameter);
      EXPECT_LE(RelativeError(parameter.value.span<float>(), expected.span<float>()), 1e-3)
          << parameter.name;
      // The bound is tighter than what training moved.
      const TensorView before = Find("weight.", parameter);
      EXPECT_GT(RelativeError(parameter.value.span<float>(), before.span<float>()), 2e-3)
          << parameter.name;
    }
  }
};

TEST_P(TrajectoryTest, SkewAdam) { Train("skewadam"); }
TEST_P(TrajectoryTest, AdamW) { Train("adamw"); }

TERRACE_ON_ALL_BACKENDS(TrajectoryTest);

}  // namespace
}  // namespace terrace
