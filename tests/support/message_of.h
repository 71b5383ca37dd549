// What errors say.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "core/error.h"

namespace terrace {

// The message of the Error (or InternalError) that action() ends in; empty where it ends well.
// Messages are one line.
template <typename Thrown = Error, typename Action>
std::string MessageOf(const Action& action) {
  try {
    action();
  } catch (const Thrown& error) {
    const std::string message = error.what();
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    return message;
  }
  return "";
}

}  // namespace terrace
