// Leading eigenvectors of symmetric matrices, by LAPACK (ssyevr, of OpenBLAS without threads).
// Thread-safe, but one caller computes at a time; the same input gives the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace terrace {

// What LeadingEigenvectors needs for `count` vectors of a [size, size] matrix, in bytes.
int64_t EigenvectorWorkBytes(int64_t size, int64_t count);

// vectors[count, size] = the eigenvectors to the largest eigenvalues, largest first, of norm 1 and
// orthogonal to each other; in each the entry of largest magnitude is positive. Only the diagonal
// of `matrix` and what is above it are read; all of it is destroyed. `work` is aligned as the arena
// aligns. Throws Error when LAPACK does not converge, which it does for all finite matrices.
void LeadingEigenvectors(float* matrix, int64_t size, int64_t count, float* vectors,
                         std::byte* work);

}  // namespace terrace
