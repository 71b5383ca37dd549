// terrace tokenizer and data as a user runs them.

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <thread>

#include "cli/command_test.h"
#include "core/atomic_file.h"
#include "data/tokenizer_files.h"
#include "support/compressed.h"

namespace terrace {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;
namespace fs = std::filesystem;

class DataCommandTest : public CommandTest {
 protected:
  void Write(const fs::path& name, std::string_view bytes) const {
    std::ofstream(folder_ / name, std::ios::binary) << bytes;
  }
  void WriteBook() const {
    std::string text;
    for (int i = 0; i < 200; ++i) text += fmt::format("The {}th sheep jumped over the fence.\n", i);
    Write("book.txt", text);
  }
  // Every name in the folder with its bytes.
  std::map<std::string, std::string> Contents() const {
    std::map<std::string, std::string> contents;
    for (const auto& entry : fs::recursive_directory_iterator(folder_.path())) {
      contents[entry.path()] = entry.is_regular_file() ? ReadFile(entry.path()) : "";
    }
    return contents;
  }
};

TEST_F(DataCommandTest, FromTextToShards) {
  WriteBook();
  const ProgramResult trained =
      Run({"tokenizer", "train", "--vocab-size", "300", "-o", "tokenizer.json", "book.txt"});
  EXPECT_EQ(trained.exit_code, 0) << trained.errors;

  const std::string bytes("caf\xc3\xa9 \xff\xfe\0 <|endoftext|>\r\n", 25);
  Write("any", bytes);
  EXPECT_EQ(Run({"tokenizer", "encode", "-t", "tokenizer.json", "any", "-o", "ids"}).exit_code, 0);
  EXPECT_EQ(Run({"tokenizer", "decode", "-t", "tokenizer.json", "ids"}).output, bytes);

  const ProgramResult prepared = Run({"data", "prepare", "-t", "tokenizer.json", "-o", "shards",
                                      "--piece-bytes", "256", "book.txt"});
  EXPECT_EQ(prepared.exit_code, 0) << prepared.errors;
  EXPECT_THAT(prepared.output, StartsWith("shards: "));
  EXPECT_THAT(prepared.output, HasSubstr("vocabulary 300"));
  const ProgramResult checked = Run({"data", "check", "shards"});
  EXPECT_EQ(checked.exit_code, 0) << checked.errors;
  EXPECT_THAT(checked.output, HasSubstr("vocabulary 300"));
}

TEST_F(DataCommandTest, MistakesGiveOneLineAndChangeNothing) {
  WriteBook();
  Write("empty.txt", "");
  Write("bad.jsonl", "{\"text\": \"good\"}\n{\"text\": \n");
  Write("ids", "1 2 x3\n");
  Write("large", "1 2 999\n");
  Write("short.bin", "abc");
  fs::create_directory(folder_ / "full");
  Write("full/file", "kept");
  const auto before = Contents();
  const auto tokenizer = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"tokenizer", "train", "-o", "new.json"});
    return ErrorOf(more);
  };
  EXPECT_THAT(tokenizer({"absent.txt"}), HasSubstr("absent.txt"));
  EXPECT_THAT(tokenizer({"empty.txt"}), HasSubstr("empty"));
  EXPECT_THAT(tokenizer({"bad.jsonl"}), HasSubstr("bad.jsonl:2"));
  EXPECT_THAT(tokenizer({"--vocab-size", "10", "book.txt"}), HasSubstr("10"));
  EXPECT_THAT(ErrorOf({"tokenizer", "train", "-o", "ids", "book.txt"}), HasSubstr("ids"));
  EXPECT_THAT(ErrorOf({"tokenizer", "encode", "-t", "absent.json", "book.txt"}),
              HasSubstr("absent.json"));
  EXPECT_THAT(ErrorOf({"tokenizer", "encode", "-t", "bytes", "book.txt", "-o", "ids"}),
              HasSubstr("ids"));
  EXPECT_THAT(ErrorOf({"tokenizer", "decode", "-t", "bytes", "ids"}), HasSubstr("x3"));
  EXPECT_THAT(ErrorOf({"tokenizer", "decode", "-t", "bytes", "large"}), HasSubstr("999"));
  EXPECT_THAT(ErrorOf({"data", "prepare", "-o", "full", "book.txt"}), HasSubstr("full"));
  EXPECT_THAT(ErrorOf({"data", "prepare", "-o", "new", "empty.txt"}), HasSubstr("empty"));
  EXPECT_THAT(ErrorOf({"data", "prepare", "-o", "new", "bad.jsonl"}), HasSubstr("bad.jsonl:2"));
  EXPECT_THAT(ErrorOf({"data", "check", "full"}), HasSubstr("full has no token files"));
  EXPECT_THAT(ErrorOf({"data", "check", "short.bin"}), HasSubstr("short.bin"));
  EXPECT_THAT(ErrorOf({"data", "check", "absent"}), HasSubstr("absent"));
  EXPECT_EQ(Contents(), before);
}

// Where the result cannot go is said before the work, which the missing text stands for.
TEST_F(DataCommandTest, AnOutputThatCannotBeMadeIsNamedFirst) {
  WriteBook();
  const auto before = Contents();
  for (const std::string output : {"none/x.json", "book.txt/x.json", "none/", ""}) {
    const std::string cause = "cannot create " + output + ": ";
    EXPECT_THAT(ErrorOf({"tokenizer", "train", "-o", output, "absent.txt"}), HasSubstr(cause));
    EXPECT_THAT(ErrorOf({"tokenizer", "encode", "-t", "absent.json", "-o", output, "absent"}),
                HasSubstr(cause));
    EXPECT_THAT(ErrorOf({"tokenizer", "decode", "-t", "absent.json", "-o", output, "absent"}),
                HasSubstr(cause));
  }
  EXPECT_THAT(ErrorOf({"plan", "absent.toml", "--chart", "none/x.svg"}),
              HasSubstr("cannot create none/x.svg: No such file"));
  EXPECT_THAT(ErrorOf({"tokenizer", "train", "-o", "book.txt", "absent.txt"}),
              HasSubstr("book.txt exists already"));
  EXPECT_EQ(Contents(), before);
}

// One whose time grows exponentially with the text.
TEST_F(DataCommandTest, ASplittingPatternThatFailsNamesTheFile) {
  TokenizerSpec spec = Tokenizer::Bytes().spec();
  spec.tokens.push_back("ab");  // without merges nothing is split
  spec.merges = {{'a', 'b', 257}};
  spec.patterns = {"(?:a|a)+c|well"};
  Write("slow.json", ToTokenizerJson(Tokenizer(std::move(spec))));
  fs::create_directory(folder_ / "texts");
  Write("texts/1.txt", "well\n");
  Write("texts/2.txt", std::string(60, 'a'));
  EXPECT_THAT(
      ErrorOf({"data", "prepare", "-t", "slow.json", "-o", "new", "--val-fraction", "0", "texts"}),
      HasSubstr("texts/2.txt: in a piece of 60 bytes: the splitting pattern fails at "));
  EXPECT_THAT(ErrorOf({"tokenizer", "encode", "-t", "slow.json", "texts/2.txt"}),
              HasSubstr("texts/2.txt: the splitting pattern fails at byte "));
}

TEST_F(DataCommandTest, PreparingSaysWhatCameOutOtherwise) {
  WriteBook();
  const ProgramResult halved = Run({"data", "prepare", "-o", "halved", "book.txt"});
  EXPECT_EQ(halved.exit_code, 0) << halved.errors;
  EXPECT_THAT(halved.output, HasSubstr("documents were cut into pieces of at most "));
  EXPECT_THAT(halved.output, HasSubstr("not 16384"));
  EXPECT_THAT(halved.output, HasSubstr("% of the text, not the 5.0 % asked for"));
  const ProgramResult as_asked =
      Run({"data", "prepare", "-o", "one", "--val-fraction", "0", "book.txt"});
  EXPECT_EQ(as_asked.exit_code, 0) << as_asked.errors;
  EXPECT_EQ(std::count(as_asked.output.begin(), as_asked.output.end(), '\n'), 3) << as_asked.output;
}

TEST_F(DataCommandTest, CompressedTextIsReadAndOtherFormatsAreNamed) {
  WriteBook();
  fs::create_directory(folder_ / "texts");
  Write("texts/book.txt.gz", Gzip(ReadFile(folder_ / "book.txt")));
  Write("texts/picture.png", "x");
  const ProgramResult plain = Run({"data", "prepare", "-o", "plain", "book.txt"});
  const ProgramResult packed = Run({"data", "prepare", "-o", "packed", "texts"});
  EXPECT_EQ(packed.exit_code, 0) << packed.errors;
  EXPECT_EQ(packed.errors, "1 file of other kinds is left out: .png (1)\n");
  EXPECT_EQ(packed.output.substr(packed.output.find('\n')),
            plain.output.substr(plain.output.find('\n')));
  Write("cut.gz", Gzip(ReadFile(folder_ / "book.txt")).substr(0, 50));
  EXPECT_THAT(ErrorOf({"data", "prepare", "-o", "new", "cut.gz"}), HasSubstr("cut.gz"));
  Write("book.xz", std::string("\xfd\x37zXZ\0\0", 7));
  EXPECT_THAT(ErrorOf({"tokenizer", "train", "-o", "new", "book.xz"}),
              HasSubstr("book.xz is an xz archive"));
  EXPECT_FALSE(fs::exists(folder_ / "new"));
}

TEST_F(DataCommandTest, TooManyThreadsAreRefused) {
  WriteBook();
  const auto before = Contents();
  const std::vector<std::string> environment = {"OMP_NUM_THREADS=100000"};
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"tokenizer", "train", "-o", "new", "book.txt"},
        {"data", "prepare", "-o", "new", "book.txt"}}) {
    EXPECT_THAT(ErrorOf(arguments, environment), HasSubstr("OMP_NUM_THREADS = 100000"));
  }
  EXPECT_EQ(Contents(), before);
}

TEST_F(DataCommandTest, NumbersOutOfRangeAreRefused) {
  WriteBook();
  for (const std::string number :
       {"-1", "0", "99999999999999999999", "1e3", "0x10", "12 ", "9223372036854775808"}) {
    EXPECT_THAT(ErrorOf({"data", "prepare", "-o", "new", "book.txt", "--piece-bytes", number}),
                HasSubstr("--piece-bytes: " + number +
                          " is not a whole number within 1 .. 9223372036854775807"));
    EXPECT_THAT(ErrorOf({"tokenizer", "train", "-o", "new", "book.txt", "--vocab-size", number}),
                HasSubstr("--vocab-size: " + number + " is not"));
  }
  EXPECT_EQ(Run({"data", "prepare", "-o", "new", "book.txt", "--piece-bytes", "0256"}).exit_code, 0)
      << "not octal";
}

TEST_F(DataCommandTest, AUsersTemporaryFilesStay) {
  WriteBook();
  Write("new.json.tmp", "mine");
  ASSERT_EQ(Run({"tokenizer", "train", "-o", "new.json", "book.txt"}).exit_code, 0);
  const auto contents = Contents();
  EXPECT_EQ(contents.size(), 3u);
  EXPECT_EQ(contents.at(folder_ / "new.json.tmp"), "mine");
}

TEST_F(DataCommandTest, ACheckPrintsOnlyWhenAllFilesAreGood) {
  WriteBook();
  ASSERT_EQ(Run({"data", "prepare", "-o", "shards", "--piece-bytes", "256", "book.txt"}).exit_code,
            0);
  std::string bytes = ReadFile(folder_ / "shards/val-00000.bin");
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  Write("shards/val-00000.bin", bytes);
  EXPECT_THAT(ErrorOf({"data", "check", "shards"}), HasSubstr("val-00000.bin"));
}

TEST_F(DataCommandTest, DevicesAndPipesAreWrittenTo) {
  WriteBook();
  EXPECT_EQ(Run({"tokenizer", "encode", "-t", "bytes", "book.txt", "-o", "/dev/null"}).exit_code,
            0);
  EXPECT_EQ(Run({"tokenizer", "train", "book.txt", "-o", "/dev/null"}).exit_code, 0);
  EXPECT_THAT(ErrorOf({"tokenizer", "encode", "-t", "bytes", "book.txt", "-o", "/dev/full"}),
              HasSubstr("cannot write /dev/full"));

  Write("short", "ab");
  const fs::path pipe = folder_ / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  const int reader = open(pipe.c_str(), O_RDONLY | O_NONBLOCK);
  EXPECT_EQ(Run({"tokenizer", "encode", "-t", "bytes", "short", "-o", "pipe"}).exit_code, 0);
  char read_back[16] = {};
  EXPECT_EQ(read(reader, read_back, sizeof(read_back)), 6);
  EXPECT_STREQ(read_back, "97 98\n");
  close(reader);
}

TEST_F(DataCommandTest, FilesWithoutASizeAreRead) {
  const ProgramResult result =
      Run({"tokenizer", "train", "--vocab-size", "260", "-o", "-", "/proc/self/status"});
  EXPECT_EQ(result.exit_code, 0) << result.errors;
}

TEST_F(DataCommandTest, AnInterruptLeavesNothing) {
  const fs::path pipe = folder_ / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  WriteBook();
  const auto before = Contents();
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1}) {
    for (const std::vector<std::string>& arguments :
         {std::vector<std::string>{"tokenizer", "train", "-o", "new", "pipe"},
          {"data", "prepare", "-o", "new", "--piece-bytes", "256", "book.txt", "pipe"}}) {
      ProgramResult result;
      result.exit_code = 0;
      // The signal has to be taken before the pipe ends; where that took longer, again.
      for (int pause_ms = 50; pause_ms < 10'000 && result.exit_code == 0; pause_ms *= 2) {
        fs::remove_all(folder_ / "new");
        Program program(Arguments(arguments), Options());
        std::ofstream writer(pipe);  // waits until the program reads
        writer << "a few words, a few words" << std::flush;
        program.Send(signal);
        std::this_thread::sleep_for(std::chrono::milliseconds(pause_ms));
        writer.close();
        result = program.Wait();
      }
      EXPECT_EQ(result.exit_code, 128 + signal) << result.signal;
      EXPECT_EQ(result.output, "");
      EXPECT_EQ(result.errors, "");
      EXPECT_EQ(Contents(), before);
    }
  }
}

TEST_F(DataCommandTest, AFullDiskLeavesNothing) {
  WriteBook();
  const auto before = Contents();
  Program::Options options = Options();
  options.max_file_bytes = 1000;
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"tokenizer", "train", "-o", "new.json", "book.txt"},
        {"tokenizer", "encode", "-t", "bytes", "book.txt", "-o", "new"},
        {"data", "prepare", "-o", "new", "book.txt"}}) {
    const ProgramResult result = Program(Arguments(arguments), options).Wait();
    EXPECT_EQ(result.exit_code, 1) << arguments[0];
    EXPECT_THAT(result.errors, HasSubstr(" new"));
    EXPECT_EQ(std::count(result.errors.begin(), result.errors.end(), '\n'), 1) << result.errors;
    EXPECT_EQ(Contents(), before);
  }
}

}  // namespace
}  // namespace terrace
