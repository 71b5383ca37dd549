// terrace plan, as a user runs it.
#include <fstream>
#include <nlohmann/json.hpp>

#include "cli/command_test.h"
#include "core/atomic_file.h"

namespace terrace {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

class PlanCommandTest : public CommandTest {
 protected:
  std::string Mixtral() const { return HuggingFaceFile("mixtral-8x7b"); }
  static std::string HuggingFaceFile(const std::string& name) {
    return (TestData() / "hugging_face" / (name + ".json")).string();
  }
};

TEST_F(PlanCommandTest, PlansPresetsAndHuggingFaceModels) {
  const ProgramResult preset =
      Run({"plan", "skewadam-6.78b", "--sink", "release", "--memory", "24GiB"});
  EXPECT_EQ(preset.exit_code, 0) << preset.errors;
  EXPECT_THAT(preset.output, StartsWith("skewadam-6.78b: 6784.33 M parameters, 442.54 M active"));
  EXPECT_THAT(preset.output, HasSubstr("memory: fits in 24.00 GiB"));
  EXPECT_THAT(preset.output, HasSubstr("\nbest policy that fits: "));
  const ProgramResult hugging_face = Run({"plan", Mixtral(), "--memory", "24GiB"});
  EXPECT_EQ(hugging_face.exit_code, 0) << hugging_face.errors;
  EXPECT_THAT(hugging_face.output, StartsWith("mixtral-8x7b: 46.70 B parameters, 12.88 B active"));
  EXPECT_THAT(hugging_face.output, HasSubstr("no setting makes it fit"));
  // It has populations that no model of this program's own has.
  const ProgramResult shared = Run({"plan", HuggingFaceFile("deepseek-v3"), "--set",
                                    "optimizer.populations.shared_expert.momentum=bf16"});
  EXPECT_EQ(shared.exit_code, 0) << shared.errors;
}

TEST_F(PlanCommandTest, WritesJsonAndChart) {
  const ProgramResult result =
      Run({"plan", "moe-laptop", "--json", "--memory", "8GiB", "--chart", "memory.svg"});
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  const auto json = nlohmann::json::parse(result.output);
  EXPECT_EQ(json["verdict"]["fits"], true);
  EXPECT_EQ(json["verdict"]["memory_bytes"], int64_t{8} << 30);
  EXPECT_EQ(json["run"]["policy"], "skewadam");
  EXPECT_EQ(json["verdict"]["best_policy"]["policy"], "muon");
  EXPECT_THAT(ReadFile(folder_.path() / "memory.svg"), StartsWith("<svg "));
  EXPECT_THAT(ErrorOf({"plan", "moe-laptop", "--chart", "memory.svg"}), HasSubstr("memory.svg"));
}

TEST_F(PlanCommandTest, ComparesPoliciesAndFindsTheLargest) {
  const ProgramResult compared =
      Run({"plan", "moe-laptop", "--policy", "skewadam,adamw", "--sink", "accumulate,release"});
  EXPECT_EQ(compared.exit_code, 0) << compared.errors;
  EXPECT_EQ(std::count(compared.output.begin(), compared.output.end(), '\n'), 6);
  const ProgramResult refused = Run({"plan", "gpt-moe-tiny", "--policy", "mesh-layer-grouping,mesh",
                                     "--sink", "release", "--json"});
  EXPECT_EQ(refused.exit_code, 0) << refused.errors;
  const auto plans = nlohmann::json::parse(refused.output)["plans"];
  EXPECT_TRUE(plans[0]["memory"].is_null());
  EXPECT_THAT(plans[0]["refused"].get<std::string>(), HasSubstr("updates tensor by tensor"));
  EXPECT_GT(plans[1]["memory"]["peak_bytes"], 0);
  const ProgramResult one = Run({"plan", "gpt-moe-tiny", "--policy", "mesh-layer-grouping,mesh",
                                 "--sink", "release", "--largest", "--memory", "1MiB"});
  EXPECT_EQ(one.exit_code, 0) << one.errors;
  EXPECT_THAT(one.output, HasSubstr("| refused |"));
  const ProgramResult largest =
      Run({"plan", Mixtral(), "--largest", "--memory", "24GiB", "--json", "--sink", "release"});
  EXPECT_EQ(largest.exit_code, 0) << largest.errors;
  const auto json = nlohmann::json::parse(largest.output);
  EXPECT_GT(json["largest"][0]["model"]["layers"], 3);
  EXPECT_LE(json["largest"][0]["memory"]["peak_bytes"], int64_t{24} << 30);
}

TEST_F(PlanCommandTest, RefusesOnOneLine) {
  std::ofstream(folder_.path() / "broken.json") << "{\"model_type\": \"mixtral\",\n";
  std::ofstream(folder_.path() / "text.txt") << "x";
  EXPECT_THAT(ErrorOf({"plan", "broken.json"}), HasSubstr("broken.json: not JSON (byte "));
  EXPECT_THAT(ErrorOf({"plan", "missing.json"}), HasSubstr("missing.json"));
  EXPECT_THAT(ErrorOf({"plan", "missing.toml"}), HasSubstr("missing.toml"));
  EXPECT_THAT(ErrorOf({"plan", "text.txt"}), HasSubstr("a configuration is a .toml file"));
  EXPECT_THAT(ErrorOf({"plan", "moe-labtop"}), HasSubstr("the nearest is \"moe-laptop\""));
  EXPECT_THAT(ErrorOf({"plan", "moe-laptop", "--memory", "24Gig"}), HasSubstr("24Gig"));
  EXPECT_THAT(ErrorOf({"plan", "moe-laptop", "--policy", "adamv"}), HasSubstr("adamw"));
  EXPECT_THAT(ErrorOf({"plan", "moe-laptop", "--sink", "kitchen"}), HasSubstr("training.sink"));
  EXPECT_THAT(ErrorOf({"plan", "moe-laptop", "--set", "model.widht=3"}), HasSubstr("model.width"));
  EXPECT_THAT(ErrorOf({"plan", "moe-laptop", "--policy", "adamw,lion", "--chart", "a.svg"}),
              HasSubstr("--chart is of one run"));
  EXPECT_THAT(ErrorOf({"plan", "moe-laptop", "--largest", "--chart", "a.svg"}),
              HasSubstr("--chart draws one run, not --largest"));
  EXPECT_THAT(ErrorOf({"plan", "moe-laptop", "--chart", "a.png"}),
              HasSubstr("a.png: the picture is"));
  EXPECT_THAT(ErrorOf({"plan", "moe-laptop", "--policy", ""}), HasSubstr("--policy: is empty"));
  EXPECT_THAT(ErrorOf({"plan", "moe-laptop", "--policy", "adamw,,lion"}),
              HasSubstr("--policy adamw,,lion: a name between commas is empty"));
  EXPECT_THAT(ErrorOf({"plan", "moe-laptop", "--policy", "adamw,"}), HasSubstr("adamw,: a name"));
  EXPECT_THAT(ErrorOf({"plan", "moe-laptop", "--largest=5"}), HasSubstr("largest"));
  EXPECT_THAT(
      ErrorOf({"plan", "moe-laptop", "--policy", "adamw,lion", "--set", "optimizer.policy = muon"}),
      HasSubstr("is --policy's to say"));
  EXPECT_THAT(ErrorOf({"plan", "gpt-moe-tiny", "--policy",
                       "mesh-layer-grouping,mesh-layer-grouping", "--sink", "release"}),
              HasSubstr("training.sink"));
  EXPECT_THAT(
      ErrorOf({"plan", "moe-laptop", "--policy", "mesh-layer-grouping", "--sink", "release"}),
      HasSubstr("training.sink"));
}

}  // namespace
}  // namespace terrace
