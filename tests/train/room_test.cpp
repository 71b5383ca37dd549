// Room for checkpoints, on a disk whose room this file makes up.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/statvfs.h>

#include <cerrno>
#include <filesystem>
#include <optional>

#include "core/error.h"
#include "support/message_of.h"
#include "support/small_run.h"
#include "support/temporary_folder.h"
#include "train/checkpoint.h"
#include "train/run_folder.h"
#include "train/trainer.h"

namespace {
std::optional<int64_t> made_up_free_bytes;  // NOLINT: what statvfs below says
bool made_up_silence = false;               // NOLINT
}  // namespace

extern "C" int statvfs(const char* path, struct statvfs* status) noexcept {
  if (!std::filesystem::exists(path)) {
    errno = ENOENT;
    return -1;
  }
  *status = {};
  status->f_frsize = 1;
  status->f_blocks = made_up_silence ? 0 : 1 << 30;
  status->f_bavail = static_cast<fsblkcnt_t>(made_up_free_bytes.value_or(int64_t{1} << 50));
  return 0;
}

namespace terrace {
namespace {

using testing::AllOf;
using testing::HasSubstr;
namespace fs = std::filesystem;

class RoomTest : public testing::Test {
 protected:
  RoomTest() {
    PrepareSmallCorpus(folder_ / "corpus");
    config_ = SmallRun(folder_ / "corpus");  // saves after 10 and 20 steps
  }
  ~RoomTest() override {
    made_up_free_bytes.reset();
    made_up_silence = false;
  }

  std::string MessageOfTrain(const TrainOptions& options = {}) const {
    return MessageOf([&] { Train(config_, run_.path, options, {}); });
  }
  // Of the files of the newest checkpoint.
  int64_t BytesOnDisk() const {
    int64_t bytes = 0;
    for (const auto& entry : fs::directory_iterator(LatestCheckpoint(run_.checkpoints()).value())) {
      bytes += static_cast<int64_t>(entry.file_size());
    }
    return bytes;
  }

  TemporaryFolder folder_;
  RunConfig config_;
  const RunFolder run_{folder_ / "parent" / "run"};
};

TEST_F(RoomTest, IsRequiredBeforeTheFirstStep) {
  ASSERT_EQ(MessageOfTrain(), "");
  const int64_t bytes = BytesOnDisk();
  fs::remove_all(run_.path.parent_path());

  made_up_free_bytes = 2 * bytes - 1;  // of two
  EXPECT_THAT(MessageOfTrain(),
              AllOf(HasSubstr("MiB are needed for checkpoints"), HasSubstr("2 of "),
                    HasSubstr(" MiB are free; --overcommit starts all the same")));
  EXPECT_FALSE(fs::exists(run_.path.parent_path()));  // nothing was written
  made_up_free_bytes = 2 * (bytes + bytes / 4 + 65536);
  EXPECT_EQ(MessageOfTrain(), "");
}

TEST_F(RoomTest, CountsWhatIsThereAtOnce) {
  config_.training.checkpoint_interval = 1;
  ASSERT_EQ(MessageOfTrain(), "");
  const int64_t enough = BytesOnDisk() + BytesOnDisk() / 4 + 65536;  // of one
  fs::remove_all(run_.path);
  // training.keep = 2, and the next.
  made_up_free_bytes = 2 * enough;
  EXPECT_THAT(MessageOfTrain(), HasSubstr("3 of "));
  made_up_free_bytes = 3 * enough;
  EXPECT_EQ(MessageOfTrain(), "");
  // Two are there, of which one goes when the next is complete.
  config_.training.steps = 22;
  made_up_free_bytes = enough;
  EXPECT_EQ(MessageOfTrain({.resume = true}), "");
  config_.training.steps = 23;
  made_up_free_bytes = 1000;
  EXPECT_THAT(MessageOfTrain({.resume = true}), HasSubstr("1 of "));
  // Nothing is left to do, and to save.
  config_.training.steps = 22;
  EXPECT_EQ(MessageOfTrain({.resume = true}), "");
}

TEST_F(RoomTest, MayBeOverruled) {
  made_up_free_bytes = 0;
  EXPECT_NE(MessageOfTrain(), "");
  EXPECT_EQ(MessageOfTrain({.overcommit = true}), "");
  fs::remove_all(run_.path);
  made_up_silence = true;
  EXPECT_EQ(MessageOfTrain(), "");
}

}  // namespace
}  // namespace terrace
