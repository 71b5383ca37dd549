// Passes that take several rows at a time give what they give row by row.
#include "optim/kernels/factored.h"

#include <gtest/gtest.h>

#include <cmath>
#include <tuple>
#include <vector>

#include "optim/rule_testing.h"

namespace terrace {
namespace {

// Rows that fill groups or do not, columns that fill units or do not.
class FactoredTest : public testing::TestWithParam<std::tuple<int64_t, int64_t, DType>> {
 protected:
  FactoredTest()
      : rows_(std::get<0>(GetParam())),
        columns_(std::get<1>(GetParam())),
        padded_(static_cast<size_t>(kernels::PaddedColumns(columns_))),
        x_(arena_.Allocate(Memory::kGradients, std::get<2>(GetParam()), {rows_, columns_}, "x")) {
    Fill(x_, RandomValues(x_.size(), 1e-3, 1));
  }

  double Square(int64_t i, int64_t j) const { return std::pow(values_[i * columns_ + j], 2); }

  Arena arena_{1 << 20};
  const int64_t rows_, columns_;
  const size_t padded_;
  const TensorView x_;
  const std::vector<float> values_ = RandomValues(rows_ * columns_, 1e-3, 1);
};

INSTANTIATE_TEST_SUITE_P(Shapes, FactoredTest,
                         testing::Combine(testing::Values(1, 7, 8, 9, 12, 23),
                                          testing::Values(64, 192, 100),
                                          testing::Values(DType::kF32, DType::kBF16)));

TEST_P(FactoredTest, SinkhornOfManyRowsIsThatOfEach) {
  const std::vector<float> column_factors = RandomValues(static_cast<int64_t>(padded_), 1, 2);
  std::vector<float> row_factors(static_cast<size_t>(rows_), 0.5f), sums(padded_, 0.25f);
  std::vector<float> row_factors_by_row = row_factors, sums_by_row = sums;
  kernels::SinkhornRows(x_, 0, rows_, 3, 1e-8f, column_factors.data(), row_factors.data(),
                        sums.data());
  for (int64_t i = 0; i < rows_; ++i) {
    kernels::SinkhornRows(x_, i, i + 1, 3, 1e-8f, column_factors.data(), row_factors_by_row.data(),
                          sums_by_row.data());
  }
  EXPECT_EQ(row_factors, row_factors_by_row);
  EXPECT_EQ(sums, sums_by_row);
}

TEST_P(FactoredTest, SumsAreThoseOfSquares) {
  const kernels::Decay decay{0.9f, 0.5f, 1e-9f};
  std::vector<float> moments(static_cast<size_t>(rows_));
  for (int64_t i = 0; i < rows_; ++i) moments[i] = 1e-6f * static_cast<float>(i + 1);
  std::vector<float> row_sums(static_cast<size_t>(rows_)), column_sums(padded_), weighted(padded_);
  kernels::FactoredSums(x_, 1, TensorView{}, 0, 0, 0, rows_, row_sums.data(), column_sums.data(),
                        moments.data(), decay, weighted.data());

  std::vector<double> columns(padded_), weighted_columns(padded_);
  for (int64_t i = 0; i < rows_; ++i) {
    double row = 0;
    for (int64_t j = 0; j < columns_; ++j) row += Square(i, j);
    EXPECT_NEAR(row_sums[i], row, 1e-6 * row) << i;
    const double moment = decay.keep * moments[i] + decay.gain * row + decay.offset;
    for (int64_t j = 0; j < columns_; ++j) {
      columns[j] += Square(i, j);
      weighted_columns[j] += Square(i, j) / moment;
    }
  }
  for (int64_t j = 0; j < columns_; ++j) {
    EXPECT_NEAR(column_sums[j], columns[j], 1e-6 * columns[j]) << j;
    EXPECT_NEAR(weighted[j], weighted_columns[j], 1e-5 * weighted_columns[j]) << j;
  }

  // Without weights the others have the same bits.
  std::vector<float> other_rows(static_cast<size_t>(rows_)), other_columns(padded_);
  kernels::FactoredSums(x_, 1, TensorView{}, 0, 0, 0, rows_, other_rows.data(),
                        other_columns.data(), nullptr, {}, nullptr);
  EXPECT_EQ(row_sums, other_rows);
  EXPECT_EQ(column_sums, other_columns);
}

}  // namespace
}  // namespace terrace
