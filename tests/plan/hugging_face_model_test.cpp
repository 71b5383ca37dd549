// Reading config.json of Hugging Face: published counts, and files that are wrong.
#include "plan/hugging_face_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>

#include "core/atomic_file.h"
#include "core/error.h"
#include "core/rng.h"
#include "plan/declared_plan.h"
#include "support/message_of.h"
#include "support/temporary_folder.h"
#include "train/config.h"

namespace terrace {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* kFiles[] = {"mixtral-8x7b", "olmoe-1b-7b", "qwen3-30b-a3b", "deepseek-v3"};

std::string FileText(const std::string& name) {
  return ReadFile(TestData() / "hugging_face" / (name + ".json"));
}

std::string ErrorOf(std::string_view json) {
  return MessageOf([&] { ParseHuggingFaceModel(json, "config.json"); });
}

// The text with the first `from` replaced.
std::string Replaced(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

struct Published {
  const char* file;
  int64_t parameters;
  double active_billions;  // as rounded where it was published
  double tolerance;
};

class PublishedCounts : public testing::TestWithParam<Published> {};

TEST_P(PublishedCounts, AreCounted) {
  const Published& published = GetParam();
  const HuggingFaceModel model = ParseHuggingFaceModel(FileText(published.file), published.file);
  EXPECT_EQ(model.size.parameters, published.parameters);
  EXPECT_NEAR(static_cast<double>(model.size.active_parameters) / 1e9, published.active_billions,
              published.tolerance);
  int64_t sum = 0;
  for (const DeclaredTensor& tensor : model.tensors) sum += tensor.count * tensor.shape.size();
  EXPECT_EQ(sum, published.parameters);
}

INSTANTIATE_TEST_SUITE_P(
    Models, PublishedCounts,
    testing::Values(Published{"mixtral-8x7b", 46'702'792'704, 12.9, 0.05},
                    Published{"olmoe-1b-7b", 6'919'161'856, 1.3, 0.05},
                    Published{"qwen3-30b-a3b", 30'532'122'624, 3.3, 0.1},
                    // The main model, without the layers that predict further tokens.
                    Published{"deepseek-v3", 671'026'419'200, 37, 0.6}),
    [](const auto& instance) {
      std::string name = instance.param.file;
      std::replace(name.begin(), name.end(), '-', '_');
      return name;
    });

TEST(HuggingFaceModelTest, MixtralRunsHere) {
  const HuggingFaceModel model = ParseHuggingFaceModel(FileText("mixtral-8x7b"), "mixtral");
  ASSERT_TRUE(model.config);
  const ModelSize here = SizeOf(*model.config);
  EXPECT_EQ(here.parameters, model.size.parameters);
  EXPECT_EQ(here.active_parameters, model.size.active_parameters);
  EXPECT_EQ(here.product_parameters, model.size.product_parameters);
  EXPECT_EQ(here.FlopsPerToken(4096), model.size.FlopsPerToken(4096));
  for (const char* name : {"olmoe-1b-7b", "qwen3-30b-a3b", "deepseek-v3"}) {
    const HuggingFaceModel other = ParseHuggingFaceModel(FileText(name), name);
    EXPECT_FALSE(other.config) << name;
    EXPECT_NE(other.not_runnable, "") << name;
  }
}

// What the tensors declare is what a run of the same model takes, up to alignment, which is none
// in Mixtral.
TEST(HuggingFaceModelTest, DeclaredBytesAreThoseOfTheRun) {
  const HuggingFaceModel model = ParseHuggingFaceModel(FileText("mixtral-8x7b"), "mixtral");
  for (const char* policy : {"skewadam", "adamw", "lion", "muon", "mesh", "mesh-bf16-buffer"}) {
    const RunConfig config =
        ConfigOfModel(*model.config, {std::string("optimizer.policy=") + policy});
    const TensorBytes declared = BytesOfTensors(model, config);
    const TensorBytes run = BytesOfTensors(config);
    EXPECT_EQ(declared.weights, run.weights);
    EXPECT_EQ(declared.gradients, run.gradients);
    EXPECT_EQ(declared.hidden_buffers, run.hidden_buffers);
    EXPECT_EQ(declared.state, run.state);
  }
}

TEST(HuggingFaceModelTest, DoesNotRunWhatWouldTakeForever) {
  const std::string many =
      Replaced(Replaced(FileText("mixtral-8x7b"), "layers\": 32", "layers\": 4096"),
               "\"num_local_experts\": 8", "\"num_local_experts\": 64");
  const HuggingFaceModel model = ParseHuggingFaceModel(
      Replaced(many, "\"intermediate_size\": 14336", "\"intermediate_size\": 8"), "m");
  EXPECT_FALSE(model.config);
  EXPECT_THAT(model.not_runnable, HasSubstr("more than 65536 experts"));
}

TEST(HuggingFaceModelTest, ReadsVariants) {
  const std::string qwen = FileText("qwen3-30b-a3b");
  const int64_t all = ParseHuggingFaceModel(qwen, "qwen").size.parameters;
  const int64_t experts = 128 * 3 * 2048 * 768 + 128 * 2048, dense = 3 * 2048 * 6144;
  EXPECT_EQ(ParseHuggingFaceModel(Replaced(qwen, "layers\": []", "layers\": [0, 7]"), "q")
                .size.parameters,
            all - 2 * (experts - dense));
  EXPECT_EQ(ParseHuggingFaceModel(Replaced(qwen, "sparse_step\": 1", "sparse_step\": 2"), "q")
                .size.parameters,
            all - 24 * (experts - dense));
  EXPECT_EQ(ParseHuggingFaceModel(Replaced(qwen, "embeddings\": false", "embeddings\": true"), "q")
                .size.parameters,
            all - 151936 * 2048);
  // Without latents for queries, as the smaller DeepSeek models.
  const std::string deepseek = FileText("deepseek-v3");
  EXPECT_EQ(
      ParseHuggingFaceModel(Replaced(deepseek, "q_lora_rank\": 1536", "q_lora_rank\": null"), "d")
          .size.parameters,
      671'026'419'200 + 61 * (int64_t{7168} * 128 * 192 - 7168 * 1536 - 1536 - 1536 * 128 * 192));
  EXPECT_EQ(ParseHuggingFaceModel(
                Replaced(FileText("mixtral-8x7b"), "\"model_type\": \"mixtral\",", ""), "m")
                .family,
            "mixtral");
}

TEST(HuggingFaceModelTest, RefusesWhatIsWrong) {
  const std::string good = FileText("deepseek-v3");
  const struct {
    std::string json, error;
  } cases[] = {
      {"", "config.json: not JSON (byte 1)"},
      {"[]", "config.json: not a JSON object"},
      {"null", "config.json: not a JSON object"},
      {"{\"model_type\": \"llama\"}", "config.json: model_type = \"llama\" is not one of"},
      {"{\"model_type\": 7}", "config.json: model_type = 7 is not text"},
      {"{\"architectures\": [[]]}", "model_type = \"\" is not one of"},
      {good.substr(0, good.size() / 2), "not JSON (byte"},
      {Replaced(good, "\"hidden_size\": 7168", "\"hidden_size\": 7168, \"hidden_size\": 1"),
       "the key \"hidden_size\" stands there twice"},
      {Replaced(good, "\"hidden_size\": 7168,", ""), "hidden_size is missing"},
      {Replaced(good, "\"hidden_size\": 7168", "\"hidden_size\": \"7168\""),
       "hidden_size = \"7168\" is not a whole number within 1 .. 2147483647"},
      {Replaced(good, "\"hidden_size\": 7168", "\"hidden_size\": 7168.5"), "7168.5 is not a whole"},
      {Replaced(good, "\"hidden_size\": 7168", "\"hidden_size\": -1"), "-1 is not a whole"},
      {Replaced(good, "\"hidden_size\": 7168", "\"hidden_size\": 18446744073709551615"),
       "18446744073709551615 is not a whole"},
      {Replaced(good, "\"hidden_size\": 7168", "\"hidden_size\": 1e999"), "beyond"},
      {Replaced(good, "\"hidden_size\": 7168", "\"hidden_size\": true"), "true is not a whole"},
      {Replaced(good, "\"hidden_size\": 7168", "\"hidden_size\": 2147483520"), "parameters"},
      {Replaced(good, "\"num_hidden_layers\": 61", "\"num_hidden_layers\": 999999999"),
       "num_hidden_layers"},
      {Replaced(good, "\"num_experts_per_tok\": 8", "\"num_experts_per_tok\": 257"),
       "num_experts_per_tok = 257 is not a whole number within 1 .. 256"},
      {Replaced(good, "\"first_k_dense_replace\": 3", "\"first_k_dense_replace\": 62"),
       "first_k_dense_replace"},
      {Replaced(good, "\"v_head_dim\": 128", "\"v_head_dim\": 2147483647"), "heads of"},
      {Replaced(good, "\"moe_intermediate_size\": 2048", "\"moe_intermediate_size\": 2147483647"),
       "parameters"},
      {Replaced(good, "\"n_shared_experts\": 1", "\"n_shared_experts\": 65537"),
       "n_shared_experts"},
      {Replaced(FileText("qwen3-30b-a3b"), "head_dim\": 128", "head_dim\": 2147483647"),
       "32 heads of 2147483647 are wider"},
      {Replaced(good, "\"hidden_act\": \"silu\"", "\"hidden_act\": \"gelu\""), "not silu"},
      {Replaced(good, "\"tie_word_embeddings\": false", "\"tie_word_embeddings\": \"no\""),
       "neither true nor false"},
      {Replaced(FileText("mixtral-8x7b"), "key_value_heads\": 8", "key_value_heads\": 5"),
       "num_key_value_heads = 5 does not divide num_attention_heads = 32"},
      {Replaced(FileText("mixtral-8x7b"), "attention_heads\": 32", "attention_heads\": 24"),
       "num_attention_heads = 24 does not divide hidden_size = 4096"},
      {Replaced(FileText("qwen3-30b-a3b"), "layers\": []", "layers\": [48]"),
       "mlp_only_layers: 48 is not the number of one of 48 layers"},
      {Replaced(FileText("qwen3-30b-a3b"), "layers\": []", "layers\": 3"), "is not a list"},
      {"{\"a\\nb\": 1, \"a\\nb\": 1}", "the key \"a\\nb\" stands there twice"},
      {"{\"x\": \"\xff\"}", "not JSON"},
      {std::string(5 << 20, ' '), "5242880 bytes are more than a config.json has"},
  };
  for (const auto& c : cases) {
    EXPECT_THAT(ErrorOf(c.json),
                AllOf(HasSubstr(c.error), HasSubstr("config.json: "), Not(HasSubstr("\n"))));
  }
}

TEST(HuggingFaceModelTest, RefusesDeepNestingAtOnce) {
  const auto start = std::chrono::steady_clock::now();
  for (const std::string opening : {"[", "{\"a\":"}) {
    std::string json = "{\"model_type\": ";
    while (json.size() < (4 << 20) - 16) json += opening;
    EXPECT_THAT(ErrorOf(json), HasSubstr("nested deeper than 32"));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

// Damage of every kind: what is read is planned, what is not is refused, and nothing else happens.
TEST(HuggingFaceModelTest, DamagedFilesAreReadOrRefused) {
  const std::string kPieces[] = {
      "{",    "}", "[",     "]",    ",",    ":",     "\"",   "-1",
      "0",    "1", "1e300", "null", "true", "\\u00", "\xff", "999999999999",
      "4096", " ", "\n",    "2.5"};
  int64_t read = 0, refused = 0;
  for (const char* file : kFiles) {
    const std::string good = FileText(file);
    for (uint64_t trial = 0; trial < 600; ++trial) {
      const auto random = [&, draw = uint64_t{0}](uint64_t below) mutable {
        return RandomBits(trial, ++draw) % below;
      };
      std::string text = good;
      auto next = random;
      for (uint64_t change = 0; change <= trial % 3; ++change) {
        const size_t at = next(text.size());
        switch (next(4)) {
          case 0:
            text[at] = static_cast<char>(next(256));
            break;
          case 1:
            text.erase(at, 1 + next(20));
            break;
          case 2:
            text.insert(at, kPieces[next(std::size(kPieces))]);
            break;
          default:
            // A number in place of another.
            if (const size_t digit = text.find_first_of("0123456789", at);
                digit != std::string::npos) {
              text.replace(digit, 1, kPieces[next(std::size(kPieces))]);
            }
        }
        if (text.empty()) break;
      }
      try {
        const HuggingFaceModel model = ParseHuggingFaceModel(text, file);
        EXPECT_GT(model.size.parameters, 0);
        EXPECT_LE(model.size.active_parameters, model.size.parameters);
        ++read;
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), Not(HasSubstr("\n")));
        ++refused;
      }
    }
  }
  EXPECT_GT(read, 100);
  EXPECT_GT(refused, 100);
}

}  // namespace
}  // namespace terrace
