#include "train/metrics.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "core/atomic_file.h"
#include "support/temporary_folder.h"

namespace terrace {
namespace {

// A resumed run keeps the lines up to its checkpoint, whatever else has got into the file.
TEST(MetricsFileTest, LinesThatAreNoStepsCostNoHistory) {
  const TemporaryFolder folder;
  const std::filesystem::path path = folder / "metrics.jsonl";
  const std::string step = R"({"step":2,"loss":1})"
                           "\n";
  for (const char* odd :
       {R"({"step":null})", R"({"step":"2"})", R"({"step":[2]})", R"({"step":{}})",
        R"({"step":1.5})", R"({"step":true})", R"({"step":18446744073709551615})", R"({})", "[]",
        "null", "7", "\"x\"", "", "{", "\xff\xfe"}) {
    const std::string before = R"({"step":1})"
                               "\n" +
                               std::string(odd) + "\n" + step;
    std::ofstream(path, std::ios::binary) << before << odd << "\n"
                                          << R"({"step":3})"
                                             "\n"
                                          << R"({"step":4)";
    MetricsFile file(path, 2);
    EXPECT_EQ(file.kept_step(), 2) << odd;
    EXPECT_EQ(file.dropped_lines(), 2) << odd;  // the odd one again, and step 3
    EXPECT_EQ(ReadFile(path), before) << odd;
  }
}

TEST(MetricsFileTest, LinesMayBeLongerThanWhatIsReadAtOnce) {
  const TemporaryFolder folder;
  const std::filesystem::path path = folder / "metrics.jsonl";
  for (const size_t blanks : {size_t{65534}, size_t{65535}, size_t{65536}, size_t{200'000}}) {
    const std::string line = R"({"step":1)" + std::string(blanks - 9, ' ') + "}\n";
    std::ofstream(path, std::ios::binary) << line << line
                                          << R"({"step":2})"
                                             "\n";
    MetricsFile file(path, 1);
    EXPECT_EQ(file.kept_step(), 1);
    EXPECT_EQ(file.dropped_lines(), 1);
    EXPECT_EQ(ReadFile(path), line + line);
  }
}

}  // namespace
}  // namespace terrace
