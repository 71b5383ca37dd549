// What MESH is made of: Sinkhorn's alternation, momentum in the gradient buffer, groups,
// multipliers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "optim/accumulate_sink.h"
#include "optim/kernels/block_quantization.h"
#include "optim/rule_testing.h"

namespace terrace {
namespace {

using testing::HasSubstr;

constexpr float kRate = 0.5f;
constexpr double kScale = 0.05;

using Matrix = std::vector<double>;  // row-major

// As stated in rules/sinkgd.cpp, on a matrix that exists.
Matrix Sinkhorn(Matrix x, int64_t rows, int64_t columns, int64_t iterations, double eps) {
  for (int64_t iteration = 0; iteration < iterations; ++iteration) {
    for (int64_t i = 0; i < rows; ++i) {
      double squares = 0;
      for (int64_t j = 0; j < columns; ++j) squares += x[i * columns + j] * x[i * columns + j];
      const double factor = std::sqrt(columns) / (std::sqrt(squares) + eps);
      for (int64_t j = 0; j < columns; ++j) x[i * columns + j] *= factor;
    }
    for (int64_t j = 0; j < columns; ++j) {
      double squares = 0;
      for (int64_t i = 0; i < rows; ++i) squares += x[i * columns + j] * x[i * columns + j];
      const double factor = std::sqrt(rows) / (std::sqrt(squares) + eps);
      for (int64_t i = 0; i < rows; ++i) x[i * columns + j] *= factor;
    }
  }
  return x;
}

double LargestDifference(const std::vector<float>& a, const Matrix& b) {
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(a[i] - b[i]));
  return largest;
}

TEST(SinkGdTest, MatchesThePlainFormulaOverShapesAndTypes) {
  for (const DType gradient : {DType::kF32, DType::kBF16}) {
    for (const Shape shape :
         {Shape{1, 1}, Shape{1, 70}, Shape{70, 1}, Shape{63, 64}, Shape{65, 63}, Shape{200, 257}}) {
      SCOPED_TRACE(fmt::format("{} {}", shape.ToString(), NameOf(gradient)));
      RuleBench bench("sinkgd", Settings{}, 0.1f, shape, DType::kF32, gradient);
      const std::vector<float> w = RandomValues(shape.size(), 1, 1);
      const std::vector<float> g = RandomValues(shape.size(), 1e-3, 2);
      Fill(bench.weight(), w);
      Fill(bench.gradient(), g);
      bench.context().learning_rate = kRate;
      bench.context().gradient_scale = 0.25f;
      bench.Step();
      Matrix expected(g.begin(), g.end());
      for (double& x : expected) x *= 0.25;
      expected = Sinkhorn(expected, shape[0], shape[1], 5, 1e-8);
      for (size_t i = 0; i < w.size(); ++i) {
        expected[i] = w[i] * (1 - kRate * 0.1) - kRate * kScale * expected[i];
      }
      EXPECT_LT(LargestDifference(ValuesOf(bench.weight()), expected), 2e-6);
    }
  }
}

TEST(SinkGdTest, StepsByTheStoredMomentum) {
  for (const char* momentum : {"bf16", "int8"}) {
    for (const Shape shape :
         {Shape{1, 1}, Shape{1, 70}, Shape{70, 1}, Shape{65, 63}, Shape{200, 257}, Shape{9, 64}}) {
      SCOPED_TRACE(fmt::format("{} {}", shape.ToString(), momentum));
      RuleBench bench("sinkgd", {{"momentum", momentum}}, 0, shape);
      Fill(bench.weight(), std::vector<float>(shape.size()));
      Fill(bench.gradient(), RandomValues(shape.size(), 1e-3, 2));
      bench.context().learning_rate = kRate;
      bench.Step();
      const TensorView& stored = bench.state()[0];
      Matrix expected;
      for (int64_t i = 0; i < shape.size(); ++i) {
        expected.push_back(
            stored.dtype == DType::kBF16
                ? ToFloat(stored.as<BF16>()[i])
                : kernels::Dequantize<kernels::Code::kSigned>(
                      stored.as<uint8_t>()[i],
                      bench.state()[1].as<float>()[i / shape[1] * kernels::CodeBlocks(shape[1]) +
                                                   i % shape[1] / 256]));
      }
      expected = Sinkhorn(expected, shape[0], shape[1], 5, 1e-8);
      for (double& x : expected) x *= -kRate * kScale;
      EXPECT_LT(LargestDifference(ValuesOf(bench.weight()), expected), 2e-6);
    }
  }
}

TEST(SinkGdTest, EpsCountsForTinyGradients) {
  const Shape shape{4, 6};
  RuleBench bench("sinkgd", {{"eps", 1e-4}, {"iterations", 1.0}}, 0, shape);
  const std::vector<float> g = RandomValues(shape.size(), 1e-4, 2);
  Fill(bench.weight(), std::vector<float>(shape.size()));
  Fill(bench.gradient(), g);
  bench.context().learning_rate = 20;
  bench.Step();
  Matrix expected = Sinkhorn({g.begin(), g.end()}, 4, 6, 1, 1e-4);
  for (double& x : expected) x = -x;
  EXPECT_LT(LargestDifference(ValuesOf(bench.weight()), expected), 1e-5);
}

TEST(SinkGdTest, RowsAndColumnsOfZerosStayAndDoNoHarm) {
  const Shape shape{70, 66};
  RuleBench bench("sinkgd", Settings{}, 0, shape);
  std::vector<float> g = RandomValues(shape.size(), 1, 2);
  for (int64_t j = 0; j < 66; ++j) g[3 * 66 + j] = 0;
  for (int64_t i = 0; i < 70; ++i) g[i * 66 + 65] = 0;
  Fill(bench.weight(), std::vector<float>(shape.size()));
  Fill(bench.gradient(), g);
  bench.Step();
  for (int64_t i = 0; i < 70; ++i) {
    for (int64_t j = 0; j < 66; ++j) {
      const float w = ValuesOf(bench.weight())[i * 66 + j];
      ASSERT_TRUE(std::isfinite(w));
      EXPECT_EQ(w == 0, g[i * 66 + j] == 0);
    }
  }
  const std::vector<float> before = ValuesOf(bench.weight());
  Fill(bench.gradient(), std::vector<float>(shape.size()));
  bench.Step();
  EXPECT_EQ(ValuesOf(bench.weight()), before);
}

TEST(SinkGdTest, ServesMatricesOnly) {
  Parameter vector;
  vector.value.shape = {8};
  EXPECT_NO_THROW(MakeRule("sinkgd", {{"direction", "sign"}})->State(vector));
  try {
    MakeRule("sinkgd", {})->State(vector);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("sinkgd serves matrices only"));
  }
}

TEST(SinkGdTest, BuffersOfBFloat16NeedWeightsOfBFloat16) {
  Parameter matrix;
  matrix.value.shape = {4, 8};
  const auto rule = MakeRule("sinkgd", {{"momentum", "hidden_bf16"}});
  EXPECT_THROW(rule->State(matrix), Error);
  matrix.value.dtype = DType::kBF16;
  EXPECT_EQ(rule->State(matrix).back().dtype, DType::kBF16);
}

TEST(SinkGdTest, SettingsWithoutEffectAreRefused) {
  const auto refused = [](const Settings& settings) {
    try {
      MakeRule("sinkgd", settings);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_THAT(refused({{"direction", "sign"}, {"grouping", "layer"}}),
              HasSubstr("grouping has no effect"));
  EXPECT_THAT(refused({{"beta", 0.5}}), HasSubstr("beta has no effect"));
  EXPECT_THAT(refused({{"block_neurons", 2.0}}), HasSubstr("block_neurons has no effect"));
  EXPECT_THAT(refused({{"momentum", "int4"}}),
              HasSubstr("has to be one of none, f32, bf16, int8, hidden_f32, hidden_bf16"));
}

TEST(SinkGdTest, TheSignOfAMomentum) {
  const Shape shape{30, 70};
  RuleBench bench("sinkgd", {{"direction", "sign"}, {"momentum", "f32"}, {"beta", 0.75}}, 0, shape);
  Fill(bench.weight(), std::vector<float>(shape.size()));
  bench.context().learning_rate = 20;  // steps of 1
  std::vector<double> momentum(shape.size());
  Matrix expected(shape.size());
  for (int step = 0; step < 3; ++step) {
    std::vector<float> g = RandomValues(shape.size(), 1, step);
    g[5] = 0;
    Fill(bench.gradient(), g);
    bench.Step();
    for (size_t i = 0; i < g.size(); ++i) {
      momentum[i] = 0.75 * momentum[i] + 0.25 * g[i];
      expected[i] -= momentum[i] == 0 ? 0 : std::copysign(1.0, momentum[i]);
    }
  }
  EXPECT_EQ(LargestDifference(ValuesOf(bench.weight()), expected), 0);
}

// The multiplier of MESH-B, from the second moments of blocks of rows of a matrix.
Matrix Multiplied(Matrix x, const std::vector<double>& moments, int64_t rows, int64_t columns,
                  int64_t block) {
  std::vector<double> multipliers;
  double logarithms = 0;
  for (double moment : moments) {
    multipliers.push_back(1 / (std::sqrt(moment) + 1e-8));
    logarithms += std::log(multipliers.back());
  }
  const double mean = std::exp(logarithms / static_cast<double>(moments.size()));
  double before = 0, after = 0;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      double& entry = x[i * columns + j];
      before += entry * entry;
      entry *= std::clamp(multipliers[i / block] / mean, 0.25, 4.0);
      after += entry * entry;
    }
  }
  for (double& entry : x) entry *= std::sqrt(before / after);
  return x;
}

std::vector<float> Transposed(const std::vector<float>& x, int64_t rows, int64_t columns) {
  std::vector<float> result(x.size());
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) result[j * rows + i] = x[i * columns + j];
  }
  return result;
}

TEST(SinkGdTest, MultiplierOfBlocksOfNeurons) {
  const int64_t rows = 67, columns = 40;
  for (const int64_t block : {int64_t{1}, int64_t{5}, int64_t{100}}) {
    for (const int axis : {0, 1}) {
      SCOPED_TRACE(fmt::format("{} {}", block, axis));
      const Shape shape = axis == 0 ? Shape{rows, columns} : Shape{columns, rows};
      RuleBench bench("sinkgd",
                      {{"multiplier", "neuron"},
                       {"block_neurons", static_cast<double>(block)},
                       {"multiplier_beta2", 0.5},
                       {"iterations", 100.0}},
                      0, shape, DType::kF32, DType::kF32, axis);
      Fill(bench.weight(), std::vector<float>(shape.size()));
      bench.context().learning_rate = 20;
      std::vector<double> moments((rows + block - 1) / block);
      Matrix expected(rows * columns);
      for (int step = 1; step <= 2; ++step) {
        std::vector<float> g = RandomValues(rows * columns, 1, step);
        for (int64_t i = 0; i < rows; ++i) {  // norms apart by more than the clamp allows
          for (int64_t j = 0; j < columns; ++j) g[i * columns + j] *= 0.02f * (1 + (i * 7) % 50);
        }
        Fill(bench.gradient(), axis == 0 ? g : Transposed(g, rows, columns));
        bench.Step();
        std::vector<double> corrected;
        for (size_t b = 0; b < moments.size(); ++b) {
          const int64_t first = static_cast<int64_t>(b) * block;
          const int64_t last = std::min(rows, first + block);
          double squares = 0;
          for (int64_t k = first * columns; k < last * columns; ++k) squares += double{g[k]} * g[k];
          moments[b] =
              0.5 * moments[b] + 0.5 * squares / static_cast<double>((last - first) * columns);
          corrected.push_back(moments[b] / (1 - std::pow(0.5, step)));
        }
        // After many iterations it does not matter which came first, rows or columns.
        const Matrix x = Multiplied(Sinkhorn({g.begin(), g.end()}, rows, columns, 100, 1e-8),
                                    corrected, rows, columns, block);
        for (size_t i = 0; i < x.size(); ++i) expected[i] -= x[i];
      }
      const std::vector<float> w = ValuesOf(bench.weight());
      EXPECT_LT(LargestDifference(axis == 0 ? w : Transposed(w, columns, rows), expected), 1e-4);
    }
  }
}

// A norm and experts "layers.0.experts.E.w.weight" under a policy of one line.
class MeshTest : public testing::Test {
 protected:
  static constexpr int64_t kExperts = 3;
  static constexpr int64_t kRows = 72, kColumns = 40;

  struct Run {
    Arena arena{int64_t{16} << 20};
    Parameters parameters;
    std::unique_ptr<Optimizer> optimizer;
    std::unique_ptr<AccumulateSink> sink;

    Run(const std::string& expert_lines, const Clipping& clipping, DType dtype = DType::kF32) {
      for (int64_t id = 0; id <= kExperts; ++id) {
        Parameter& parameter = parameters.emplace_back();
        parameter.id = id;
        parameter.expert = id - 1;
        parameter.population = id == 0 ? Population::kNorm : Population::kExpert;
        parameter.name = id == 0 ? "norm" : fmt::format("layers.0.experts.{}.w.weight", id - 1);
        const Shape shape = id == 0 ? Shape{kColumns} : Shape{kRows, kColumns};
        parameter.value = arena.Allocate(Memory::kWeights, id == 0 ? DType::kF32 : dtype, shape,
                                         parameter.name.c_str());
        Fill(parameter.value, RandomValues(shape.size(), 0.5, id));
      }
      const Policy policy =
          ResolvePolicy("test", ParsePolicy("base = \"mesh\"\n[expert]\n" + expert_lines, "test"));
      optimizer = std::make_unique<Optimizer>(policy, parameters, arena, 1);
      sink = std::make_unique<AccumulateSink>(parameters, *optimizer, arena, DType::kF32, clipping);
    }

    // `idle`: bit e is set for an expert without tokens.
    StepResult Step(int64_t step, int idle = 0) {
      sink->BeginStep(1, kRate);
      for (const Parameter& parameter : parameters) {
        if (parameter.expert >= 0 && (idle >> parameter.expert & 1) != 0) {
          sink->Skip(parameter);
          continue;
        }
        const GradientSlot slot = sink->Begin(parameter);
        std::vector<float> g = GradientOf(parameter, step);
        if (slot.add) {
          const std::vector<float> old = ValuesOf(slot.view);
          for (size_t i = 0; i < g.size(); ++i) g[i] += old[i];
        }
        Fill(slot.view, g);
        sink->End(parameter, slot);
      }
      return sink->Finish();
    }
    static std::vector<float> GradientOf(const Parameter& parameter, int64_t step) {
      return RandomValues(parameter.value.size(), 1e-2, 100 * step + parameter.id);
    }
    std::vector<float> Weights(int64_t expert) const {
      return ValuesOf(parameters[expert + 1].value);
    }
  };

  static constexpr Clipping kUnclipped{.kind = ClippingKind::kNone};
};

TEST_F(MeshTest, TheBufferIsTheMomentum) {
  Run hidden("momentum = \"hidden_f32\"\nbeta = 0.75", kUnclipped);
  Run stated("momentum = \"f32\"\nbeta = 0.75", kUnclipped);
  Run stateless("momentum = \"none\"", kUnclipped);
  for (int64_t step = 0; step < 6; ++step) {
    hidden.Step(step);
    stated.Step(step);
    stateless.Step(step);
  }
  for (int64_t e = 0; e < kExperts; ++e) {
    const std::vector<float> expected = stated.Weights(e);
    EXPECT_LT(LargestDifference(hidden.Weights(e), {expected.begin(), expected.end()}), 1e-4);
    EXPECT_GT(LargestDifference(stateless.Weights(e), {expected.begin(), expected.end()}), 1e-2);
  }
  EXPECT_NE(hidden.Weights(0), RandomValues(kRows * kColumns, 0.5, 1));
}

// With the buffer as its momentum a multiplier goes by the mean that the buffer holds.
TEST_F(MeshTest, TheMultiplierGoesByTheBuffer) {
  Run run(
      "momentum = \"hidden_f32\"\nbeta = 0.75\nmultiplier = \"neuron\"\n"
      "multiplier_beta2 = 0.5\nweight_decay = 0",
      kUnclipped);
  const std::vector<float> start = run.Weights(0);
  Matrix expected(start.begin(), start.end()), buffer(start.size());
  std::vector<double> moments(kRows);
  for (int step = 1; step <= 3; ++step) {
    run.Step(step);
    const std::vector<float> g = Run::GradientOf(run.parameters[1], step);
    Matrix mean(buffer.size());
    for (size_t i = 0; i < buffer.size(); ++i) {
      buffer[i] = 0.75 * buffer[i] + g[i];
      mean[i] = 0.25 * buffer[i];
    }
    std::vector<double> corrected;
    for (int64_t i = 0; i < kRows; ++i) {
      double squares = 0;
      for (int64_t j = 0; j < kColumns; ++j) {
        squares += mean[i * kColumns + j] * mean[i * kColumns + j];
      }
      moments[i] = 0.5 * moments[i] + 0.5 * squares / kColumns;
      corrected.push_back(moments[i] / (1 - std::pow(0.5, step)));
    }
    const Matrix x =
        Multiplied(Sinkhorn(mean, kRows, kColumns, 5, 1e-8), corrected, kRows, kColumns, 1);
    for (size_t i = 0; i < x.size(); ++i) expected[i] -= kRate * x[i];
  }
  EXPECT_LT(LargestDifference(run.Weights(0), expected), 1e-4);
}

TEST_F(MeshTest, WithoutDecayTheBufferIsTheGradient) {
  Run hidden("momentum = \"hidden_f32\"\nbeta = 0", kUnclipped);
  Run stateless("momentum = \"none\"", kUnclipped);
  for (int64_t step = 0; step < 3; ++step) {
    hidden.Step(step);
    stateless.Step(step);
  }
  for (int64_t e = 0; e < kExperts; ++e) EXPECT_EQ(hidden.Weights(e), stateless.Weights(e));
}

TEST_F(MeshTest, ABufferOfBFloat16IsCloseToOneOfFloat32) {
  Run narrow("momentum = \"hidden_bf16\"", kUnclipped, DType::kBF16);
  Run wide("momentum = \"hidden_f32\"", kUnclipped, DType::kBF16);
  for (int64_t step = 0; step < 10; ++step) {
    narrow.Step(step);
    wide.Step(step);
  }
  // Ten steps of about 0.5, in directions that are off by roundings to 2^-8 of buffers that hold
  // ten gradients at most.
  const std::vector<float> expected = wide.Weights(0);
  const double difference =
      LargestDifference(narrow.Weights(0), {expected.begin(), expected.end()});
  EXPECT_LT(difference, 0.5);
  EXPECT_GT(difference, 0);
}

TEST_F(MeshTest, IdleExpertsAreLeftAlone) {
  Run run("", kUnclipped);
  run.Step(0);
  run.Step(1);
  const auto state_of = [&](int64_t expert) {
    return std::pair(run.Weights(expert),
                     ValuesOf(run.optimizer->HiddenBuffer(run.parameters[expert + 1])));
  };
  const auto idle = state_of(1), busy = state_of(2);
  for (int64_t step = 2; step < 5; ++step) {
    const StepResult result = run.Step(step, 0b010);
    EXPECT_EQ(result.skipped_tensors, 1);
  }
  EXPECT_EQ(state_of(1), idle);
  EXPECT_EQ(run.optimizer->steps()[2], 2);
  EXPECT_NE(state_of(2).first, busy.first);
  EXPECT_NE(state_of(2).second, busy.second);
}

TEST_F(MeshTest, TheLedgerShowsBuffersUnderGradients) {
  const auto bytes = [](const std::string& lines, Memory category) {
    Run run(lines, kUnclipped, DType::kBF16);
    return run.arena.ledger().current_bytes[static_cast<int>(category)];
  };
  const std::string hidden = "momentum = \"hidden_f32\"", narrow = "momentum = \"hidden_bf16\"",
                    stated = "momentum = \"f32\"", none = "momentum = \"none\"";
  const auto experts = [](DType dtype) {
    Arena alone = Arena::Dry();
    alone.Allocate(Memory::kGradients, dtype, {kRows, kColumns}, "expert");
    return kExperts * alone.ledger().total_bytes;
  };
  EXPECT_EQ(bytes(hidden, Memory::kOptimizer), bytes(none, Memory::kOptimizer));
  EXPECT_EQ(bytes(hidden, Memory::kGradients), bytes(none, Memory::kGradients));
  EXPECT_EQ(bytes(narrow, Memory::kGradients) + experts(DType::kF32),
            bytes(none, Memory::kGradients) + experts(DType::kBF16));
  EXPECT_EQ(bytes(stated, Memory::kOptimizer),
            bytes(none, Memory::kOptimizer) + experts(DType::kF32));
}

TEST_F(MeshTest, TheNormCountsTheMeanThatABufferHolds) {
  Run run("momentum = \"hidden_f32\"\nbeta = 0.75", {.max_norm = 0.125f});
  std::vector<double> mean(kExperts * kRows * kColumns);
  for (int64_t step = 0; step < 3; ++step) {
    const StepResult result = run.Step(step);
    double squares = 0;
    for (const Parameter& parameter : run.parameters) {
      const std::vector<float> g = Run::GradientOf(parameter, step);
      for (size_t i = 0; i < g.size(); ++i) {
        if (parameter.expert < 0) {
          squares += double{g[i]} * g[i];
          continue;
        }
        double& m = mean[parameter.expert * kRows * kColumns + i];
        m = 0.75 * m + 0.25 * g[i];
        squares += m * m;
      }
    }
    EXPECT_NEAR(result.gradient_norm, std::sqrt(squares), 1e-5 * result.gradient_norm);
    EXPECT_NEAR(result.gradient_scale, 0.125 / std::sqrt(squares), 1e-4);
  }
}

// Experts of a layer as one matrix: the same as sinkgd on the stacked gradients.
TEST_F(MeshTest, LayersAsOneMatrix) {
  for (const int idle : {0b000, 0b010}) {
    Run run("momentum = \"none\"\ngrouping = \"layer\"\nweight_decay = 0", kUnclipped);
    const std::vector<float> idle_before = run.Weights(1);
    Matrix stacked, before;
    for (int64_t e = 0; e < kExperts; ++e) {
      if ((idle >> e & 1) != 0) continue;
      const std::vector<float> g = Run::GradientOf(run.parameters[e + 1], 0), w = run.Weights(e);
      stacked.insert(stacked.end(), g.begin(), g.end());
      before.insert(before.end(), w.begin(), w.end());
    }
    run.Step(0, idle);
    const int64_t rows = static_cast<int64_t>(stacked.size()) / kColumns;
    stacked = Sinkhorn(stacked, rows, kColumns, 5, 1e-8);
    std::vector<float> after;
    for (int64_t e = 0; e < kExperts; ++e) {
      if ((idle >> e & 1) != 0) continue;
      const std::vector<float> w = run.Weights(e);
      after.insert(after.end(), w.begin(), w.end());
    }
    // A rate of 20 * 0.5 times a scale of 0.05.
    for (size_t i = 0; i < stacked.size(); ++i) stacked[i] = before[i] - kRate * stacked[i];
    EXPECT_LT(LargestDifference(after, stacked), 1e-5);
    if (idle != 0) {
      EXPECT_EQ(run.Weights(1), idle_before);
    }
  }
}

// Embedding and head of nanowhale-110m (129,280 tokens, width 320), its experts, and the rest as
// one matrix.
TEST_F(MeshTest, StateBytesOfNanowhale) {
  Parameters parameters;
  const auto add = [&](Population population, Shape shape) {
    Parameter& parameter = parameters.emplace_back();
    parameter.name = fmt::format("tensor.{}", parameters.size());
    parameter.id = static_cast<int64_t>(parameters.size()) - 1;
    parameter.population = population;
    parameter.value.shape = shape;
  };
  add(Population::kEmbedding, {129280, 320});
  add(Population::kHead, {129280, 320});
  for (int i = 0; i < 96; ++i) add(Population::kExpert, {640, 320});
  add(Population::kAttention, {110369621 - 82739200 - 19660800, 1});
  EXPECT_EQ(StateBytesOf(PolicyNamed("adamw"), parameters).total, 882956968);
  const int64_t means = 2 * 320 * 4;
  EXPECT_EQ(StateBytesOf(PolicyNamed("mesh"), parameters).total, 330956800 + means);
  EXPECT_EQ(StateBytesOf(PolicyNamed("mesh-b"), parameters).total,
            330956800 + means + 96 * 640 * 4);
  EXPECT_EQ(StateBytesOf(PolicyNamed("mesh-state-momentum"), parameters).total,
            330956800 + means + 19660800 * 4);
}

}  // namespace
}  // namespace terrace
