// Shapes and tensor views. Views never own memory; `core/arena.h` has the owner.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <type_traits>

#include "core/dtype.h"
#include "core/error.h"

namespace terrace {

// Up to four dimensions, row-major, 64-bit. A rank of 0 is a scalar (one element).
class Shape {
 public:
  static constexpr int kMaxRank = 4;
  static constexpr int64_t kMaxSize = int64_t{1} << 48;  // elements

  constexpr Shape() = default;
  constexpr Shape(std::initializer_list<int64_t> dims)
      : Shape(std::span<const int64_t>(dims.begin(), dims.size())) {}
  explicit constexpr Shape(std::span<const int64_t> dims) {
    for (int64_t dim : dims) dims_[rank_++] = dim;
  }

  constexpr int rank() const { return rank_; }
  constexpr int64_t operator[](int axis) const { return dims_[axis]; }
  constexpr int64_t& operator[](int axis) { return dims_[axis]; }
  // Throws Error beyond kMaxSize, so that sums of bytes cannot overflow.
  constexpr int64_t size() const {
    int64_t product = 1;
    for (int axis = 0; axis < rank_; ++axis) {
      if (__builtin_mul_overflow(product, dims_[axis], &product) || product > kMaxSize) FailSize();
    }
    return product;
  }
  constexpr bool operator==(const Shape&) const = default;

  // "[2048, 512]"
  std::string ToString() const;

 private:
  [[noreturn]] void FailSize() const;

  std::array<int64_t, kMaxRank> dims_{};
  int rank_ = 0;
};

// A contiguous, row-major, typed window on memory that someone else owns. `name` points to a
// string that outlives the view (a literal, or a parameter's name) and appears in errors.
// In a dry run `data` is null and only shapes are true.
struct TensorView {
  std::byte* data = nullptr;
  DType dtype = DType::kF32;
  Shape shape;
  const char* name = "";

  bool empty() const { return shape.rank() == 0; }  // a default view: "no such tensor"
  int64_t size() const { return shape.size(); }
  int64_t bytes() const { return size() * BytesOf(dtype); }
  int64_t rows() const { return shape[0]; }
  // Product of all dimensions but the first.
  int64_t columns() const;

  template <typename T>
  T* as() const {
    TERRACE_CHECK(dtype == kDTypeOf<T>, "{}: is {}, not {}", name, NameOf(dtype),
                  NameOf(kDTypeOf<T>));
    return reinterpret_cast<T*>(data);
  }
  template <typename T>
  std::span<T> span() const {
    return {as<std::remove_const_t<T>>(), static_cast<size_t>(size())};
  }

  // Rows [first, first + count) of the first dimension.
  TensorView Rows(int64_t first, int64_t count) const;
  // The same memory under another shape of equal size.
  TensorView Reshaped(Shape other) const;
};

}  // namespace terrace
