#include "support/kernel_fixture.h"

namespace terrace {
namespace {

struct HyperCase {
  int64_t tokens, width, streams, iterations;
};
// Blocks are of 64 tokens.
constexpr HyperCase kCases[] = {{0, 8, 2, 2},    {1, 1, 2, 1},   {3, 7, 3, 2},   {65, 33, 4, 2},
                                {130, 16, 4, 1}, {7, 100, 5, 3}, {9, 40, 8, 20}, {5, 24, 16, 4}};

class HyperConnectionTest : public KernelTest {
 protected:
  static HyperConnection Config(const HyperCase& c) {
    return {.streams = c.streams, .sinkhorn_iterations = c.iterations, .epsilon = 1e-6f};
  }
  static int64_t WeightsOf(const HyperCase& c, bool writes) {
    return writes ? c.streams * (c.streams + 2) : c.streams;
  }
  void ExpectNear(const TensorView& actual, const TensorView& expected, int64_t terms) {
    EXPECT_TRUE(Near(actual, expected, RoundingOf(DType::kF32, MaxAbs(expected), terms)))
        << actual.name;
  }
};
INSTANTIATE_KERNEL_TEST(HyperConnectionTest);

TEST_P(HyperConnectionTest, WeightsMatchTheReference) {
  for (const HyperCase& c : kCases) {
    for (const bool writes : {false, true}) {
      const int64_t count = WeightsOf(c, writes);
      const TensorView x = Normals(DType::kF32, {c.tokens, c.streams * c.width}, "x");
      const TensorView products = Normals(DType::kF32, {c.tokens, count}, "products");
      const TensorView scale = Normals(DType::kF32, {writes ? 3 : 1}, "scale");
      const TensorView base = Normals(DType::kF32, {count}, "base");
      const TensorView rms = New(DType::kF32, {c.tokens}, "inverse_rms"),
                       rms_expected = CopyOf(rms);
      const TensorView weights = New(DType::kF32, {c.tokens, count}, "weights");
      const TensorView weights_expected = CopyOf(weights);
      cpu_.HyperWeights(Config(c), x, 1e-6f, products, scale, base, rms, weights);
      reference_.HyperWeights(Config(c), x, 1e-6f, products, scale, base, rms_expected,
                              weights_expected);
      ExpectNear(rms, rms_expected, x.columns());
      ExpectNear(weights, weights_expected, 8 * c.streams * c.iterations);

      const TensorView dweights = Normals(DType::kF32, {c.tokens, count}, "dweights");
      for (const bool add : {false, true}) {
        const TensorView dx = Normals(DType::kF32, x.shape, "dx"), dx_expected = CopyOf(dx);
        const TensorView dproducts = New(DType::kF32, products.shape, "dproducts");
        const TensorView dproducts_expected = CopyOf(dproducts);
        const TensorView dscale = Normals(DType::kF32, scale.shape, "dscale");
        const TensorView dscale_expected = CopyOf(dscale);
        const TensorView dbase = Normals(DType::kF32, base.shape, "dbase");
        const TensorView dbase_expected = CopyOf(dbase);
        cpu_.HyperWeightsBackward(Config(c), x, products, scale, base, rms_expected, dweights,
                                  dproducts, dx, dscale, add, dbase, add);
        reference_.HyperWeightsBackward(Config(c), x, products, scale, base, rms_expected, dweights,
                                        dproducts_expected, dx_expected, dscale_expected, add,
                                        dbase_expected, add);
        // Gradients through many normalizations are small differences.
        const int64_t terms = 32 * c.streams * c.iterations;
        ExpectNear(dproducts, dproducts_expected, terms);
        ExpectNear(dx, dx_expected, terms);
        ExpectNear(dbase, dbase_expected, terms + c.tokens);
        EXPECT_TRUE(Near(dscale, dscale_expected, {.absolute = 1e-5 * (1 + 10.0 * c.tokens)}));
      }
    }
  }
}

TEST_P(HyperConnectionTest, StreamsMatchTheReference) {
  for (const HyperCase& c : kCases) {
    const HyperConnection config = Config(c);
    const TensorView x = Normals(DType::kF32, {c.tokens, c.streams * c.width}, "x");
    const TensorView y = Normals(DType::kF32, {c.tokens, c.width}, "y");
    const TensorView weights = Normals(DType::kF32, {c.tokens, WeightsOf(c, true)}, "weights");
    const auto compare = [&](const char* name, Shape shape, const auto& run) {
      const TensorView actual = Normals(DType::kF32, shape, name), expected = CopyOf(actual);
      run(cpu_, actual);
      run(reference_, expected);
      ExpectNear(actual, expected, c.streams + 2);
    };
    compare("read", y.shape,
            [&](Backend& backend, TensorView z) { backend.HyperRead(config, x, weights, z); });
    compare("write", x.shape, [&](Backend& backend, TensorView out) {
      backend.HyperWrite(config, x, y, weights, out);
    });
    compare("spread", x.shape,
            [&](Backend& backend, TensorView out) { backend.HyperSpread(config, y, out); });
    compare("spread backward", y.shape,
            [&](Backend& backend, TensorView dy) { backend.HyperSpreadBackward(config, x, dy); });

    const TensorView dx = Normals(DType::kF32, x.shape, "dx"), dx_expected = CopyOf(dx);
    const TensorView dy = New(DType::kF32, y.shape, "dy"), dy_expected = CopyOf(dy);
    const TensorView dweights = Normals(DType::kF32, weights.shape, "dweights");
    const TensorView dweights_expected = CopyOf(dweights);
    cpu_.HyperWriteBackward(config, x, y, weights, dx, dy, dweights);
    reference_.HyperWriteBackward(config, x, y, weights, dx_expected, dy_expected,
                                  dweights_expected);
    cpu_.HyperReadBackward(config, y, x, weights, dx, dweights);
    reference_.HyperReadBackward(config, y, x, weights, dx_expected, dweights_expected);
    ExpectNear(dx, dx_expected, 2 * c.streams + 2);
    ExpectNear(dy, dy_expected, c.streams + 2);
    ExpectNear(dweights, dweights_expected, c.width);
  }
}

// Rows and columns of the mixing matrix sum to one after some iterations.
TEST_P(HyperConnectionTest, MixingIsDoublyStochastic) {
  const HyperCase c{20, 8, 4, 20};
  const TensorView x = Normals(DType::kF32, {c.tokens, c.streams * c.width});
  const TensorView products = Normals(DType::kF32, {c.tokens, WeightsOf(c, true)});
  const TensorView scale = New(DType::kF32, {3}), base = New(DType::kF32, {WeightsOf(c, true)});
  std::fill_n(scale.as<float>(), 3, 1.0f);
  cpu_.Zero(base);
  const TensorView weights = New(DType::kF32, products.shape);
  cpu_.HyperWeights(Config(c), x, 1e-6f, products, scale, base, New(DType::kF32, {c.tokens}),
                    weights);
  for (int64_t n = 0; n < c.tokens; ++n) {
    const float* mix = weights.as<float>() + n * weights.columns() + 2 * c.streams;
    for (int64_t s = 0; s < c.streams; ++s) {
      float row = 0, column = 0;
      for (int64_t r = 0; r < c.streams; ++r) {
        row += mix[s * c.streams + r];
        column += mix[r * c.streams + s];
      }
      EXPECT_NEAR(row, 1, 1e-4);
      EXPECT_NEAR(column, 1, 1e-5);
    }
  }
}

TEST_P(HyperConnectionTest, ResultsDoNotDependOnTheNumberOfThreads) {
  const HyperCase c{500, 24, 4, 3};
  const TensorView x = Normals(DType::kF32, {c.tokens, c.streams * c.width});
  const TensorView products = Normals(DType::kF32, {c.tokens, WeightsOf(c, true)});
  const TensorView dweights = Normals(DType::kF32, products.shape);
  const TensorView scale = Normals(DType::kF32, {3});
  const TensorView base = Normals(DType::kF32, {WeightsOf(c, true)});
  const TensorView rms = New(DType::kF32, {c.tokens});
  cpu_.HyperWeights(Config(c), x, 1e-6f, products, scale, base, rms,
                    New(DType::kF32, products.shape));
  ExpectSameForAnyThreads([&] {
    const TensorView dbase = New(DType::kF32, base.shape);
    cpu_.HyperWeightsBackward(Config(c), x, products, scale, base, rms, dweights,
                              New(DType::kF32, products.shape), CopyOf(x), New(DType::kF32, {3}),
                              false, dbase, false);
    return dbase;
  });
}

TEST_P(HyperConnectionTest, DryRunsTakeTheSameScratch) {
  ExpectDryTakesTheSame([](CpuBackend& backend) {
    const HyperConnection config{.streams = 4, .sinkhorn_iterations = 3};
    const auto allocate = [&](Shape shape) {
      const TensorView view =
          backend.arena().Allocate(Memory::kActivations, DType::kF32, shape, "x");
      backend.Zero(view);
      return view;
    };
    const TensorView x = allocate({100, 64}), m = allocate({100, 24}), base = allocate({24});
    const TensorView scale = allocate({3}), rms = allocate({100});
    backend.HyperWeights(config, x, 1e-6f, m, scale, base, rms, allocate({100, 24}));
    backend.HyperWeightsBackward(config, x, m, scale, base, rms, m, allocate({100, 24}),
                                 allocate({100, 64}), allocate({3}), false, allocate({24}), false);
  });
}

}  // namespace
}  // namespace terrace
