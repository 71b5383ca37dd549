// Hyper-connections by their definition, in double.
#include <cmath>
#include <vector>

#include "support/reference_backend.h"

namespace terrace {
namespace {

using Values = std::vector<double>;

Values RowOf(const TensorView& view, int64_t row) {
  Values values;
  for (int64_t i = 0; i < view.columns(); ++i) {
    values.push_back(ElementAt(view, row * view.columns() + i));
  }
  return values;
}

double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// Every matrix on the way from logits to the mixing matrix: the softmax plus epsilon, then one
// after each normalization, the first by columns.
std::vector<Values> MatricesOf(const HyperConnection& config, const Values& logits) {
  const size_t size = static_cast<size_t>(config.streams);
  Values matrix(size * size);
  for (size_t s = 0; s < size; ++s) {
    double sum = 0;
    for (size_t r = 0; r < size; ++r) sum += std::exp(logits[s * size + r]);
    for (size_t r = 0; r < size; ++r) {
      matrix[s * size + r] = std::exp(logits[s * size + r]) / sum + config.epsilon;
    }
  }
  std::vector<Values> matrices = {matrix};
  for (int64_t i = 0; i < 2 * config.sinkhorn_iterations - 1; ++i) {
    for (size_t a = 0; a < size; ++a) {
      const auto at = [&](size_t b) -> double& {
        return i % 2 == 0 ? matrix[b * size + a] : matrix[a * size + b];
      };
      double sum = config.epsilon;
      for (size_t b = 0; b < size; ++b) sum += at(b);
      for (size_t b = 0; b < size; ++b) at(b) /= sum;
    }
    matrices.push_back(matrix);
  }
  return matrices;
}

// The gradient of the logits from that of the mixing matrix.
Values MixingBackward(const HyperConnection& config, const std::vector<Values>& matrices,
                      Values slope) {
  const size_t size = static_cast<size_t>(config.streams);
  for (size_t i = matrices.size(); i-- > 1;) {
    const Values &before = matrices[i - 1], &after = matrices[i];
    for (size_t a = 0; a < size; ++a) {
      const auto at = [&](size_t b) { return i % 2 == 1 ? b * size + a : a * size + b; };
      double sum = config.epsilon, mean = 0;
      for (size_t b = 0; b < size; ++b) {
        sum += before[at(b)];
        mean += slope[at(b)] * after[at(b)];
      }
      for (size_t b = 0; b < size; ++b) slope[at(b)] = (slope[at(b)] - mean) / sum;
    }
  }
  for (size_t s = 0; s < size; ++s) {
    const auto p = [&](size_t r) { return matrices[0][s * size + r] - config.epsilon; };
    double mean = 0;
    for (size_t r = 0; r < size; ++r) mean += p(r) * slope[s * size + r];
    for (size_t r = 0; r < size; ++r) slope[s * size + r] = p(r) * (slope[s * size + r] - mean);
  }
  return slope;
}

size_t ScaleOf(const HyperConnection& config, size_t j) {
  return std::min<size_t>(2, j / static_cast<size_t>(config.streams));
}

Values LogitsOf(const HyperConnection& config, const Values& products, const TensorView& scale,
                const TensorView& base, double inverse_rms) {
  Values logits(products.size());
  for (size_t j = 0; j < products.size(); ++j) {
    logits[j] =
        ElementAt(scale, static_cast<int64_t>(ScaleOf(config, j))) * products[j] * inverse_rms +
        ElementAt(base, static_cast<int64_t>(j));
  }
  return logits;
}

}  // namespace

void ReferenceBackend::HyperWeights(const HyperConnection& config, TensorView x, float norm_epsilon,
                                    TensorView products, TensorView scale, TensorView base,
                                    TensorView inverse_rms, TensorView weights) {
  if (dry()) return;
  const int64_t count = products.columns();
  const size_t streams = static_cast<size_t>(config.streams);
  for (int64_t n = 0; n < x.rows(); ++n) {
    double squares = 0;
    for (const double value : RowOf(x, n)) squares += value * value;
    const double inverse = 1 / std::sqrt(squares / static_cast<double>(x.columns()) + norm_epsilon);
    SetElement(inverse_rms, n, inverse);
    Values values = LogitsOf(config, RowOf(products, n), scale, base, inverse);
    if (values.size() > streams) {
      const Values mix =
          MatricesOf(config, Values(values.begin() + 2 * config.streams, values.end())).back();
      std::copy(mix.begin(), mix.end(), values.begin() + 2 * config.streams);
    }
    for (size_t j = 0; j < std::min(values.size(), 2 * streams); ++j) {
      values[j] = j < streams ? Sigmoid(values[j]) + config.epsilon : 2 * Sigmoid(values[j]);
    }
    for (int64_t j = 0; j < count; ++j) {
      SetElement(weights, n * count + j, values[static_cast<size_t>(j)]);
    }
  }
}

void ReferenceBackend::HyperWeightsBackward(const HyperConnection& config, TensorView x,
                                            TensorView products, TensorView scale, TensorView base,
                                            TensorView inverse_rms, TensorView dweights,
                                            TensorView dproducts, TensorView dx, TensorView dscale,
                                            bool add_dscale, TensorView dbase, bool add_dbase) {
  if (dry()) return;
  const int64_t count = products.columns();
  const size_t streams = static_cast<size_t>(config.streams);
  Values base_sums(static_cast<size_t>(count)), scale_sums(static_cast<size_t>(scale.size()));
  for (int64_t n = 0; n < x.rows(); ++n) {
    const double inverse = ElementAt(inverse_rms, n);
    const Values product = RowOf(products, n);
    const Values logits = LogitsOf(config, product, scale, base, inverse);
    Values slopes = RowOf(dweights, n);
    for (size_t j = 0; j < std::min(slopes.size(), 2 * streams); ++j) {
      const double value = Sigmoid(logits[j]);
      slopes[j] *= (j < streams ? 1 : 2) * value * (1 - value);
    }
    if (slopes.size() > streams) {
      const auto from = 2 * config.streams;
      const Values dlogits =
          MixingBackward(config, MatricesOf(config, Values(logits.begin() + from, logits.end())),
                         Values(slopes.begin() + from, slopes.end()));
      std::copy(dlogits.begin(), dlogits.end(), slopes.begin() + from);
    }
    double dinverse = 0;
    for (size_t j = 0; j < slopes.size(); ++j) {
      const size_t of = ScaleOf(config, j);
      const double slope = slopes[j] * ElementAt(scale, static_cast<int64_t>(of));
      base_sums[j] += slopes[j];
      scale_sums[of] += slopes[j] * product[j] * inverse;
      dinverse += slope * product[j];
      SetElement(dproducts, n * count + static_cast<int64_t>(j), slope * inverse);
    }
    for (int64_t i = 0; i < x.columns(); ++i) {
      const int64_t at = n * x.columns() + i;
      const double slope = -dinverse * inverse * inverse * inverse * ElementAt(x, at) /
                           static_cast<double>(x.columns());
      SetElement(dx, at, ElementAt(dx, at) + slope);
    }
  }
  for (size_t j = 0; j < base_sums.size(); ++j) {
    const int64_t at = static_cast<int64_t>(j);
    SetElement(dbase, at, base_sums[j] + (add_dbase ? ElementAt(dbase, at) : 0));
  }
  for (size_t j = 0; j < scale_sums.size(); ++j) {
    const int64_t at = static_cast<int64_t>(j);
    SetElement(dscale, at, scale_sums[j] + (add_dscale ? ElementAt(dscale, at) : 0));
  }
}

void ReferenceBackend::HyperRead(const HyperConnection& config, TensorView x, TensorView weights,
                                 TensorView z) {
  if (dry()) return;
  for (int64_t n = 0; n < z.rows(); ++n) {
    for (int64_t d = 0; d < z.columns(); ++d) {
      double sum = 0;
      for (int64_t s = 0; s < config.streams; ++s) {
        sum += ElementAt(weights, n * weights.columns() + s) *
               ElementAt(x, (n * config.streams + s) * z.columns() + d);
      }
      SetElement(z, n * z.columns() + d, sum);
    }
  }
}

void ReferenceBackend::HyperReadBackward(const HyperConnection& config, TensorView dz, TensorView x,
                                         TensorView weights, TensorView dx, TensorView dweights) {
  if (dry()) return;
  for (int64_t n = 0; n < dz.rows(); ++n) {
    for (int64_t s = 0; s < config.streams; ++s) {
      const int64_t weight = n * weights.columns() + s;
      double sum = 0;
      for (int64_t d = 0; d < dz.columns(); ++d) {
        const int64_t at = (n * config.streams + s) * dz.columns() + d;
        const double slope = ElementAt(dz, n * dz.columns() + d);
        sum += slope * ElementAt(x, at);
        SetElement(dx, at, ElementAt(dx, at) + slope * ElementAt(weights, weight));
      }
      SetElement(dweights, weight, sum);
    }
  }
}

void ReferenceBackend::HyperWrite(const HyperConnection& config, TensorView x, TensorView y,
                                  TensorView weights, TensorView out) {
  if (dry()) return;
  const int64_t streams = config.streams, width = y.columns();
  for (int64_t n = 0; n < y.rows(); ++n) {
    const Values weight = RowOf(weights, n);
    for (int64_t s = 0; s < streams; ++s) {
      for (int64_t d = 0; d < width; ++d) {
        double sum = weight[static_cast<size_t>(streams + s)] * ElementAt(y, n * width + d);
        for (int64_t r = 0; r < streams; ++r) {
          sum += weight[static_cast<size_t>(2 * streams + s * streams + r)] *
                 ElementAt(x, (n * streams + r) * width + d);
        }
        SetElement(out, (n * streams + s) * width + d, sum);
      }
    }
  }
}

void ReferenceBackend::HyperWriteBackward(const HyperConnection& config, TensorView x, TensorView y,
                                          TensorView weights, TensorView dx, TensorView dy,
                                          TensorView dweights) {
  if (dry()) return;
  const int64_t streams = config.streams, width = y.columns();
  for (int64_t n = 0; n < y.rows(); ++n) {
    const Values weight = RowOf(weights, n), slopes = RowOf(dx, n), from = RowOf(x, n);
    const auto slope = [&](int64_t s, int64_t d) {
      return slopes[static_cast<size_t>(s * width + d)];
    };
    for (int64_t s = 0; s < streams; ++s) {
      double sum = 0;
      for (int64_t d = 0; d < width; ++d) sum += slope(s, d) * ElementAt(y, n * width + d);
      SetElement(dweights, n * weights.columns() + streams + s, sum);
      for (int64_t r = 0; r < streams; ++r) {
        double mix_sum = 0;
        for (int64_t d = 0; d < width; ++d) {
          mix_sum += slope(s, d) * from[static_cast<size_t>(r * width + d)];
        }
        SetElement(dweights, n * weights.columns() + 2 * streams + s * streams + r, mix_sum);
      }
    }
    for (int64_t d = 0; d < width; ++d) {
      double sum = 0;
      for (int64_t s = 0; s < streams; ++s) {
        sum += weight[static_cast<size_t>(streams + s)] * slope(s, d);
      }
      SetElement(dy, n * width + d, sum);
      for (int64_t r = 0; r < streams; ++r) {
        double mixed = 0;
        for (int64_t s = 0; s < streams; ++s) {
          mixed += weight[static_cast<size_t>(2 * streams + s * streams + r)] * slope(s, d);
        }
        SetElement(dx, (n * streams + r) * width + d, mixed);
      }
    }
  }
}

void ReferenceBackend::HyperSpread(const HyperConnection& config, TensorView y, TensorView x) {
  if (dry()) return;
  const int64_t width = y.columns();
  for (int64_t i = 0; i < x.size(); ++i) {
    const int64_t n = i / (config.streams * width);
    SetElement(x, i, ElementAt(y, n * width + i % width));
  }
}

void ReferenceBackend::HyperSpreadBackward(const HyperConnection& config, TensorView dx,
                                           TensorView dy) {
  if (dry()) return;
  const int64_t width = dy.columns();
  for (int64_t i = 0; i < dy.size(); ++i) {
    double sum = 0;
    for (int64_t s = 0; s < config.streams; ++s) {
      sum += ElementAt(dx, (i / width * config.streams + s) * width + i % width);
    }
    SetElement(dy, i, sum);
  }
}

}  // namespace terrace
