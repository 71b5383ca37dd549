#include "core/counted.h"

#include <gtest/gtest.h>

namespace terrace {
namespace {

TEST(CountedTest, OneIsSingular) {
  EXPECT_EQ(Counted(0, "token"), "0 tokens");
  EXPECT_EQ(Counted(1, "token"), "1 token");
  EXPECT_EQ(Counted(2u, "token"), "2 tokens");
  EXPECT_EQ(Counted(uint64_t{1}, "micro-batch"), "1 micro-batch");
  EXPECT_EQ(Counted(int64_t{21}, "micro-batch"), "21 micro-batches");
  EXPECT_EQ(Counted(-1, "step"), "-1 steps");
  EXPECT_EQ(fmt::format("{} {} left", Counted(1, "file"), ForCount(1, "is", "are")),
            "1 file is left");
  EXPECT_EQ(ForCount(11, "is", "are"), "are");
}

}  // namespace
}  // namespace terrace
