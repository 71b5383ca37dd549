#include "data/files.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "core/error.h"
#include "support/file_size_limit.h"
#include "support/message_of.h"
#include "support/temporary_folder.h"

namespace terrace {
namespace {

size_t EntriesOf(const std::filesystem::path& folder) {
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(folder), {}));
}

TEST(ReadWhole, HoldsTheBytes) {
  const TemporaryFolder folder;
  const std::string bytes("a\0b\xff", 4);
  WriteNewFile(folder / "a", bytes);
  WriteNewFile(folder / "empty", "");
  EXPECT_EQ(ReadWhole(folder / "a"), bytes);
  EXPECT_EQ(ReadWhole(folder / "empty"), "");
  EXPECT_EQ(ReadWhole("/dev/null"), "");
  EXPECT_TRUE(ReadWhole("/proc/self/status").starts_with("Name:"))
      << "a size of 0 is not to be believed";
}

TEST(ReadWhole, RefusesFoldersAndMissingFiles) {
  const TemporaryFolder folder;
  EXPECT_THROW(ReadWhole(folder.path()), Error);
  EXPECT_THROW(ReadWhole(folder / "none"), Error);
}

TEST(WriteNewFile, RefusesToOverwrite) {
  const TemporaryFolder folder;
  WriteNewFile(folder / "a", "first");
  EXPECT_THROW(WriteNewFile(folder / "a", "second"), Error);
  EXPECT_EQ(ReadWhole(folder / "a"), "first");
  EXPECT_THROW(WriteNewFile(folder / "none" / "a", "x"), Error);
  EXPECT_EQ(EntriesOf(folder.path()), 1u);
}

TEST(RequireCreatable, SaysWhatWritingWouldSayAndLeavesNothing) {
  const TemporaryFolder folder;
  WriteNewFile(folder / "a", "first");
  for (const std::filesystem::path& path :
       {folder / "a", folder / "none/b", folder / "a/b", folder / "b/", std::filesystem::path(),
        folder / std::string(300, 'x')}) {
    const std::string first = MessageOf([&] { RequireCreatable(path); });
    EXPECT_NE(first, "") << path;
    EXPECT_EQ(first, MessageOf([&] { WriteNewFile(path, "x"); }));
  }
  EXPECT_EQ(MessageOf([&] { RequireCreatable(folder / "b"); }), "");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
}

TEST(WriteNewFile, TouchesNoOtherFileAndLeavesNone) {
  const TemporaryFolder folder;
  WriteNewFile(folder / "a.tmp", "mine");
  WriteNewFile(folder / "a", "x");
  EXPECT_EQ(ReadWhole(folder / "a.tmp"), "mine");
  {
    const FileSizeLimit limit(4096);
    EXPECT_THROW(WriteNewFile(folder / "b", std::string(4097, 'x')), Error);
  }
  EXPECT_EQ(EntriesOf(folder.path()), 2u);
  OutputFile plain(folder / "plain");
  EXPECT_EQ(std::filesystem::status(folder / "a").permissions(),
            std::filesystem::status(folder / "plain").permissions());
}

TEST(OutputFile, SaysThatTheDiskIsFull) {
  const TemporaryFolder folder;
  const FileSizeLimit limit(4096);
  OutputFile file(folder / "a");
  file.Write(std::string(4096, 'x'));
  EXPECT_THROW(file.Write("x"), Error);
}

TEST(OutputFolder, AppearsOnlyWhenCommitted) {
  const TemporaryFolder folder;
  const std::filesystem::path path = folder / "deep" / "output" / "";
  {
    OutputFolder output(path);
    WriteNewFile(output.temporary() / "a", "x");
    EXPECT_FALSE(std::filesystem::exists(path));
  }
  EXPECT_EQ(EntriesOf(folder / "deep"), 0u) << "an abandoned folder stayed";
  OutputFolder output(path);
  WriteNewFile(output.temporary() / "a", "x");
  output.Commit();
  EXPECT_EQ(ReadWhole(folder / "deep" / "output" / "a"), "x");
  EXPECT_EQ(EntriesOf(folder / "deep"), 1u);
}

TEST(OutputFolder, RefusesWhatExistsUnlessEmpty) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder / "empty");
  OutputFolder output(folder / "empty");
  output.Commit();
  std::filesystem::create_directory(folder / "full");
  WriteNewFile(folder / "full" / "a", "x");
  EXPECT_THROW(OutputFolder(folder / "full"), Error);
  EXPECT_THROW(OutputFolder(folder / "full" / "a"), Error);
  EXPECT_EQ(EntriesOf(folder.path()), 2u);
}

}  // namespace
}  // namespace terrace
