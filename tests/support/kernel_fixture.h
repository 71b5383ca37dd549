// A fixture for tests of CPU kernels: every test runs on every instruction set of this machine.
#pragma once

#include <gtest/gtest.h>
#include <hwy/targets.h>
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "core/rng.h"
#include "support/compare.h"
#include "support/reference_backend.h"

namespace terrace {

inline constexpr DType kFloatTypes[] = {DType::kF32, DType::kBF16};
// Around the vector lengths of all instruction sets, and beyond them.
inline constexpr int64_t kWidths[] = {1, 2, 7, 8, 15, 16, 17, 33, 64, 1000};

// The parameter is a Highway target.
class KernelTest : public testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override { Choose(GetParam()); }
  void TearDown() override { Choose(0); }

  TensorView New(DType dtype, Shape shape, const char* name = "tensor") {
    return arena_.Allocate(Memory::kActivations, dtype, shape, name);
  }
  // N(0, 1), different at every call.
  TensorView Normals(DType dtype, Shape shape, const char* name = "normals") {
    const TensorView view = New(dtype, shape, name);
    ++key_;
    for (int64_t i = 0; i < view.size(); ++i) SetElement(view, i, RandomNormal(key_, i));
    return view;
  }
  // Uniform in [0, count), i32 or i64, different at every call.
  TensorView Indices(DType dtype, Shape shape, int64_t count, const char* name = "indices") {
    const TensorView view = New(dtype, shape, name);
    ++key_;
    for (int64_t i = 0; i < view.size(); ++i) {
      const int64_t index = static_cast<int64_t>(RandomBits(key_, i) % count);
      if (dtype == DType::kI32) {
        view.as<int32_t>()[i] = static_cast<int32_t>(index);
      } else {
        view.as<int64_t>()[i] = index;
      }
    }
    return view;
  }
  TensorView CopyOf(const TensorView& view) {
    const TensorView copy = New(view.dtype, view.shape, view.name);
    std::copy_n(view.data, view.bytes(), copy.data);
    return copy;
  }

  // Runs `operation` with one, two, four and five threads; it returns a tensor, whose bytes must
  // agree.
  template <typename Operation>
  void ExpectSameForAnyThreads(const Operation& operation) {
    const int threads = omp_get_max_threads();
    omp_set_num_threads(1);
    const TensorView expected = operation();
    for (const int count : {2, 4, 5}) {
      omp_set_num_threads(count);
      EXPECT_TRUE(SameBytes(operation(), expected)) << count << " threads";
    }
    omp_set_num_threads(threads);
  }

  // `operation` takes a backend and allocates what it needs there; the ledgers of a real run and
  // of a dry one must agree.
  template <typename Operation>
  static void ExpectDryTakesTheSame(const Operation& operation) {
    Arena real(int64_t{64} << 20);
    CpuBackend real_backend(real);
    operation(real_backend);
    Arena dry = Arena::Dry();
    CpuBackend dry_backend(dry);
    operation(dry_backend);
    EXPECT_EQ(dry.ledger().peak_bytes, real.ledger().peak_bytes);
    EXPECT_EQ(dry.ledger().total_peak_bytes, real.ledger().total_peak_bytes);
    EXPECT_EQ(real.ledger().current_bytes[static_cast<int>(Memory::kScratch)], 0);
  }

  Arena arena_{int64_t{512} << 20};
  CpuBackend cpu_{arena_};
  ReferenceBackend reference_{arena_};

 private:
  static void Choose(int64_t target) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }

  uint64_t key_ = 0;
};

inline std::vector<int64_t> KernelTargets() {
  std::vector<int64_t> targets = {HWY_STATIC_TARGET};
  for (const int64_t target : {HWY_AVX2, HWY_AVX3}) {
    if (target == HWY_STATIC_TARGET) continue;
    if (hwy::SupportedTargets() & HWY_TARGETS & target) targets.push_back(target);
  }
  return targets;
}

inline std::string KernelTargetName(const testing::TestParamInfo<int64_t>& info) {
  return hwy::TargetName(info.param);
}

#define INSTANTIATE_KERNEL_TEST(suite) \
  INSTANTIATE_TEST_SUITE_P(Targets, suite, ::testing::ValuesIn(KernelTargets()), KernelTargetName)

}  // namespace terrace
