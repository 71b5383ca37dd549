#include "data/fingerprint.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <vector>

#include "support/temporary_folder.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;

void WriteShard(const fs::path& path, const std::vector<int32_t>& tokens) {
  fs::create_directories(path.parent_path());
  fs::remove(path);
  ShardWriter writer(path, 300);
  writer.Write(tokens);
  writer.Close();
}

std::vector<int32_t> Tokens(int32_t count) {
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  for (int32_t i = 0; i < count; ++i) tokens[static_cast<size_t>(i)] = i * 7 % 300;
  return tokens;
}

DataSample Sample(const fs::path& folder) { return SampleOf(Dataset(folder, Split::kTrain, 300)); }

TEST(DataFingerprint, IsOfTheContentAndNotOfThePlace) {
  const TemporaryFolder folder;
  WriteShard(folder / "a/train-00000.bin", Tokens(1000));
  WriteShard(folder / "b/my_train_7.bin", Tokens(1000));
  EXPECT_EQ(Sample(folder / "a").fingerprint, Sample(folder / "b").fingerprint);
  EXPECT_EQ(Sample(folder / "a").fingerprint.size, 1000);
  EXPECT_EQ(Sample(folder / "a").largest_id, 299);
}

TEST(DataFingerprint, ChangesWithAnyToken) {
  const TemporaryFolder folder;
  WriteShard(folder / "train-00000.bin", Tokens(100'000));
  const Fingerprint before = Sample(folder.path()).fingerprint;
  for (const size_t place : {0, 1, 5000, 32768, 99'999}) {
    std::vector<int32_t> other = Tokens(100'000);
    other[place] ^= 1;
    WriteShard(folder / "train-00000.bin", other);
    EXPECT_NE(Sample(folder.path()).fingerprint, before) << place;
    // Also where the header says what it said before.
    WriteShard(folder / "train-00000.bin", Tokens(100'000));
    std::fstream file(folder / "train-00000.bin", std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(sizeof(ShardHeader) + 2 * place));
    file.put(static_cast<char>(other[place]));
    file.close();
    EXPECT_NE(Sample(folder.path()).fingerprint, before) << place;
  }
  WriteShard(folder / "train-00000.bin", Tokens(100'001));
  EXPECT_NE(Sample(folder.path()).fingerprint, before);
}

// Beyond what is looked at whole.
TEST(DataFingerprint, ALargeDatasetIsSampledAndItsChecksumsCount) {
  const TemporaryFolder folder;
  std::vector<int32_t> tokens = Tokens(9'000'000);
  WriteShard(folder / "train-00000.bin", tokens);
  const Fingerprint before = Sample(folder.path()).fingerprint;
  EXPECT_EQ(Sample(folder.path()).fingerprint, before);
  for (const size_t place : {size_t{0}, size_t{34'000}, tokens.size() - 1}) {
    tokens[place] ^= 1;
    WriteShard(folder / "train-00000.bin", tokens);
    EXPECT_NE(Sample(folder.path()).fingerprint, before) << place;
    tokens[place] ^= 1;
  }
}

TEST(VocabularyFingerprint, IsOfWhatIdsStandFor) {
  const Tokenizer bytes = Tokenizer::Bytes();
  EXPECT_EQ(FingerprintOf(bytes).size, 257);
  EXPECT_EQ(FingerprintOf(bytes), FingerprintOf(Tokenizer::Bytes()));
  TokenizerSpec spec = bytes.spec();
  spec.tokens.push_back("th");
  spec.merges.push_back({'t', 'h', 257});
  const Tokenizer larger(spec);
  EXPECT_NE(FingerprintOf(larger), FingerprintOf(bytes));
  EXPECT_TRUE(Extends(larger, bytes));
  EXPECT_FALSE(Extends(bytes, larger));
  spec.tokens.back() = "he";
  spec.merges.back() = {'h', 'e', 257};
  EXPECT_NE(FingerprintOf(Tokenizer(spec)), FingerprintOf(larger));
  EXPECT_FALSE(Extends(Tokenizer(spec), larger));
}

}  // namespace
}  // namespace terrace
