// Hyper-connections. The streams pass through memory once an operation; what follows from a token's
// weights is small and computed one token at a time.
#include <cmath>
#include <numeric>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/kernel.h"
#include "core/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/hyper_connection.cpp"
#include <hwy/foreach_target.h>

#include "backend/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace terrace {
namespace HWY_NAMESPACE {
namespace {

HWY_INLINE float Dot(const float* a, const float* b, int64_t count) {
  LaneSum sum;
  ForLanes(count, [&](auto d, int64_t i)
                      HWY_ATTR { sum.Add(d, hn::Mul(hn::LoadU(d, a + i), hn::LoadU(d, b + i))); });
  return sum.Total();
}

float SquaresOf(const float* x, int64_t count) { return Dot(x, x, count); }

// x += factor * y
void AddScaled(float factor, const float* y, int64_t count, float* x) {
  ForLanes(count, [=](auto d, int64_t i) HWY_ATTR {
    hn::StoreU(hn::MulAdd(hn::LoadU(d, y + i), hn::Set(d, factor), hn::LoadU(d, x + i)), d, x + i);
  });
}

void ReadRows(int64_t streams, const TensorView& x, const TensorView& weights, const TensorView& z,
              int64_t begin, int64_t end) {
  const int64_t width = z.columns();
  for (int64_t n = begin; n < end; ++n) {
    const float* from = x.as<float>() + n * streams * width;
    const float* read = weights.as<float>() + n * weights.columns();
    ForLanes(width, [=](auto d, int64_t i) HWY_ATTR {
      auto sum = hn::Mul(hn::LoadU(d, from + i), hn::Set(d, read[0]));
      for (int64_t s = 1; s < streams; ++s) {
        sum = hn::MulAdd(hn::LoadU(d, from + s * width + i), hn::Set(d, read[s]), sum);
      }
      hn::StoreU(sum, d, z.as<float>() + n * width + i);
    });
  }
}

void ReadBackwardRows(int64_t streams, const TensorView& dz, const TensorView& x,
                      const TensorView& weights, const TensorView& dx, const TensorView& dweights,
                      int64_t begin, int64_t end) {
  const int64_t width = dz.columns();
  for (int64_t n = begin; n < end; ++n) {
    const float* slope = dz.as<float>() + n * width;
    for (int64_t s = 0; s < streams; ++s) {
      const int64_t first = (n * streams + s) * width;
      const int64_t weight = n * weights.columns() + s;
      dweights.as<float>()[weight] = Dot(slope, x.as<float>() + first, width);
      AddScaled(weights.as<float>()[weight], slope, width, dx.as<float>() + first);
    }
  }
}

void WriteRows(int64_t streams, const TensorView& x, const TensorView& y, const TensorView& weights,
               const TensorView& out, int64_t begin, int64_t end) {
  const int64_t width = y.columns();
  for (int64_t n = begin; n < end; ++n) {
    const float* from = x.as<float>() + n * streams * width;
    const float* own = y.as<float>() + n * width;
    float* to = out.as<float>() + n * streams * width;
    const float* write = weights.as<float>() + n * weights.columns() + streams;
    const float* mix = write + streams;
    ForLanes(width, [=](auto d, int64_t i) HWY_ATTR {
      const auto added = hn::LoadU(d, own + i);
      for (int64_t s = 0; s < streams; ++s) {
        auto sum = hn::Mul(added, hn::Set(d, write[s]));
        for (int64_t r = 0; r < streams; ++r) {
          sum =
              hn::MulAdd(hn::LoadU(d, from + r * width + i), hn::Set(d, mix[s * streams + r]), sum);
        }
        hn::StoreU(sum, d, to + s * width + i);
      }
    });
  }
}

void WriteBackwardRows(int64_t streams, const TensorView& x, const TensorView& y,
                       const TensorView& weights, const TensorView& dx, const TensorView& dy,
                       const TensorView& dweights, int64_t begin, int64_t end) {
  const int64_t width = y.columns();
  for (int64_t n = begin; n < end; ++n) {
    const float* from = x.as<float>() + n * streams * width;
    const float* own = y.as<float>() + n * width;
    float* slopes = dx.as<float>() + n * streams * width;
    const float* write = weights.as<float>() + n * weights.columns() + streams;
    const float* mix = write + streams;
    float* dwrite = dweights.as<float>() + n * weights.columns() + streams;
    float* dmix = dwrite + streams;
    for (int64_t s = 0; s < streams; ++s) {
      dwrite[s] = Dot(slopes + s * width, own, width);
      for (int64_t r = 0; r < streams; ++r) {
        dmix[s * streams + r] = Dot(slopes + s * width, from + r * width, width);
      }
    }
    ForLanes(width, [=](auto d, int64_t i) HWY_ATTR {
      HWY_ALIGN float before[HyperConnection::kMaxStreams * hn::MaxLanes(FullTag())];
      const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
      auto sum = hn::Zero(d);
      for (int64_t s = 0; s < streams; ++s) {
        const auto slope = hn::LoadU(d, slopes + s * width + i);
        hn::StoreU(slope, d, before + s * lanes);
        sum = hn::MulAdd(slope, hn::Set(d, write[s]), sum);
      }
      hn::StoreU(sum, d, dy.as<float>() + n * width + i);
      for (int64_t r = 0; r < streams; ++r) {
        auto mixed = hn::Zero(d);
        for (int64_t s = 0; s < streams; ++s) {
          mixed =
              hn::MulAdd(hn::LoadU(d, before + s * lanes), hn::Set(d, mix[s * streams + r]), mixed);
        }
        hn::StoreU(mixed, d, slopes + r * width + i);
      }
    });
  }
}

void SpreadBackwardRows(int64_t streams, const TensorView& dx, const TensorView& dy, int64_t begin,
                        int64_t end) {
  const int64_t width = dy.columns();
  for (int64_t n = begin; n < end; ++n) {
    const float* from = dx.as<float>() + n * streams * width;
    ForLanes(width, [=](auto d, int64_t i) HWY_ATTR {
      auto sum = hn::LoadU(d, from + i);
      for (int64_t s = 1; s < streams; ++s) sum = hn::Add(sum, hn::LoadU(d, from + s * width + i));
      hn::StoreU(sum, d, dy.as<float>() + n * width + i);
    });
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace terrace
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace terrace {

HWY_EXPORT(SquaresOf);
HWY_EXPORT(AddScaled);
HWY_EXPORT(ReadRows);
HWY_EXPORT(ReadBackwardRows);
HWY_EXPORT(WriteRows);
HWY_EXPORT(WriteBackwardRows);
HWY_EXPORT(SpreadBackwardRows);

namespace {

// Tokens per block: gradients of scale and base are summed per block, then over blocks in order.
constexpr int64_t kBlockTokens = 64;

float Sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// The mixing matrix of one token, and what its gradient needs: the matrix after each normalization
// and the sums that it divided by. In memory of `Floats(config)`.
class Mixing {
 public:
  static int64_t Floats(const HyperConnection& config) {
    const int64_t size = config.streams * config.streams;
    return size + Normalizations(config) * (size + config.streams);
  }

  Mixing(const HyperConnection& config, float* memory)
      : streams_(config.streams),
        size_(streams_ * streams_),
        epsilon_(config.epsilon),
        normalizations_(Normalizations(config)),
        softmax_(memory),
        matrices_(softmax_ + size_),
        sums_(matrices_ + normalizations_ * size_) {}

  // From the matrix's logits, row by row.
  void Compute(const float* logits, float* mix) {
    for (int64_t s = 0; s < streams_; ++s) {
      const float* row = logits + s * streams_;
      float* to = softmax_ + s * streams_;
      const float top = *std::max_element(row, row + streams_);
      float total = 0;
      for (int64_t r = 0; r < streams_; ++r) total += to[r] = std::exp(row[r] - top);
      for (int64_t r = 0; r < streams_; ++r) to[r] /= total;
    }
    std::transform(softmax_, softmax_ + size_, mix, [&](float p) { return p + epsilon_; });
    for (int64_t i = 0; i < normalizations_; ++i) {
      Normalize(i, mix);
      std::copy_n(mix, size_, matrices_ + i * size_);
    }
  }

  // Replaces the gradient of the matrix by that of the logits.
  void Backward(float* dmix) const {
    for (int64_t i = normalizations_; i-- > 0;) {
      const auto [group_step, step] = StepsOf(i);
      for (int64_t group = 0; group < streams_; ++group) {
        const float* after = matrices_ + i * size_ + group * group_step;
        float* slope = dmix + group * group_step;
        float mean = 0;
        for (int64_t k = 0; k < streams_; ++k) mean += slope[k * step] * after[k * step];
        const float inverse = 1.0f / sums_[i * streams_ + group];
        for (int64_t k = 0; k < streams_; ++k) slope[k * step] = (slope[k * step] - mean) * inverse;
      }
    }
    for (int64_t s = 0; s < streams_; ++s) {
      const float* p = softmax_ + s * streams_;
      float* slope = dmix + s * streams_;
      const float mean = std::inner_product(p, p + streams_, slope, 0.0f);
      for (int64_t r = 0; r < streams_; ++r) slope[r] = p[r] * (slope[r] - mean);
    }
  }

 private:
  // Columns, then rows and columns in turn.
  static int64_t Normalizations(const HyperConnection& config) {
    return 2 * config.sinkhorn_iterations - 1;
  }
  // From one column (row) to the next, and from one element of it to the next.
  std::pair<int64_t, int64_t> StepsOf(int64_t normalization) const {
    return normalization % 2 == 0 ? std::pair<int64_t, int64_t>{1, streams_}
                                  : std::pair<int64_t, int64_t>{streams_, 1};
  }

  void Normalize(int64_t i, float* mix) {
    const auto [group_step, step] = StepsOf(i);
    for (int64_t group = 0; group < streams_; ++group) {
      float* values = mix + group * group_step;
      float sum = epsilon_;
      for (int64_t k = 0; k < streams_; ++k) sum += values[k * step];
      for (int64_t k = 0; k < streams_; ++k) values[k * step] /= sum;
      sums_[i * streams_ + group] = sum;
    }
  }

  int64_t streams_, size_;
  float epsilon_;
  int64_t normalizations_;
  float *softmax_, *matrices_, *sums_;
};

// Which scale weight j of a token has: 0 for reading, 1 for writing, 2 for mixing.
int64_t ScaleOf(const HyperConnection& config, int64_t j) {
  return std::min<int64_t>(2, j / config.streams);
}

// logits[M] of one token's weights.
void LogitsOf(const HyperConnection& config, const float* product, float inverse_rms,
              const TensorView& scale, const TensorView& base, float* logits) {
  for (int64_t j = 0; j < base.size(); ++j) {
    logits[j] =
        scale.as<float>()[ScaleOf(config, j)] * product[j] * inverse_rms + base.as<float>()[j];
  }
}

void CheckWeights(const HyperConnection& config, const TensorView& x, const TensorView& products,
                  const TensorView& scale, const TensorView& base, const TensorView& inverse_rms) {
  const int64_t streams = config.streams, weights = products.columns();
  TERRACE_CHECK(streams >= 1 && streams <= HyperConnection::kMaxStreams &&
                    config.sinkhorn_iterations >= 1 && x.columns() % streams == 0 &&
                    (weights == streams || weights == streams * (streams + 2)),
                "{} {}, {} {}: {} streams", x.name, x.shape.ToString(), products.name,
                products.shape.ToString(), streams);
  CheckShape(products, {x.rows(), weights});
  CheckShape(scale, {weights == streams ? 1 : 3});
  CheckShape(base, {weights});
  CheckShape(inverse_rms, {x.rows()});
  for (const TensorView& view : {x, products, scale, base, inverse_rms}) {
    CheckDType(view, DType::kF32);
  }
}

void CheckStreams(const HyperConnection& config, const TensorView& x, const TensorView& y,
                  const TensorView& weights) {
  CheckMatrix(y);
  CheckShape(x, {y.rows(), config.streams * y.columns()});
  TERRACE_CHECK(weights.rows() == y.rows() && weights.columns() >= config.streams, "{} {}, {} {}",
                weights.name, weights.shape.ToString(), y.name, y.shape.ToString());
  for (const TensorView& view : {x, y, weights}) CheckDType(view, DType::kF32);
}

void CheckMixing(const HyperConnection& config, const TensorView& weights) {
  CheckShape(weights, {weights.rows(), config.streams * (config.streams + 2)});
}

}  // namespace

void CpuBackend::HyperWeights(const HyperConnection& config, TensorView x, float norm_epsilon,
                              TensorView products, TensorView scale, TensorView base,
                              TensorView inverse_rms, TensorView weights) {
  CheckWeights(config, x, products, scale, base, inverse_rms);
  CheckShape(weights, products.shape);
  const int64_t count = products.columns(), streams = config.streams;
  const Arena::Frame frame(arena());
  const TensorView memory = arena().Allocate(
      Memory::kScratch, DType::kF32, {MaxThreads(), Mixing::Floats(config)}, "HyperWeights.mixing");
  if (dry()) return;
  ParallelFor(x.rows(), kBlockTokens, [&](int64_t begin, int64_t end) {
    Mixing mixing(config, memory.as<float>() + ThreadNumber() * memory.columns());
    float logits[HyperConnection::kMaxStreams * (HyperConnection::kMaxStreams + 2)];
    for (int64_t n = begin; n < end; ++n) {
      const float squares =
          HWY_DYNAMIC_DISPATCH(SquaresOf)(x.as<float>() + n * x.columns(), x.columns());
      const float inverse =
          1.0f / std::sqrt(squares / static_cast<float>(x.columns()) + norm_epsilon);
      inverse_rms.as<float>()[n] = inverse;
      const float* product = products.as<float>() + n * count;
      float* to = weights.as<float>() + n * count;
      LogitsOf(config, product, inverse, scale, base, logits);
      for (int64_t s = 0; s < streams; ++s) to[s] = Sigmoid(logits[s]) + config.epsilon;
      if (count == streams) continue;
      for (int64_t s = streams; s < 2 * streams; ++s) to[s] = 2 * Sigmoid(logits[s]);
      mixing.Compute(logits + 2 * streams, to + 2 * streams);
    }
  });
}

void CpuBackend::HyperWeightsBackward(const HyperConnection& config, TensorView x,
                                      TensorView products, TensorView scale, TensorView base,
                                      TensorView inverse_rms, TensorView dweights,
                                      TensorView dproducts, TensorView dx, TensorView dscale,
                                      bool add_dscale, TensorView dbase, bool add_dbase) {
  CheckWeights(config, x, products, scale, base, inverse_rms);
  CheckShape(dweights, products.shape);
  CheckShape(dproducts, products.shape);
  CheckShape(dx, x.shape);
  CheckShape(dscale, scale.shape);
  CheckShape(dbase, base.shape);
  const int64_t count = products.columns(), streams = config.streams, scales = scale.size();
  const int64_t blocks = (x.rows() + kBlockTokens - 1) / kBlockTokens;
  const Arena::Frame frame(arena());
  const TensorView memory =
      arena().Allocate(Memory::kScratch, DType::kF32, {MaxThreads(), Mixing::Floats(config)},
                       "HyperWeightsBackward.mixing");
  // Of base, then of scale.
  const TensorView sums = arena().Allocate(Memory::kScratch, DType::kF32, {blocks, count + scales},
                                           "HyperWeightsBackward.sums");
  if (dry()) return;
  ParallelFor(x.rows(), kBlockTokens, [&](int64_t begin, int64_t end) {
    Mixing mixing(config, memory.as<float>() + ThreadNumber() * memory.columns());
    constexpr int64_t kMost = HyperConnection::kMaxStreams * (HyperConnection::kMaxStreams + 2);
    float logits[kMost], slopes[kMost], mix[kMost];
    float* const block_sums = sums.as<float>() + begin / kBlockTokens * sums.columns();
    std::fill_n(block_sums, sums.columns(), 0.0f);
    for (int64_t n = begin; n < end; ++n) {
      const float* product = products.as<float>() + n * count;
      const float inverse = inverse_rms.as<float>()[n];
      std::copy_n(dweights.as<float>() + n * count, count, slopes);
      LogitsOf(config, product, inverse, scale, base, logits);
      for (int64_t j = 0; j < std::min(count, 2 * streams); ++j) {
        const float value = Sigmoid(logits[j]);
        slopes[j] *= (j < streams ? 1 : 2) * value * (1 - value);
      }
      if (count > streams) {
        mixing.Compute(logits + 2 * streams, mix);
        mixing.Backward(slopes + 2 * streams);
      }
      float dinverse = 0;
      for (int64_t j = 0; j < count; ++j) {
        const int64_t of = ScaleOf(config, j);
        block_sums[j] += slopes[j];
        block_sums[count + of] += slopes[j] * product[j] * inverse;
        const float slope = slopes[j] * scale.as<float>()[of];
        dproducts.as<float>()[n * count + j] = slope * inverse;
        dinverse += slope * product[j];
      }
      const float factor =
          -dinverse * inverse * inverse * inverse / static_cast<float>(x.columns());
      HWY_DYNAMIC_DISPATCH(AddScaled)
      (factor, x.as<float>() + n * x.columns(), x.columns(), dx.as<float>() + n * x.columns());
    }
  });
  for (int64_t j = 0; j < count + scales; ++j) {
    const bool of_base = j < count;
    float* const to = of_base ? dbase.as<float>() + j : dscale.as<float>() + j - count;
    double sum = (of_base ? add_dbase : add_dscale) ? *to : 0;
    for (int64_t block = 0; block < blocks; ++block) {
      sum += sums.as<float>()[block * sums.columns() + j];
    }
    *to = static_cast<float>(sum);
  }
}

void CpuBackend::HyperRead(const HyperConnection& config, TensorView x, TensorView weights,
                           TensorView z) {
  CheckStreams(config, x, z, weights);
  if (dry()) return;
  ParallelFor(z.rows(), RowsPerBlock(x.columns()), [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(ReadRows)(config.streams, x, weights, z, begin, end);
  });
}

void CpuBackend::HyperReadBackward(const HyperConnection& config, TensorView dz, TensorView x,
                                   TensorView weights, TensorView dx, TensorView dweights) {
  CheckStreams(config, x, dz, weights);
  CheckShape(dx, x.shape);
  CheckShape(dweights, weights.shape);
  if (dry()) return;
  ParallelFor(dz.rows(), RowsPerBlock(x.columns()), [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(ReadBackwardRows)
    (config.streams, dz, x, weights, dx, dweights, begin, end);
  });
}

void CpuBackend::HyperWrite(const HyperConnection& config, TensorView x, TensorView y,
                            TensorView weights, TensorView out) {
  CheckStreams(config, x, y, weights);
  CheckMixing(config, weights);
  CheckShape(out, x.shape);
  if (dry()) return;
  ParallelFor(y.rows(), RowsPerBlock(x.columns()), [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(WriteRows)(config.streams, x, y, weights, out, begin, end);
  });
}

void CpuBackend::HyperWriteBackward(const HyperConnection& config, TensorView x, TensorView y,
                                    TensorView weights, TensorView dx, TensorView dy,
                                    TensorView dweights) {
  CheckStreams(config, x, y, weights);
  CheckMixing(config, weights);
  CheckShape(dx, x.shape);
  CheckShape(dy, y.shape);
  CheckShape(dweights, weights.shape);
  if (dry()) return;
  ParallelFor(y.rows(), RowsPerBlock(x.columns()), [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(WriteBackwardRows)
    (config.streams, x, y, weights, dx, dy, dweights, begin, end);
  });
}

void CpuBackend::HyperSpread(const HyperConnection& config, TensorView y, TensorView x) {
  CheckShape(x, {y.rows(), config.streams * y.columns()});
  if (dry()) return;
  const int64_t width = y.columns();
  ParallelFor(y.rows(), RowsPerBlock(x.columns()), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * config.streams; row < end * config.streams; ++row) {
      std::copy_n(y.as<float>() + row / config.streams * width, width, x.as<float>() + row * width);
    }
  });
}

void CpuBackend::HyperSpreadBackward(const HyperConnection& config, TensorView dx, TensorView dy) {
  CheckShape(dx, {dy.rows(), config.streams * dy.columns()});
  if (dry()) return;
  ParallelFor(dy.rows(), RowsPerBlock(dx.columns()), [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(SpreadBackwardRows)(config.streams, dx, dy, begin, end);
  });
}

}  // namespace terrace
#endif  // HWY_ONCE
