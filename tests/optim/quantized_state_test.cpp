// Moments in 8 bits by block: what the kernels store is what block_quantization.h says of the
// float32 moments, and training with them stays close to training without.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "optim/kernels/block_quantization.h"
#include "optim/rule_testing.h"

namespace terrace {
namespace {

using kernels::Code;
using kernels::kQuantizationBlock;
using kernels::kStripe;

const Settings kExact = {{"momentum", "int8"}, {"second_moment", "exact"}};
const Settings kFactored = {{"momentum", "int8"}, {"second_moment", "factored"}};

Settings With(Settings settings, std::string_view key, const SettingValue& value) {
  settings.insert_or_assign(std::string(key), value);
  return settings;
}

// Remainders of units and of blocks, more than a stripe, rows of several parallel blocks.
const std::vector<Shape>& Shapes() {
  static const std::vector<Shape> shapes = {{1},      {63},      {256},      {257},      {70001},
                                            {1, 1},   {3, 64},   {5, 65},    {7, 257},   {130, 63},
                                            {3, 256}, {70, 300}, {2, 40001}, {3, 5, 100}};
  return shapes;
}

// Where an element's code is: blocks and stripes lie in rows of that length.
struct Place {
  int64_t scale;
  int64_t stripe;
  int64_t offset;
};
Place PlaceOf(int64_t element, int64_t length) {
  const int64_t row = element / length, column = element % length;
  return {row * kernels::CodeBlocks(length) + column / kQuantizationBlock,
          row * ((length + kStripe - 1) / kStripe) + column / kStripe, column % kStripe};
}

template <Code kCode>
std::vector<float> Dequantized(const TensorView& codes, const TensorView& scales, int64_t length) {
  std::vector<float> values(static_cast<size_t>(codes.size()));
  for (int64_t i = 0; i < codes.size(); ++i) {
    values[i] = kernels::Dequantize<kCode>(codes.as<uint8_t>()[i],
                                           scales.as<float>()[PlaceOf(i, length).scale]);
  }
  return values;
}

// That codes and scales are those of float32 values.
template <Code kCode>
void ExpectQuantized(const TensorView& exact, const TensorView& codes, const TensorView& scales,
                     int64_t length, uint64_t key) {
  std::vector<uint32_t> largest(static_cast<size_t>(scales.size()));
  const float* values = exact.as<float>();
  for (int64_t i = 0; i < exact.size(); ++i) {
    uint32_t& bits = largest[PlaceOf(i, length).scale];
    bits = std::max(bits, std::bit_cast<uint32_t>(std::abs(values[i])));
  }
  for (int64_t i = 0; i < exact.size(); ++i) {
    const Place place = PlaceOf(i, length);
    const float scale = kernels::ScaleOf(largest[place.scale]);
    ASSERT_EQ(scales.as<float>()[place.scale], scale) << "element " << i;
    const uint32_t random =
        kernels::RoundingBits(kernels::StripeKey(key, place.stripe), place.offset);
    ASSERT_EQ(codes.as<uint8_t>()[i], kernels::Quantize<kCode>(values[i], scale, random))
        << "element " << i << " of " << values[i];
  }
}

// A gradient whose magnitudes vary within a block.
std::vector<float> Gradient(int64_t size, int step) {
  std::vector<float> gradient = RandomValues(size, 0.01, 2 + step);
  for (int64_t i = 0; i < size; i += 7) gradient[i] *= 1e-3f;
  for (int64_t i = 0; i < size; i += 11) gradient[i] *= 1e-6f;
  for (int64_t i = 3; i < size; i += 1001) gradient[i] *= 300;
  return gradient;
}

// The float32 rule, given the moments that the codes say at each step, has the same weights, and
// its moments round to the codes that come next.
TEST(QuantizedStateTest, AdamW8BitIsAdamWOnTheDequantizedMoments) {
  for (const Shape& shape : Shapes()) {
    SCOPED_TRACE(shape.ToString());
    RuleBench quantized("adamw8bit", {}, 0.1f, shape);
    RuleBench exact("adamw", {}, 0.1f, shape);
    ASSERT_EQ(quantized.state()[0].dtype, DType::kU8);
    for (RuleBench* bench : {&quantized, &exact}) {
      Fill(bench->weight(), RandomValues(shape.size(), 0.5, 1));
      bench->context().gradient_scale = 0.37f;
    }
    for (int step = 0; step < 3; ++step) {
      const auto& state = quantized.state();
      Fill(exact.state()[0], Dequantized<Code::kSigned>(state[0], state[1], shape.size()));
      Fill(exact.state()[1], Dequantized<Code::kUnsigned>(state[2], state[3], shape.size()));
      for (RuleBench* bench : {&quantized, &exact}) {
        bench->SetGradient(Gradient(shape.size(), step));
        bench->Step();
      }
      ASSERT_EQ(ValuesOf(quantized.weight()), ValuesOf(exact.weight())) << "step " << step;
      const uint64_t key = quantized.context().rounding_key;
      ExpectQuantized<Code::kSigned>(exact.state()[0], state[0], state[1], shape.size(),
                                     kernels::MomentumKey(key));
      ExpectQuantized<Code::kUnsigned>(exact.state()[1], state[2], state[3], shape.size(),
                                       kernels::SecondMomentKey(key));
    }
  }
}

// Rules whose momentum alone is in 8 bits.
struct Int8Rule {
  std::string rule;
  Settings settings;
  // Whether the weight moves by the momentum before it is rounded, or by what it was.
  bool moves_first = false;
};
std::vector<Int8Rule> Int8Rules() {
  return {{"skewadam", kExact},
          {"skewadam", kFactored},
          {"sinkgd", {{"momentum", "int8"}}},
          {"sinkgd", {{"momentum", "int8"}, {"multiplier", "neuron"}}},
          {"sinkgd", {{"momentum", "int8"}, {"direction", "sign"}}, true},
          {"muon", {{"momentum", "int8"}}},
          {"muon", {{"momentum", "int8"}, {"nesterov", false}}},
          {"lion", {{"momentum", "int8"}}, true},
          {"sage", {{"momentum", "int8"}}, true},
          {"sgd", {{"momentum", "int8"}}, true},
          {"sgd", {{"momentum", "int8"}, {"nesterov", true}}, true},
          {"adafactor", {{"momentum", "int8"}}, true}};
}

// Null for a tensor that the rule refuses: matrices only, for instance.
std::unique_ptr<RuleBench> BenchOf(const Int8Rule& rule, const char* momentum, const Shape& shape) {
  try {
    return std::make_unique<RuleBench>(rule.rule, With(rule.settings, "momentum", momentum), 0.1f,
                                       shape);
  } catch (const Error&) {
    return nullptr;
  }
}

// One step from the same momentum leaves the codes of the float32 momentum. Nothing else in the
// state has to do with how it is stored.
TEST(QuantizedStateTest, EveryRuleStoresItsMomentumQuantized) {
  for (const Int8Rule& rule : Int8Rules()) {
    for (const Shape& shape : Shapes()) {
      if (rule.rule == "muon" && shape.size() > 30000) continue;  // products take their time
      const auto quantized = BenchOf(rule, "int8", shape), exact = BenchOf(rule, "f32", shape);
      if (quantized == nullptr) continue;
      SCOPED_TRACE(rule.rule + TextOf(rule.settings) + shape.ToString());
      const int64_t length = kernels::CodeRow(shape);
      EXPECT_EQ(quantized->state()[1].shape, kernels::QuantizationScales(shape));
      for (RuleBench* bench : {quantized.get(), exact.get()}) {
        Fill(bench->weight(), RandomValues(shape.size(), 0.5, 1));
        bench->context().gradient_scale = 0.37f;
      }
      for (int step = 0; step < 3; ++step) {
        const auto& state = quantized->state();
        Fill(exact->state()[0], Dequantized<Code::kSigned>(state[0], state[1], length));
        for (RuleBench* bench : {quantized.get(), exact.get()}) {
          bench->SetGradient(Gradient(shape.size(), step));
          bench->Step();
        }
        ExpectQuantized<Code::kSigned>(exact->state()[0], state[0], state[1], length,
                                       kernels::MomentumKey(quantized->context().rounding_key));
        for (size_t i = 1; i < exact->state().size(); ++i) {
          ASSERT_EQ(ValuesOf(state[i + 1]), ValuesOf(exact->state()[i])) << "step " << step;
        }
        const bool same = ValuesOf(quantized->weight()) == ValuesOf(exact->weight());
        // Of one element the normalized update has only a sign.
        if (rule.moves_first || shape.size() > 1) {
          ASSERT_EQ(same, rule.moves_first);
        }
        Fill(exact->weight(), ValuesOf(quantized->weight()));
      }
    }
  }
}

// The update is the formula's on the dequantized momentum: w = -lr * u / max(1, RMS(u)) from w = 0.
TEST(QuantizedStateTest, SkewAdamStepsByTheStoredMomentum) {
  for (const Settings& settings : {kExact, kFactored}) {
    for (const Shape& shape : Shapes()) {
      SCOPED_TRACE(TextOf(settings) + shape.ToString());
      const bool factored = shape.rank() == 2 && settings == kFactored;
      const int64_t length = kernels::CodeRow(shape);
      RuleBench bench("skewadam", settings, 0, shape);
      Fill(bench.weight(), std::vector<float>(shape.size()));
      bench.SetGradient(RandomValues(shape.size(), 0.01, 2));
      bench.Step();
      const auto& state = bench.state();
      const std::vector<float> m = Dequantized<Code::kSigned>(state[0], state[1], length);
      const std::vector<float> v = ValuesOf(state[2]);
      const std::vector<float> columns = factored ? ValuesOf(state[3]) : std::vector<float>();
      double mean = 0;
      for (const float x : v) mean += x / static_cast<double>(v.size());
      std::vector<double> u(m.size());
      double squares = 0;
      for (size_t i = 0; i < m.size(); ++i) {
        const double row = factored ? v[i / length] / std::max(mean, 1e-15) : v[i];
        const double column = factored ? columns[i % length] : 1;
        const double eps = 1e-8;
        u[i] = m[i] * std::sqrt(1 - 0.999) / (1 - 0.9) / std::sqrt(std::max(row, eps));
        if (factored) u[i] /= std::sqrt(std::max(column, eps));
        squares += u[i] * u[i];
      }
      const double clip = std::max(1.0, std::sqrt(squares / static_cast<double>(m.size())));
      const std::vector<float> weights = ValuesOf(bench.weight());
      for (size_t i = 0; i < m.size(); ++i) {
        // Some roundings of numbers up to 0.01 times some tens.
        ASSERT_NEAR(weights[i], -0.01 * u[i] / clip, 1e-6) << "element " << i;
      }
    }
  }
}

// How a second moment of 0.999 gets anywhere: by chance, in the right proportion. With rounding to
// nearest both would stay at their first value.
TEST(QuantizedStateTest, MomentsAreUnbiased) {
  constexpr int kSteps = 400;
  constexpr int64_t kSize = 8192;
  const auto expect_mean = [](const std::vector<float>& values, double expected) {
    double sum = 0, squares = 0;
    for (const float x : values) {
      sum += x;
      squares += double{x} * x;
    }
    const double mean = sum / kSize;
    const double error = std::sqrt((squares / kSize - mean * mean) / kSize);
    ASSERT_GT(error, 0) << "nothing was rounded: the case tests nothing";
    EXPECT_NEAR(mean, expected, 3 * error);
  };
  RuleBench adamw("adamw8bit", {{"beta1", 0.99}, {"beta2", 0.999}}, 0, {kSize});
  Fill(adamw.weight(), std::vector<float>(kSize));
  for (int step = 0; step < kSteps; ++step) {
    adamw.SetGradient(std::vector<float>(kSize, step == 0 ? 2.0f : 1.0f));
    adamw.Step();
  }
  const auto& state = adamw.state();
  expect_mean(Dequantized<Code::kSigned>(state[0], state[1], kSize),
              1 - std::pow(0.99, kSteps) + 0.01 * std::pow(0.99, kSteps - 1));
  expect_mean(Dequantized<Code::kUnsigned>(state[2], state[3], kSize),
              1 - std::pow(0.999, kSteps) + 3 * 0.001 * std::pow(0.999, kSteps - 1));

  for (const Settings& settings : {kExact, kFactored}) {
    RuleBench bench("skewadam", With(settings, "beta1", 0.99), 0, {64, kSize / 64});
    Fill(bench.weight(), std::vector<float>(kSize));
    for (int step = 0; step < kSteps; ++step) {
      bench.SetGradient(std::vector<float>(kSize, 1));
      bench.Step();
    }
    expect_mean(Dequantized<Code::kSigned>(bench.state()[0], bench.state()[1], kSize / 64),
                1 - std::pow(0.99, kSteps));
  }
}

// Neighbouring codes are at most 1/8 of a value apart. A rounding of deviation d <= 1/16 that is
// averaged with beta has a deviation of d / sqrt(1 - beta^2), 0.143 for the momentum's 0.9. A
// second moment moves in rare steps of 1/8: in equilibrium, chance adds variance
// (1 / 8) * E|g^2 - v| * (1 - beta2) a step, of which 2 (1 - beta2) is forgotten: deviation of v
// below sqrt(1 / 16) = 0.25, of its root 0.125. Together an update is within 0.19 of adamw's, as a
// root mean square; errors of the momentum average out over steps.
TEST(QuantizedStateTest, AdamW8BitTrainsAlongAdamW) {
  constexpr int kSteps = 300;
  const Shape shape{64, 300};
  for (const double beta2 : {0.95, 0.999}) {
    RuleBench quantized("adamw8bit", {{"beta2", beta2}}, 0, shape);
    RuleBench exact("adamw", {{"beta2", beta2}}, 0, shape);
    for (RuleBench* bench : {&quantized, &exact}) {
      Fill(bench->weight(), std::vector<float>(shape.size()));
      bench->context().learning_rate = 1e-3f;
    }
    for (int step = 0; step < kSteps; ++step) {
      for (RuleBench* bench : {&quantized, &exact}) {
        bench->SetGradient(RandomValues(shape.size(), 0.01, 2 + step));
        bench->Step();
      }
    }
    const std::vector<float> a = ValuesOf(quantized.weight()), b = ValuesOf(exact.weight());
    double differences = 0, changes = 0;
    for (size_t i = 0; i < a.size(); ++i) {
      differences += (a[i] - b[i]) * (a[i] - b[i]);
      changes += double{b[i]} * b[i];
    }
    RecordProperty("relative_difference", std::to_string(std::sqrt(differences / changes)));
    EXPECT_LT(std::sqrt(differences / changes), 0.19) << beta2;
    EXPECT_GT(differences, 0);
  }
}

// An element whose gradient is far below its block's: no update explodes because its second moment
// is lost.
TEST(QuantizedStateTest, QuietElementsOfALoudBlockStayBounded) {
  constexpr int64_t kSize = 256;
  for (const float quiet : {1e-4f, 1e-7f, 1e-10f, 1e-13f}) {
    RuleBench bench("adamw8bit", {{"eps", 1e-15}}, 0, {kSize});
    Fill(bench.weight(), std::vector<float>(kSize));
    bench.context().learning_rate = 1;
    std::vector<float> before(kSize);
    for (int step = 0; step < 100; ++step) {
      std::vector<float> gradient = RandomValues(kSize, quiet, 2 + step);
      gradient[5] = step % 2 == 0 ? 1 : -1;
      bench.SetGradient(gradient);
      bench.Step();
      const std::vector<float> now = ValuesOf(bench.weight());
      for (int64_t i = 0; i < kSize; ++i) {
        // adamw itself is within (1 - beta1) / sqrt(1 - beta2) = 3.2, and a little at the start.
        ASSERT_LT(std::abs(now[i] - before[i]), 4) << "element " << i << " step " << step;
      }
      before = now;
    }
  }
}

TEST(QuantizedStateTest, BadValuesStayVisibleInTheirBlock) {
  std::vector<Int8Rule> rules = Int8Rules();
  rules.push_back({"adamw8bit", {}});
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    for (const auto& [rule, settings, moves_first] : rules) {
      if (rule == "adafactor") continue;  // bounds all updates by all
      SCOPED_TRACE(rule + TextOf(settings));
      RuleBench bench(rule, settings, 0, {1, 600});
      Fill(bench.weight(), std::vector<float>(600));
      std::vector<float> gradient = RandomValues(600, 0.01, 2);
      gradient[300] = bad;
      bench.SetGradient(gradient);
      bench.Step();
      bench.SetGradient(RandomValues(600, 0.01, 3));
      bench.Step();
      const std::vector<float> m =
          Dequantized<Code::kSigned>(bench.state()[0], bench.state()[1], 600);
      for (int64_t i = 0; i < 600; ++i) EXPECT_EQ(std::isnan(m[i]), i >= 256 && i < 512) << i;
      // A sign of it is a number.
      const bool by_sign = moves_first && rule != "sgd";
      EXPECT_EQ(std::isnan(ValuesOf(bench.weight())[300]), !by_sign);
    }
  }
}

TEST(QuantizedStateTest, ZerosStayZeros) {
  std::vector<Int8Rule> rules = Int8Rules();
  rules.push_back({"adamw8bit", {}});
  for (const auto& [rule, settings, moves_first] : rules) {
    SCOPED_TRACE(rule + TextOf(settings));
    RuleBench bench(rule, settings, 0, {3, 300});
    Fill(bench.weight(), std::vector<float>(900, 1));
    bench.SetGradient(std::vector<float>(900, 0));
    bench.Step();
    EXPECT_EQ(ValuesOf(bench.weight()), std::vector<float>(900, 1));
    for (const TensorView& view : bench.state()) {
      if (rule == "adafactor" && view.dtype == DType::kF32) continue;  // adds eps
      for (int64_t i = 0; i < view.bytes(); ++i) ASSERT_EQ(view.data[i], std::byte{0});
    }
  }
}

}  // namespace
}  // namespace terrace
