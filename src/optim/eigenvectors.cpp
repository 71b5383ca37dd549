#include "optim/eigenvectors.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>

#include "core/arena.h"
#include "core/error.h"

// Fortran's, with the lengths of its three strings at the end.
extern "C" void ssyevr_(const char* jobz, const char* range, const char* uplo, const int* n,
                        float* a, const int* lda, const float* vl, const float* vu, const int* il,
                        const int* iu, const float* abstol, int* m, float* w, float* z,
                        const int* ldz, int* isuppz, float* work, const int* lwork, int* iwork,
                        const int* liwork, int* info, size_t, size_t, size_t);

namespace terrace {
namespace {

struct Workspace {
  int floats;
  int ints;
};

// The eigenvalues and eigenvectors of numbers size - count + 1 to size, ascending. A row-major
// upper triangle is Fortran's lower one. Returns LAPACK's info.
int Solve(float* matrix, int size, int count, float* values, float* vectors, int* support,
          float* work, int* int_work, Workspace workspace) {
  // Without threads, OpenBLAS shares its buffers among callers unguarded.
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  const int first = size - count + 1;
  const float unused = 0, default_tolerance = 0;
  int found = 0, info = 0;
  ssyevr_("V", "I", "L", &size, matrix, &size, &unused, &unused, &first, &size, &default_tolerance,
          &found, values, vectors, &size, support, work, &workspace.floats, int_work,
          &workspace.ints, &info, 1, 1, 1);
  return info;
}

int IntOf(int64_t value) {
  TERRACE_CHECK(value <= std::numeric_limits<int>::max(), "LAPACK does not count to {}", value);
  return static_cast<int>(value);
}

Workspace WorkspaceOf(int64_t size, int64_t count) {
  float values = 0, vectors = 0, matrix = 0, floats = 0;
  int support = 0, ints = 0;
  const int info = Solve(&matrix, IntOf(size), IntOf(count), &values, &vectors, &support, &floats,
                         &ints, {-1, -1});
  TERRACE_CHECK(info == 0, "ssyevr: info {}", info);
  // A float32 may have rounded the number down.
  return {IntOf(static_cast<int64_t>(std::nextafter(floats, INFINITY))), ints};
}

// What lies in `work`, in this order.
struct Layout {
  explicit Layout(int64_t size, int64_t count, Workspace workspace)
      : values(Arena::Aligned(size * sizeof(float))),
        support(Arena::Aligned(2 * count * sizeof(int))),
        floats(Arena::Aligned(int64_t{workspace.floats} * sizeof(float))),
        ints(Arena::Aligned(int64_t{workspace.ints} * sizeof(int))) {}
  int64_t values, support, floats, ints;  // bytes
};

// Eigenvectors have no sign of their own.
void FixSign(float* vector, int64_t size) {
  const float* largest = std::max_element(
      vector, vector + size, [](float a, float b) { return std::abs(a) < std::abs(b); });
  if (*largest >= 0) return;
  for (int64_t i = 0; i < size; ++i) vector[i] = -vector[i];
}

}  // namespace

int64_t EigenvectorWorkBytes(int64_t size, int64_t count) {
  const Layout layout(size, count, WorkspaceOf(size, count));
  return layout.values + layout.support + layout.floats + layout.ints;
}

void LeadingEigenvectors(float* matrix, int64_t size, int64_t count, float* vectors,
                         std::byte* work) {
  const Workspace workspace = WorkspaceOf(size, count);
  const Layout layout(size, count, workspace);
  std::byte* const support = work + layout.values;
  std::byte* const floats = support + layout.support;
  const int info = Solve(matrix, IntOf(size), IntOf(count), reinterpret_cast<float*>(work), vectors,
                         reinterpret_cast<int*>(support), reinterpret_cast<float*>(floats),
                         reinterpret_cast<int*>(floats + layout.floats), workspace);
  if (info != 0) Fail("LAPACK finds no eigenvectors: ssyevr gives info {}", info);
  for (int64_t i = 0; i < count / 2; ++i) {
    std::swap_ranges(vectors + i * size, vectors + (i + 1) * size,
                     vectors + (count - 1 - i) * size);
  }
  for (int64_t i = 0; i < count; ++i) FixSign(vectors + i * size, size);
}

}  // namespace terrace
