// What the tests of rules for matrices share: plain matrices and their eigenvalues, and weights
// after steps on a given number of threads.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "optim/rule_testing.h"
#include "support/message_of.h"

namespace terrace {

// A plain matrix of doubles, row-major.
struct PlainMatrix {
  PlainMatrix(int64_t row_count, int64_t column_count)
      : rows(row_count), columns(column_count), values(row_count * column_count) {}
  template <typename T>
  PlainMatrix(int64_t row_count, int64_t column_count, const std::vector<T>& from)
      : rows(row_count), columns(column_count), values(from.begin(), from.end()) {}

  double& operator()(int64_t i, int64_t j) { return values[i * columns + j]; }
  double operator()(int64_t i, int64_t j) const { return values[i * columns + j]; }

  int64_t rows;
  int64_t columns;
  std::vector<double> values;
};

inline PlainMatrix Transposed(const PlainMatrix& a) {
  PlainMatrix result(a.columns, a.rows);
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t j = 0; j < a.columns; ++j) result(j, i) = a(i, j);
  }
  return result;
}

inline PlainMatrix operator*(const PlainMatrix& a, const PlainMatrix& b) {
  PlainMatrix result(a.rows, b.columns);
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t k = 0; k < a.columns; ++k) {
      for (int64_t j = 0; j < b.columns; ++j) result(i, j) += a(i, k) * b(k, j);
    }
  }
  return result;
}

// Eigenvalues, largest first, and the vectors to them as columns, by Jacobi's rotations.
struct Eigen {
  std::vector<double> values;
  PlainMatrix vectors;
};
inline Eigen EigenOf(PlainMatrix a) {
  const int64_t n = a.rows;
  PlainMatrix v(n, n);
  for (int64_t i = 0; i < n; ++i) v(i, i) = 1;
  // The squares beside the diagonal, over all squares.
  const auto rest = [&] {
    double beside = 0, all = 0;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        all += a(i, j) * a(i, j);
        if (i != j) beside += a(i, j) * a(i, j);
      }
    }
    return all > 0 ? beside / all : 0;
  };
  for (int sweep = 0; sweep < 30 && rest() > 1e-28; ++sweep) {
    for (int64_t p = 0; p < n; ++p) {
      for (int64_t q = p + 1; q < n; ++q) {
        if (a(p, q) == 0) continue;
        const double theta = (a(q, q) - a(p, p)) / (2 * a(p, q));
        const double t = std::copysign(1.0, theta) / (std::abs(theta) + std::hypot(theta, 1.0));
        const double c = 1 / std::hypot(t, 1.0), s = t * c;
        for (int64_t k = 0; k < n; ++k) {
          const double x = a(k, p), y = a(k, q);
          a(k, p) = c * x - s * y;
          a(k, q) = s * x + c * y;
        }
        for (int64_t k = 0; k < n; ++k) {
          const double x = a(p, k), y = a(q, k);
          a(p, k) = c * x - s * y;
          a(q, k) = s * x + c * y;
          const double vx = v(k, p), vy = v(k, q);
          v(k, p) = c * vx - s * vy;
          v(k, q) = s * vx + c * vy;
        }
      }
    }
  }
  std::vector<int64_t> order(n);
  for (int64_t i = 0; i < n; ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](int64_t i, int64_t j) { return a(i, i) > a(j, j); });
  Eigen result{std::vector<double>(n), PlainMatrix(n, n)};
  for (int64_t j = 0; j < n; ++j) {
    result.values[j] = a(order[j], order[j]);
    for (int64_t i = 0; i < n; ++i) result.vectors(i, j) = v(i, order[j]);
  }
  return result;
}

// Largest first, as many as the smaller side.
inline std::vector<double> SingularValuesOf(const PlainMatrix& a) {
  std::vector<double> values =
      EigenOf(a.rows <= a.columns ? a * Transposed(a) : Transposed(a) * a).values;
  for (double& value : values) value = std::sqrt(std::max(0.0, value));
  return values;
}

// Memory of exactly that size, which the address sanitizer guards.
struct ExactScratch {
  explicit ExactScratch(int64_t bytes) : data(std::aligned_alloc(64, bytes)) {}
  ~ExactScratch() { std::free(data); }
  ExactScratch(const ExactScratch&) = delete;
  ExactScratch& operator=(const ExactScratch&) = delete;
  void* data;
};

// What a rule made for so many threads asks for beside the state of a matrix.
inline int64_t ScratchBytesOf(std::string_view rule_name, const Settings& settings,
                              const Shape& shape, int threads, bool all_threads) {
  const int before = omp_get_max_threads();
  omp_set_num_threads(threads);
  const auto rule = MakeRule(rule_name, settings);
  omp_set_num_threads(before);
  Parameter parameter;
  parameter.value.shape = shape;
  return rule->ScratchBytes(parameter, all_threads);
}

// bfloat16 weights after three steps, as bytes.
inline std::vector<std::byte> WeightsAfterSteps(std::string_view rule, const Settings& settings,
                                                const Shape& shape, DType gradient_dtype,
                                                int threads, bool all_threads) {
  const int before = omp_get_max_threads();
  omp_set_num_threads(threads);
  std::vector<std::byte> bytes;
  {
    RuleBench bench(rule, settings, 0.05f, shape, DType::kBF16, gradient_dtype);
    const ExactScratch scratch(bench.rule().ScratchBytes(bench.parameter(), all_threads));
    bench.context().scratch = static_cast<std::byte*>(scratch.data);
    bench.context().all_threads = all_threads;
    Fill(bench.weight(), RandomValues(shape.size(), 0.5, 1));
    for (int step = 0; step < 3; ++step) {
      Fill(bench.gradient(), RandomValues(shape.size(), 0.01, 2 + step));
      bench.Step();
    }
    bytes.assign(bench.weight().data, bench.weight().data + bench.weight().bytes());
  }
  omp_set_num_threads(before);
  return bytes;
}

}  // namespace terrace
