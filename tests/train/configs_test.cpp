// The configurations that come with the program: each can be trained, and opens with figures that
// are true.
#include <gtest/gtest.h>

#include <string>

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

}  // namespace
}  // namespace terrace
