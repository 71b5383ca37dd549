#include "optim/tiles.h"

#include "core/error.h"

namespace terrace {
namespace {

// Some rows at a time: each line of the result is then written at once.
template <typename Element>
void TransposeElements(const MatrixBlock& from, int64_t rows, int64_t columns,
                       const MatrixBlock& to) {
  constexpr int64_t kRows = 16;
  const auto* source = reinterpret_cast<const Element*>(from.data);
  auto* target = reinterpret_cast<Element*>(to.data);
  for (int64_t first = 0; first < rows; first += kRows) {
    const int64_t end = std::min(rows, first + kRows);
    for (int64_t j = 0; j < columns; ++j) {
      for (int64_t i = first; i < end; ++i) {
        target[j * to.stride + i] = source[i * from.stride + j];
      }
    }
  }
}

}  // namespace

void Transpose(const MatrixBlock& from, int64_t rows, int64_t columns, const MatrixBlock& to) {
  TERRACE_CHECK(from.dtype == to.dtype, "{} and {}", NameOf(from.dtype), NameOf(to.dtype));
  if (BytesOf(from.dtype) == sizeof(uint16_t)) {
    TransposeElements<uint16_t>(from, rows, columns, to);
  } else {
    TransposeElements<uint32_t>(from, rows, columns, to);
  }
}

}  // namespace terrace
