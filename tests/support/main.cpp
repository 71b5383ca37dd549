// Runs a test program; TERRACE_MAX_ISA=avx2 leaves CPU features beyond AVX2 unused.
#include <gtest/gtest.h>

#include <cstdlib>

#include "backend/cpu/cpu_backend.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (const char* isa = std::getenv("TERRACE_MAX_ISA")) terrace::CapInstructionSet(isa);
  return RUN_ALL_TESTS();
}
