#include "compare/front.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

namespace terrace {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(FrontTest, IsWhatNoOtherBeatsInBoth) {
  //                    the least   beaten     between    as many, worse  the best   beaten
  EXPECT_THAT(OnFront({{10, 4.5}, {20, 4.6}, {20, 4.0}, {20, 4.2}, {90, 3.5}, {99, 3.6}}),
              ElementsAre(true, false, true, false, true, false));
}

TEST(FrontTest, OneIsAlwaysOnIt) {
  EXPECT_THAT(OnFront({}), IsEmpty());
  EXPECT_THAT(OnFront({{1, 9}}), ElementsAre(true));
}

TEST(FrontTest, TiesShareAPlace) {
  // Equal in both; then equal in one, which decides by the other.
  EXPECT_THAT(OnFront({{10, 4}, {10, 4}, {10, 4}}), ElementsAre(true, true, true));
  EXPECT_THAT(OnFront({{10, 4}, {10, 4}, {5, 4}}), ElementsAre(false, false, true));
  EXPECT_THAT(OnFront({{10, 4}, {10, 3}}), ElementsAre(false, true));
}

TEST(FrontTest, ALossThatIsNoNumberIsNoChoice) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_THAT(OnFront({{1, nan}, {10, 4}}), ElementsAre(false, true));
  EXPECT_THAT(OnFront({{10, infinity}, {10, 4}}), ElementsAre(false, true));
}

}  // namespace
}  // namespace terrace
