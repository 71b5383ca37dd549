// Momentum as it is stored, for SIMD kernels: the one place that knows how elements of each format
// are read and written. Compiled once for each instruction set.

#if defined(TERRACE_OPTIM_KERNELS_STORED_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TERRACE_OPTIM_KERNELS_STORED_INL_H_
#undef TERRACE_OPTIM_KERNELS_STORED_INL_H_
#else
#define TERRACE_OPTIM_KERNELS_STORED_INL_H_
#endif

#include <algorithm>

#include "backend/cpu/units-inl.h"
#include "optim/kernels/block_quantization-inl.h"
#include "optim/kernels/dispatch.h"

HWY_BEFORE_NAMESPACE();
namespace terrace::kernels {
namespace HWY_NAMESPACE {

// Consecutive elements of a row, all in one stripe.
struct Part {
  int64_t first;  // element of the tensor
  int64_t count;
  int64_t row_length;
  int64_t row;
  int64_t column;  // of the first

  // Whose random numbers round them, from which of its units on.
  HWY_INLINE int64_t stripe() const {
    return row * ((row_length + kStripe - 1) / kStripe) + column / kStripe;
  }
  HWY_INLINE int64_t first_unit() const { return column % kStripe / kUnit; }
  // The scale of their block of codes.
  HWY_INLINE int64_t scale() const {
    return row * CodeBlocks(row_length) + column / kQuantizationBlock;
  }
};

// Calls body(part) for elements [begin, end) in parts of `length` elements or what their row
// leaves. `length` divides kStripe or is kStripe, `begin` is the first element of such a part.
template <typename Body>
HWY_INLINE void ForParts(int64_t row_length, int64_t length, int64_t begin, int64_t end,
                         const Body& body) {
  for (int64_t first = begin; first < end;) {
    const int64_t row = first / row_length;
    const int64_t column = first % row_length;
    const int64_t count = std::min({length, row_length - column, end - first});
    body(Part{first, count, row_length, row, column});
    first += count;
  }
}

// Writes the units of a part in order, as UnitStore does.
template <typename T>
struct MomentumStore : UnitStore<T> {
  HWY_INLINE MomentumStore(uint64_t stripe_key, int64_t first_unit)
      : UnitStore<T>(stripe_key, first_unit) {}
  HWY_INLINE VF Old(const T* at) const { return Load(at); }
};

// The codes of a block depend on all of it: they are written when the block is complete.
template <>
struct MomentumStore<SignedCode> {
  HWY_INLINE MomentumStore(float old_scale, uint64_t key, int64_t unit)
      : scale(hn::Set(F32(), old_scale)), stripe_key(key), first_unit(unit) {}

  HWY_INLINE VF Old(const SignedCode* at) const { return hn::Mul(scale, Load(at)); }

  template <typename Updated>
  HWY_INLINE void operator()(const Updated& updated, const SignedCode*) {
    for (int64_t at = 0; at < kUnit; at += kLanes) {
      const VF value = updated(at);
      largest.Add(value);
      Store(value, values + filled + at);
    }
    filled += kUnit;
  }

  // Returns the block's new scale.
  HWY_INLINE float Finish(int64_t count, uint8_t* codes) const {
    float new_scale = 0;
    ForQuantizedBlocks(
        count,
        [&](int64_t, int64_t units, uint8_t* to) HWY_ATTR {
          new_scale =
              QuantizeUnits<Code::kSigned>(values, largest, units, stripe_key, first_unit, to);
        },
        codes);
    return new_scale;
  }

  VF scale;
  uint64_t stripe_key;
  int64_t first_unit;
  LargestBits largest;
  int64_t filled = 0;
  HWY_ALIGN float values[kQuantizationBlock];
};

// A storage reads elements [begin, end) by calls of
//   read(part, x, scale)   x: for Load, to be multiplied by `scale`, a power of two
// and moves them by calls of
//   move(part, m, store)   for every unit of m in order, store(updated, unit of m), where
//                          updated(at) may ask for store.Old(unit of m + at)
// `begin` is the first element of a stripe or of a row. Stripes end with rows of `row_length`
// elements, which for codes are always the tensor's own.
template <typename T>
struct ElementStorage {
  static constexpr bool kCodes = false;

  template <typename Read>
  HWY_INLINE void ForRead(int64_t row_length, int64_t begin, int64_t end, const Read& read) const {
    ForParts(row_length, kStripe, begin, end, [&](const Part& part) HWY_ATTR {
      read(part, static_cast<const T*>(values + part.first), 1.0f);
    });
  }
  template <typename Move>
  HWY_INLINE void ForMove(int64_t row_length, uint64_t key, int64_t begin, int64_t end,
                          const Move& move) const {
    ForParts(row_length, kStripe, begin, end, [&](const Part& part) HWY_ATTR {
      MomentumStore<T> store(StripeKey(key, part.stripe()), part.first_unit());
      move(part, values + part.first, store);
    });
  }

  T* values;
};

struct CodeStorage {
  static constexpr bool kCodes = true;

  explicit CodeStorage(const Stored& x)
      : codes(x.values.as<uint8_t>()),
        scales(x.scales.as<float>()),
        code_row(CodeRow(x.values.shape)) {}

  template <typename Read>
  HWY_INLINE void ForRead(int64_t, int64_t begin, int64_t end, const Read& read) const {
    ForParts(code_row, kQuantizationBlock, begin, end, [&](const Part& part) HWY_ATTR {
      read(part, CodesAt(part.first), scales[part.scale()]);
    });
  }
  template <typename Move>
  HWY_INLINE void ForMove(int64_t, uint64_t key, int64_t begin, int64_t end,
                          const Move& move) const {
    ForParts(code_row, kQuantizationBlock, begin, end, [&](const Part& part) HWY_ATTR {
      float& scale = scales[part.scale()];
      MomentumStore<SignedCode> store(scale, StripeKey(key, part.stripe()), part.first_unit());
      move(part, CodesAt(part.first), store);
      scale = store.Finish(part.count, codes + part.first);
    });
  }

 private:
  HWY_INLINE const SignedCode* CodesAt(int64_t first) const {
    return reinterpret_cast<const SignedCode*>(codes + first);
  }

  uint8_t* codes;
  float* scales;
  int64_t code_row;
};

// Calls f(storage).
template <typename F>
HWY_INLINE void WithStorage(const Stored& x, const F& f) {
  if (x.values.dtype == DType::kU8) return f(CodeStorage(x));
  WithElements(x.values, [&](auto* values) {
    f(ElementStorage<std::remove_pointer_t<decltype(values)>>{values});
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace terrace::kernels
HWY_AFTER_NAMESPACE();

#endif  // TERRACE_OPTIM_KERNELS_STORED_INL_H_
