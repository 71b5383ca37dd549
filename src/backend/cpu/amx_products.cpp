#include "backend/cpu/amx_products.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <oneapi/dnnl/dnnl.hpp>
#include <type_traits>

#include "backend/cpu/amx_layout.h"
#include "core/dtype.h"
#include "core/error.h"

#if defined(__x86_64__) && defined(__linux__)
#define TERRACE_AMX 1
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

// Everything that the products include comes before the instruction set is raised: a standard
// function compiled with AVX-512 here could be the one that the linker keeps for all.
#ifdef TERRACE_AMX
#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512bf16,bmi2")
// GCC 12 warns of its own intrinsics' undefined vectors.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "backend/cpu/amx_products-inl.h"

#ifdef TERRACE_AMX
namespace terrace {
namespace {

// Operand of ldtilecfg.
struct alignas(64) TileConfiguration {
  uint8_t palette = 1;  // 8 tiles of at most 16 rows of 64 bytes
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  std::array<uint16_t, 16> row_bytes = {64, 64, 64, 64, 64, 64, 64, 64};
  std::array<uint8_t, 16> rows = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfiguration) == 64);

// The compiler knows nothing of tiles and of what their instructions read and write: all are
// volatile, which keeps their order, and those that touch memory say that it may be any.
struct AmxUnit {
  using Vec = __m512i;

  class Session {
   public:
    Session() {
      static constexpr TileConfiguration kConfiguration;
      asm volatile("ldtilecfg %0" : : "m"(kConfiguration) : "memory");
    }
    // Tiles in use make every switch of threads save 8 KiB; oneDNN configures its own.
    ~Session() { asm volatile("tilerelease" : : : "memory"); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

  template <int kTile>
  [[gnu::always_inline]] static void Zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
  }
  template <int kTile>
  [[gnu::always_inline]] static void Load(const std::byte* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  [[gnu::always_inline]] static void Store(std::byte* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kTile) : "memory");
  }
  // AT&T order: right, left, sum.
  template <int kSum, int kLeft, int kRight>
  [[gnu::always_inline]] static void Multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kLeft), "i"(kRight));
  }

  [[gnu::always_inline]] static Vec ZeroVec() { return _mm512_setzero_si512(); }
  [[gnu::always_inline]] static Vec Load(const std::byte* from) { return _mm512_loadu_si512(from); }
  // The first `count` of 32 lanes of 16 bits; the rest are zeros, and their memory is not touched.
  [[gnu::always_inline]] static Vec LoadPart(const std::byte* from, int64_t count) {
    return _mm512_maskz_loadu_epi16(First(count), from);
  }
  [[gnu::always_inline]] static void StoreVec(std::byte* to, Vec value) {
    _mm512_storeu_si512(to, value);
  }
  [[gnu::always_inline]] static void StorePart(std::byte* to, Vec value, int64_t count) {
    _mm512_mask_storeu_epi16(to, First(count), value);
  }
  // Past the caches, to an address that is a multiple of 64; Fence makes it visible to others.
  [[gnu::always_inline]] static void Stream(std::byte* to, Vec value) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), value);
  }
  static void Fence() { _mm_sfence(); }

  // Within each block of 128 bits: lanes of the lower (or upper) half of a and b by turns.
  [[gnu::always_inline]] static Vec UnpackLow16(Vec a, Vec b) {
    return _mm512_unpacklo_epi16(a, b);
  }
  [[gnu::always_inline]] static Vec UnpackHigh16(Vec a, Vec b) {
    return _mm512_unpackhi_epi16(a, b);
  }
  [[gnu::always_inline]] static Vec UnpackLow32(Vec a, Vec b) {
    return _mm512_unpacklo_epi32(a, b);
  }
  [[gnu::always_inline]] static Vec UnpackHigh32(Vec a, Vec b) {
    return _mm512_unpackhi_epi32(a, b);
  }
  [[gnu::always_inline]] static Vec UnpackLow64(Vec a, Vec b) {
    return _mm512_unpacklo_epi64(a, b);
  }
  [[gnu::always_inline]] static Vec UnpackHigh64(Vec a, Vec b) {
    return _mm512_unpackhi_epi64(a, b);
  }
  // Blocks of 128 bits: 0 and 2 (or 1 and 3) of a, then of b.
  [[gnu::always_inline]] static Vec EvenBlocks(Vec a, Vec b) {
    return _mm512_shuffle_i32x4(a, b, 0x88);
  }
  [[gnu::always_inline]] static Vec OddBlocks(Vec a, Vec b) {
    return _mm512_shuffle_i32x4(a, b, 0xdd);
  }
  // Lanes of the lower and the upper half by turns.
  [[gnu::always_inline]] static Vec ZipHalves64(Vec a) {
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), a);
  }
  [[gnu::always_inline]] static Vec ZipHalves16(Vec a) {
    const Vec order =
        _mm512_setr_epi32(0x00100000, 0x00110001, 0x00120002, 0x00130003, 0x00140004, 0x00150005,
                          0x00160006, 0x00170007, 0x00180008, 0x00190009, 0x001a000a, 0x001b000b,
                          0x001c000c, 0x001d000d, 0x001e000e, 0x001f000f);
    return _mm512_permutexvar_epi16(order, a);
  }
  // float32 lanes of `low`, then of `high`, as bfloat16: to nearest, ties to even.
  [[gnu::always_inline]] static Vec RoundToBF16(Vec low, Vec high) {
    return reinterpret_cast<Vec>(
        _mm512_cvtne2ps_pbh(_mm512_castsi512_ps(high), _mm512_castsi512_ps(low)));
  }
  [[gnu::always_inline]] static Vec Add32(Vec a, Vec b) {
    return _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b)));
  }

 private:
  [[gnu::always_inline]] static __mmask32 First(int64_t count) {
    return _bzhi_u32(~uint32_t{0}, static_cast<uint32_t>(count));
  }
};

void RunOnTiles(const Product& product, const AmxBlocking& blocking, std::byte* scratch) {
  AmxRun<AmxUnit>(product, blocking, scratch).Run();
}

}  // namespace
}  // namespace terrace
#pragma GCC diagnostic pop
#pragma GCC pop_options

namespace terrace {
namespace {

// Intel's manual, CPUID leaf 7 and XCR0.
bool ProcessorHasAmx() {
  unsigned a, b, c, d;
  const auto has = [](unsigned bits, std::initializer_list<int> positions) {
    return std::all_of(positions.begin(), positions.end(),
                       [bits](int position) { return (bits >> position & 1) != 0; });
  };
  if (!__get_cpuid(1, &a, &b, &c, &d) || !has(c, {27 /*xgetbv*/})) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) ||
      !has(b, {8 /*BMI2*/, 16 /*AVX512F*/, 30 /*AVX512BW*/, 31 /*AVX512VL*/}) ||
      !has(d, {22 /*AMX-BF16*/, 24 /*AMX-TILE*/})) {
    return false;
  }
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !has(a, {5 /*AVX512_BF16*/})) return false;
  unsigned enabled, upper;
  asm volatile("xgetbv" : "=a"(enabled), "=d"(upper) : "c"(0));
  return has(enabled, {1, 2, 5, 6, 7 /*vector registers*/, 17, 18 /*tiles*/});
}

// Linux leaves tiles off until a process asks for them; all its threads then have them.
bool SystemGrantsTiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool CapAllowsAmx() {
  constexpr int kAmx = static_cast<int>(dnnl::cpu_isa::avx512_core_amx);
  return (static_cast<int>(dnnl::get_effective_cpu_isa()) & kAmx) == kAmx;
}

}  // namespace

bool HasAmx() {
  static const bool has = ProcessorHasAmx() && SystemGrantsTiles() && CapAllowsAmx();
  return has;
}

}  // namespace terrace
#else
namespace terrace {
namespace {

void RunOnTiles(const Product&, const AmxBlocking&, std::byte*) {}

}  // namespace

bool HasAmx() { return false; }

}  // namespace terrace
#endif

namespace terrace {
namespace {

// Of a packed block, and of sums that scratch keeps: half of a second-level cache of 2 MiB.
constexpr int64_t kPackedBytes = int64_t{1} << 20;
constexpr int64_t kSumsBytes = int64_t{1} << 20;
constexpr int64_t kMaxBlock = 1024;
constexpr int64_t kMaxWidthDepth = 4096;
constexpr int64_t kTokensDepth = 512;

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

bool HasDtypes(const Product& product) {
  return product.a.dtype == DType::kBF16 && product.b.dtype == DType::kBF16 &&
         (product.c.dtype == DType::kBF16 || product.c.dtype == DType::kF32);
}

}  // namespace

AmxKind AmxKindOf(const Product& product) {
  TERRACE_CHECK(!(product.a.transposed && product.b.transposed), "both inputs are transposed");
  if (product.a.transposed) return AmxKind::kWeightGradient;
  return product.b.transposed ? AmxKind::kForward : AmxKind::kInputGradient;
}

bool PrefersAmx(const Product& product) {
  if (!HasDtypes(product) || (product.a.transposed && product.b.transposed)) return false;
  const AmxKind kind = AmxKindOf(product);
  const int64_t tokens = kind == AmxKind::kWeightGradient ? product.k : product.m;
  return tokens <= kAmxMaxRows[static_cast<size_t>(kind)];
}

AmxBlocking AmxBlockingOf(const Product& product) {
  const AmxKind kind = AmxKindOf(product);
  const bool weight = kind == AmxKind::kWeightGradient;
  AmxBlocking blocking;
  blocking.depth = weight ? kTokensDepth
                          : std::clamp(RoundUp(product.k, kDepthStep), kDepthStep, kMaxWidthDepth);
  const int64_t fitting = kPackedBytes / (blocking.depth * BytesOf(DType::kBF16));
  blocking.block = std::clamp(fitting / kPanel * kPanel, kPanel, kMaxBlock);
  if (weight)
    blocking.block = std::min(blocking.block, std::max(RoundUp(product.m, kPanel), kPanel));
  // The next panel of a weight is on its way while one is multiplied; gradients of weights are
  // written along their rows.
  constexpr int64_t kPanels[] = {/*kForward*/ 32, /*kInputGradient*/ 64, /*kWeightGradient*/ 256};
  const int64_t columns = std::max(RoundUp(product.n, kPanel), kPanel);
  blocking.panel = std::min(kPanels[static_cast<size_t>(kind)], columns);
  const int64_t kept = kSumsBytes / (blocking.block * static_cast<int64_t>(sizeof(float)));
  blocking.group = std::min(std::max(kept / blocking.panel, int64_t{1}) * blocking.panel,
                            RoundUp(columns, blocking.panel));
  return blocking;
}

int64_t AmxScratchBytes(const Product& product, const AmxBlocking& blocking) {
  return AmxScratchOf(product, blocking).end;
}

void RunAmx(const Product& product, const AmxBlocking& blocking, std::byte* scratch,
            int64_t scratch_bytes) {
  TERRACE_CHECK(HasAmx(), "this processor has no AMX");
  TERRACE_CHECK(HasDtypes(product), "a product of {} and {} to {}", NameOf(product.a.dtype),
                NameOf(product.b.dtype), NameOf(product.c.dtype));
  const int64_t needed = AmxScratchBytes(product, blocking);
  TERRACE_CHECK(scratch_bytes >= needed, "scratch of {} bytes, not {}", scratch_bytes, needed);
  TERRACE_CHECK(reinterpret_cast<uintptr_t>(scratch) % 64 == 0, "unaligned scratch");
  RunOnTiles(product, blocking, scratch);
}

}  // namespace terrace
