#include "train/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <functional>

#include "core/arena.h"
#include "core/atomic_file.h"
#include "core/rng.h"
#include "support/file_size_limit.h"
#include "support/message_of.h"
#include "support/temporary_folder.h"

namespace terrace {
namespace {

using ::testing::HasSubstr;

void Put(const std::filesystem::path& path, std::string_view content) {
  std::ofstream(path, std::ios::binary) << content;
}

// A file from a header's text and bytes of data, without any of the writer's checks.
std::string FileOf(std::string_view header, size_t data_bytes) {
  const uint64_t length = header.size();
  std::string file(reinterpret_cast<const char*>(&length), 8);
  file.append(header);
  file.append(data_bytes, '\0');
  return file;
}

class SafetensorsTest : public ::testing::Test {
 protected:
  TensorView Make(const char* name, DType dtype, Shape shape) {
    TensorView view = arena_.Allocate(Memory::kWeights, dtype, shape, name);
    for (int64_t i = 0; i < view.bytes(); ++i) {
      view.data[i] = static_cast<std::byte>(RandomBits(7, static_cast<uint64_t>(i)));
    }
    return view;
  }
  // Opens `content` as a file and looks every tensor up.
  std::string OpeningGives(std::string_view content) {
    const auto path = folder_ / "case.safetensors";
    Put(path, content);
    return MessageOf([&] {
      const SafetensorsReader reader(path);
      for (const std::string& name : reader.names()) {
        // Touch the first and last byte: a wild view would crash here.
        const TensorView view = reader.Find(name);
        if (view.bytes() > 0) {
          sum_ = static_cast<int>(view.data[0]) + static_cast<int>(view.data[view.bytes() - 1]);
        }
      }
    });
  }

  TemporaryFolder folder_;
  Arena arena_{16 << 20};
  volatile int sum_ = 0;
};

TEST_F(SafetensorsTest, RoundTripKeepsEveryTypeShapeAndByte) {
  const std::vector<TensorView> tensors = {
      Make("odd", DType::kBF16, {3, 5}), Make("weights", DType::kF32, {2, 3, 4, 5}),
      Make("counts", DType::kI64, {7}),  Make("ids", DType::kI32, {1, 9}),
      Make("none", DType::kF32, {0, 4}), Make("large", DType::kBF16, {3, 1 << 20}),
  };
  const auto path = folder_ / "a.safetensors";
  WriteSafetensors(path, tensors, {{"format", "pt"}});
  const SafetensorsReader reader(path);
  EXPECT_EQ(reader.names().size(), tensors.size());
  EXPECT_EQ(reader.metadata().at("format"), "pt");
  for (const TensorView& tensor : tensors) {
    const TensorView found = reader.Find(tensor.name);
    EXPECT_EQ(found.dtype, tensor.dtype);
    EXPECT_EQ(found.shape, tensor.shape);
    EXPECT_EQ(std::memcmp(found.data, tensor.data, static_cast<size_t>(tensor.bytes())), 0);

    const TensorView copy =
        arena_.Allocate(Memory::kWeights, tensor.dtype, tensor.shape, tensor.name);
    reader.Read(tensor.name, copy);
    EXPECT_EQ(std::memcmp(copy.data, tensor.data, static_cast<size_t>(tensor.bytes())), 0);
  }
  EXPECT_FALSE(std::filesystem::exists(folder_ / "a.safetensors.tmp"));
  EXPECT_THAT(MessageOf([&] { reader.Find("absent"); }), HasSubstr("has no tensor absent"));
}

TEST_F(SafetensorsTest, ReadRefusesAnotherShapeOrType) {
  const auto path = folder_ / "a.safetensors";
  WriteSafetensors(path, {Make("w", DType::kF32, {2, 6})}, {});
  const SafetensorsReader reader(path);
  EXPECT_THAT(MessageOf([&] {
                reader.Read("w", Make("x", DType::kF32, {6, 2}));
              }),
              HasSubstr("tensor w is f32 [2, 6], f32 [6, 2] is needed"));
  EXPECT_THAT(MessageOf([&] {
                reader.Read("w", Make("x", DType::kI32, {2, 6}));
              }),
              HasSubstr("i32 [2, 6] is needed"));
}

TEST_F(SafetensorsTest, EveryDamagedByteOfATensorIsNoticed) {
  const auto path = folder_ / "a.safetensors";
  const TensorView tensor = Make("w", DType::kBF16, {17, 3});
  WriteSafetensors(path, {tensor}, {});
  const std::string good = ReadFile(path);
  const TensorView copy = Make("copy", DType::kBF16, {17, 3});
  for (size_t i = good.size() - static_cast<size_t>(tensor.bytes()); i < good.size(); ++i) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ (1 << (i % 8)));
    Put(path, bad);
    const SafetensorsReader reader(path);
    EXPECT_THAT(MessageOf([&] { reader.Read("w", copy); }), HasSubstr("tensor w is damaged"));
  }
}

TEST_F(SafetensorsTest, EveryTruncationIsRefused) {
  const auto path = folder_ / "a.safetensors";
  WriteSafetensors(path, {Make("a", DType::kF32, {5}), Make("b", DType::kBF16, {3})}, {});
  const std::string good = ReadFile(path);
  ASSERT_EQ(OpeningGives(good), "");
  for (size_t size = 0; size < good.size(); ++size) {
    EXPECT_THAT(OpeningGives(good.substr(0, size)), HasSubstr("case.safetensors: "));
  }
  EXPECT_THAT(OpeningGives(good + "x"), HasSubstr("the file holds"));
}

TEST_F(SafetensorsTest, NoFlippedHeaderByteLeadsToAWildRead) {
  const auto path = folder_ / "a.safetensors";
  WriteSafetensors(path, {Make("a", DType::kF32, {5}), Make("b", DType::kBF16, {3, 2})}, {});
  const std::string good = ReadFile(path);
  const size_t header_end = good.size() - 20 - 12;
  int refused = 0;
  for (size_t i = 0; i < header_end; ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string bad = good;
      bad[i] = static_cast<char>(bad[i] ^ (1 << bit));
      refused += OpeningGives(bad).empty() ? 0 : 1;
    }
  }
  EXPECT_GT(refused, static_cast<int>(header_end) * 2);
}

TEST_F(SafetensorsTest, HostileHeadersAreRefused) {
  struct Case {
    std::string_view header;
    size_t data_bytes;
    std::string_view message;
  };
  const Case kCases[] = {
      {R"([])", 0, "not a JSON object"},
      {R"({"a":)", 0, "not valid JSON"},
      {R"({"a":1})", 0, "tensor a: dtype, shape or data_offsets"},
      {R"({"a":{"dtype":"F32","shape":[1]}})", 4, "tensor a: dtype, shape or data_offsets"},
      {R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", 4, "a dimension is not"},
      {R"({"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}})", 4, "a dimension is not"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}})", 4, "an offset is not"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", 4, "bytes 4 .. 0 lie outside"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 4, "bytes 0 .. 8 lie outside"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4, "do not hold 2 elements"},
      {R"({"a":{"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,4]}})", 4,
       "a dimension is not"},
      {R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0,
       "overflows"},
      {R"({"a":{"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0]}})", 0,
       "do not hold"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,18446744073709551615]}})", 4,
       "an offset is not"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
       R"("b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
       8, "tensor b: begins at byte 4, the tensors before it end at 8"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", 8,
       "tensor a: begins at byte 4"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 8, "take 4 bytes"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
       R"("a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
       4, "\"a\" twice"},
      {R"({"a":{"dtype":"F32","dtype":"I32","shape":[1],"data_offsets":[0,4]}})", 4,
       "\"dtype\" twice"},
      {R"({"__metadata__":{"x":1}})", 0, "x is not a string"},
      {R"({"__metadata__":[]})", 0, "__metadata__ is not an object"},
      {R"({"a":{"dtype":"F16","shape":[2],"data_offsets":[0,4]}})", 4, "type F16 is not supported"},
      {R"({"a":{"dtype":"F99","shape":[2],"data_offsets":[0,4]}})", 4, "type F99 is not supported"},
      {R"({"a":{"dtype":"F32","shape":[1,1,1,1,1],"data_offsets":[0,4]}})", 4, "5 dimensions"},
      {R"({"a":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]},)"
       R"("b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}})",
       6, "not aligned"},
  };
  for (const Case& c : kCases) {
    EXPECT_THAT(OpeningGives(FileOf(c.header, c.data_bytes)), HasSubstr(c.message)) << c.header;
  }
  std::string huge = FileOf("{}", 0);
  std::memset(huge.data(), 0xff, 8);
  EXPECT_THAT(OpeningGives(huge), HasSubstr("the header would have 18446744073709551615 bytes"));
  EXPECT_THAT(OpeningGives(std::string(100'000, '[')), HasSubstr("the header"));
  EXPECT_THAT(OpeningGives(FileOf(std::string(100'000, '['), 0)), HasSubstr("not valid JSON"));
}

TEST_F(SafetensorsTest, MissingFilesAndFoldersAreNamed) {
  EXPECT_THAT(MessageOf([&] { SafetensorsReader(folder_ / "no.safetensors"); }),
              HasSubstr("no.safetensors: cannot read: No such file"));
  EXPECT_THAT(MessageOf([&] { SafetensorsReader(folder_.path()); }), HasSubstr("not a file"));
}

// A mapping would end the process by SIGBUS.
TEST_F(SafetensorsTest, AFileThatIsCutWhileItIsReadIsAnError) {
  const auto path = folder_ / "a.safetensors";
  const TensorView tensor = Make("weights", DType::kF32, {1 << 16});
  WriteSafetensors(path, {tensor}, {});
  const SafetensorsReader reader(path);
  std::filesystem::resize_file(path, 100'000);

  EXPECT_THAT(MessageOf([&] { reader.Read("weights", tensor); }),
              HasSubstr("a.safetensors: tensor weights: was truncated while it was read"));
}

TEST_F(SafetensorsTest, AFailedWriteLeavesNothingAndKeepsTheOldFile) {
  const auto path = folder_ / "a.safetensors";
  WriteSafetensors(path, {Make("a", DType::kF32, {5})}, {});
  const std::string before = ReadFile(path);

  const TensorView large = Make("large", DType::kF32, {1 << 20});
  const std::string message = MessageOf([&] {
    const FileSizeLimit limit(1 << 20);
    WriteSafetensors(path, {large}, {});
  });

  EXPECT_THAT(message, HasSubstr("a.safetensors: cannot write: File too large"));
  EXPECT_EQ(ReadFile(path), before);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "a.safetensors.tmp"));
  EXPECT_THAT(MessageOf([&] { WriteSafetensors(folder_ / "no" / "b.safetensors", {large}, {}); }),
              HasSubstr("b.safetensors: cannot write: No such file or directory"));
}

}  // namespace
}  // namespace terrace
