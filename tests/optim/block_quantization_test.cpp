// The 8-bit codes by their scalar definition; quantized_state_test.cpp holds the kernels to it.
#include "optim/kernels/block_quantization.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace terrace::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr uint32_t kRandoms[] = {0, 1, 77, 32768, 65534, 65535};

uint32_t Bits(float value) { return std::bit_cast<uint32_t>(value); }

// Magnitudes within a block of scale 1, from below the smallest code to the largest, and off grid.
std::vector<float> Magnitudes() {
  std::vector<float> values;
  for (float x = 1.875f - 0x1p-15f; x > 0x1p-40f; x *= 0.83f) values.push_back(x);
  return values;
}

template <Code kCode>
struct Named {
  static constexpr Code kValue = kCode;
};

template <typename T>
class BlockQuantizationTest : public testing::Test {
 public:
  static constexpr Code kCode = T::kValue;
  static constexpr bool kIsSigned = kCode == Code::kSigned;
  static constexpr int kMagnitudes = kIsSigned ? 128 : 256;
  static constexpr float kUnit = kIsSigned ? 0x1p-15f : 0x1p-31f;
  static constexpr float kSmallest = kUnit / 8;
  static constexpr float kLargest = 1.875f - kUnit;  // rounded to float32

  static float Magnitude(int code) { return Dequantize<kCode>(static_cast<uint8_t>(code), 1); }
  // The distance between the codes around a magnitude.
  static float Gap(float x) {
    int code = 0;
    while (code + 2 < kMagnitudes && Magnitude(code + 1) <= x) ++code;
    return Magnitude(code + 1) - Magnitude(code);
  }
};
using Codes = testing::Types<Named<Code::kSigned>, Named<Code::kUnsigned>>;
TYPED_TEST_SUITE(BlockQuantizationTest, Codes);

TYPED_TEST(BlockQuantizationTest, CodesRiseInStepsOfAnEighthFromZeroToTheLargest) {
  using Fixture = TestFixture;
  EXPECT_EQ(Fixture::Magnitude(0), 0);
  EXPECT_EQ(Fixture::Magnitude(1), Fixture::kSmallest);
  EXPECT_EQ(Fixture::Magnitude(Fixture::kMagnitudes - 1), Fixture::kLargest);
  for (int code = 1; code < Fixture::kMagnitudes; ++code) {
    const float low = Fixture::Magnitude(code - 1), high = Fixture::Magnitude(code);
    EXPECT_GT(high, low);
    // Codes are rounded to float32, by 2^-20 of their distance.
    EXPECT_LE(high - low, (low + Fixture::kUnit) / 8 * (1 + 0x1p-20f)) << code;
  }
}

TYPED_TEST(BlockQuantizationTest, ErrorIsBelowTheGapOfAnEighth) {
  using Fixture = TestFixture;
  for (const float scale : {1.0f, 0x1p-60f, 0x1p+100f}) {
    for (const float x : Magnitudes()) {
      for (const uint32_t random : kRandoms) {
        const float dequantized =
            Dequantize<Fixture::kCode>(Quantize<Fixture::kCode>(x * scale, scale, random), scale) /
            scale;
        EXPECT_LE(std::abs(dequantized - x), (x + Fixture::kUnit) / 8) << x << " " << random;
        if (Fixture::kIsSigned) {
          EXPECT_EQ(Dequantize<Fixture::kCode>(Quantize<Fixture::kCode>(-x * scale, scale, random),
                                               scale),
                    -dequantized * scale);
        }
      }
    }
  }
}

// By all 2^16 random numbers.
TYPED_TEST(BlockQuantizationTest, ExpectationIsTheValue) {
  using Fixture = TestFixture;
  for (const float x : Magnitudes()) {
    if (!Fixture::kIsSigned && x < Fixture::kSmallest) continue;  // never rounded to 0
    double sum = 0;
    for (uint32_t random = 0; random < 65536; ++random) {
      sum += Dequantize<Fixture::kCode>(Quantize<Fixture::kCode>(x, 1, random), 1);
    }
    // 16 bits; and half an ulp of float32 in adding the unit, 2^-21 of the distance.
    EXPECT_NEAR(sum / 65536, x, (0x1p-17 + 0x1p-21) * Fixture::Gap(x)) << x;
  }
}

TYPED_TEST(BlockQuantizationTest, DequantizedValuesAreStoredAsTheyAre) {
  using Fixture = TestFixture;
  for (int code = 1; code < Fixture::kMagnitudes; ++code) {
    for (const float scale : {1.0f, 0x1p-90f, 0x1p90f}) {
      const float value = Dequantize<Fixture::kCode>(static_cast<uint8_t>(code), scale);
      for (const uint32_t random : kRandoms) {
        EXPECT_EQ(Quantize<Fixture::kCode>(value, scale, random), code);
      }
    }
  }
  // The largest keeps the scale.
  EXPECT_EQ(ScaleOf(Bits(Dequantize<Code::kSigned>(127, 1))), 1);
}

TYPED_TEST(BlockQuantizationTest, NothingIsQuantizedWithoutAScale) {
  using Fixture = TestFixture;
  EXPECT_EQ(Quantize<Fixture::kCode>(1, 0, 65535), 0);
  EXPECT_EQ(Dequantize<Fixture::kCode>(0, 0), 0);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(Quantize<Fixture::kCode>(1, nan, 65535), 0);
  EXPECT_TRUE(std::isnan(Dequantize<Fixture::kCode>(0, nan)));
}

TEST(BlockScaleTest, PutsTheLargestMagnitudeWithinTheLastBinade) {
  for (float x = 0x1p-126f; x < 1.87f * 0x1p126f; x *= 1.09f) {
    const float scale = ScaleOf(Bits(x));
    EXPECT_EQ(std::bit_cast<uint32_t>(scale) & 0x7fffffu, 0u) << "a power of two";
    EXPECT_GT(x / scale, 0.9375f - 0x1p-16f);
    EXPECT_LE(x / scale, 1.875f - 0x1p-15f);
    EXPECT_EQ(InverseScale(scale) * scale, 1);
  }
  EXPECT_EQ(ScaleOf(Bits(1.875f - 0x1p-15f)), 1);
  EXPECT_EQ(ScaleOf(Bits(std::nextafter(1.875f - 0x1p-15f, 2.0f))), 2);
}

TEST(BlockScaleTest, OfTooSmallAndTooLarge) {
  EXPECT_EQ(ScaleOf(0), 0);
  EXPECT_EQ(ScaleOf(Bits(0x1p-149f)), 0);
  for (const float x : {1.876f * 0x1p126f, 0x1.fp127f, kInfinity}) {
    EXPECT_TRUE(std::isnan(ScaleOf(Bits(x)))) << x;
  }
  for (const uint32_t bits : {0x7f800001u, 0x7fc00000u, 0x7fffffffu}) {
    EXPECT_TRUE(std::isnan(ScaleOf(bits)));
  }
}

TEST(BlockScaleTest, ASecondMomentIsNeverRoundedToZero) {
  for (const float x : {0x1p-36f, 0x1p-60f, 0.0f}) {
    for (const uint32_t random : kRandoms) {
      EXPECT_EQ(Quantize<Code::kUnsigned>(x, 1, random), 1);
    }
  }
  // A momentum is.
  EXPECT_EQ(Quantize<Code::kSigned>(0x1p-19f, 1, 0), 0);
  EXPECT_EQ(Quantize<Code::kSigned>(0x1p-19f, 1, 65535), 1);
}

TEST(BlockShapeTest, RowsEndTheirBlocks) {
  EXPECT_EQ(QuantizationScales({3, 256}), (Shape{3, 1}));
  EXPECT_EQ(QuantizationScales({3, 257}), (Shape{3, 2}));
  EXPECT_EQ(QuantizationScales({513}), (Shape{3}));
  EXPECT_EQ(QuantizationScales({2, 3, 100}), (Shape{2, 2}));
  EXPECT_EQ(QuantizationScales({0, 3}), (Shape{0, 0}));
}

}  // namespace
}  // namespace terrace::kernels
