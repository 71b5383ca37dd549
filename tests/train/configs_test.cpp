// The configurations that come with the program can be trained, and open with figures that are
// true; so are the README's.
#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "core/atomic_file.h"
#include "train/trainer.h"

namespace terrace {
namespace {

std::string HeaderOf(const RunConfig& config) {
  const ModelSize size = SizeOf(config.model);
  const double tokens = static_cast<double>(config.training.steps * config.training.StepTokens());
  const double flops = tokens * size.FlopsPerToken(config.training.sequence_length);
  constexpr double kFlopsPerSecond = 200e9;
  return fmt::format(
      "# {:.2f} M parameters, {:.2f} M active per token, {}.\n"
      "# {:.2f} M tokens, {:.2e} FLOPs: {:.0f} minutes at 200 GFLOP/s. About ",
      static_cast<double>(size.parameters) / 1e6, static_cast<double>(size.active_parameters) / 1e6,
      NameOf(config.model.weight_dtype), tokens / 1e6, flops, flops / kFlopsPerSecond / 60);
}

TEST(ConfigsTest, OpenWithTheirTokensFlopsMemoryAndTime) {
  const auto folder = std::filesystem::path(TERRACE_SOURCE_TEST_DATA) / "../../configs";
  int configs = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() != ".toml") continue;
    ++configs;
    const std::string name = entry.path().filename();
    const RunConfig config = LoadConfig(entry.path(), {});
    const std::string text = ReadFile(entry.path());
    const std::string header = HeaderOf(config);
    const size_t found = text.find(header);
    ASSERT_NE(found, std::string::npos) << name << " lacks\n" << header;
    // Scratch depends a little on the instruction set and the number of threads.
    const double stated = std::stod(text.substr(found + header.size()));
    const double planned = static_cast<double>(PlanTraining(config).total_peak_bytes) / (1 << 20);
    EXPECT_NEAR(stated, planned, 0.1 * planned) << name;
  }
  EXPECT_GE(configs, 3);
}

TEST(ReadmeTest, ItsMemoryTableIsThePlan) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "guards stand between allocations";
#endif
  const auto root = std::filesystem::path(TERRACE_SOURCE_TEST_DATA) / "../..";
  const std::string readme = ReadFile(root / "README.md");
  for (const auto& [policy, start, state_format] :
       {std::tuple("adamw", "| AdamW    |", "{:.1f}"),
        std::tuple("skewadam", "| SkewAdam |", "**{:.1f}**")}) {
    const RunConfig config =
        LoadConfig(root / "configs/moe-110m.toml",
                   {fmt::format("optimizer.policy={}", policy), "training.eval_interval=0"});
    const Ledger plan = PlanTraining(config);
    const auto mebibytes = [&](Memory category) {
      return static_cast<double>(plan.at_peak_bytes[static_cast<size_t>(category)]) / (1 << 20);
    };
    const std::string row = fmt::format(
        fmt::runtime("{} {:.1f} | " + std::string(state_format) + " | {:.1f} | {:.1f} | "), start,
        mebibytes(Memory::kWeights), mebibytes(Memory::kOptimizer), mebibytes(Memory::kGradients),
        mebibytes(Memory::kActivations));
    const size_t found = readme.find(row);
    ASSERT_NE(found, std::string::npos) << "README.md lacks\n" << row;
    // Scratch depends a little on the instruction set and the number of threads.
    const double stated = std::stod(readme.substr(found + row.size()));
    const double planned = static_cast<double>(plan.total_peak_bytes) / (1 << 20);
    EXPECT_NEAR(stated, planned, 0.1 * planned);
  }
}

}  // namespace
}  // namespace terrace
