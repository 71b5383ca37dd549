#include "core/tensor.h"

namespace terrace {

void Shape::FailSize() const { Fail("shape {}: more than 2^48 elements", ToString()); }

std::string Shape::ToString() const {
  std::string text = "[";
  for (int axis = 0; axis < rank_; ++axis) {
    if (axis > 0) text += ", ";
    text += std::to_string(dims_[axis]);
  }
  return text + "]";
}

int64_t TensorView::columns() const {
  int64_t product = 1;
  for (int axis = 1; axis < shape.rank(); ++axis) product *= shape[axis];
  return product;
}

TensorView TensorView::Rows(int64_t first, int64_t count) const {
  TERRACE_CHECK(first >= 0 && count >= 0 && first + count <= shape[0], "{}: rows {}+{} of {}", name,
                first, count, shape.ToString());
  TensorView part = *this;
  part.shape[0] = count;
  if (data != nullptr) part.data = data + first * columns() * BytesOf(dtype);
  return part;
}

TensorView TensorView::Reshaped(Shape other) const {
  TERRACE_CHECK(other.size() == size(), "{}: {} as {}", name, shape.ToString(), other.ToString());
  TensorView view = *this;
  view.shape = other;
  return view;
}

}  // namespace terrace
