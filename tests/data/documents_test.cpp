#include "data/documents.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "core/error.h"
#include "data/pieces.h"
#include "support/temporary_folder.h"

namespace terrace {
namespace {

using Texts = std::vector<std::string>;

Texts DocumentsOf(const CorpusOptions& options) {
  DocumentReader reader(options);
  std::vector<std::string_view> batch;
  Texts texts;
  while (reader.Next(batch)) texts.insert(texts.end(), batch.begin(), batch.end());
  EXPECT_TRUE(batch.empty());
  EXPECT_EQ(reader.done_bytes(), reader.total_bytes());
  return texts;
}

std::string ErrorOf(const CorpusOptions& options) {
  try {
    DocumentsOf(options);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

CorpusOptions Inputs(std::vector<std::filesystem::path> paths) {
  CorpusOptions options;
  options.inputs = std::move(paths);
  return options;
}

TEST(Documents, EachTextFileIsOne) {
  const TemporaryFolder folder;
  const std::string bytes("\xff\0 x", 4);
  WriteNewFile(folder / "b.txt", "second\n");
  WriteNewFile(folder / "a", bytes);
  WriteNewFile(folder / "empty.txt", "");
  EXPECT_EQ(DocumentsOf(Inputs({folder / "b.txt", folder / "empty.txt", folder / "a"})),
            (Texts{"second\n", bytes}));
}

TEST(Documents, SeparatorsDivideFiles) {
  const TemporaryFolder folder;
  WriteNewFile(folder / "a.txt", "one<|endoftext|>two<|endoftext|><|endoftext|>three");
  WriteNewFile(folder / "b.txt", "<|endoftext|>four<|endoftext|>");
  CorpusOptions options = Inputs({folder.path()});
  options.separator = "<|endoftext|>";
  EXPECT_EQ(DocumentsOf(options), (Texts{"one", "two", "three", "four"}));
}

TEST(Documents, FoldersAreSearchedInOrder) {
  const TemporaryFolder folder;
  std::filesystem::create_directories(folder / "b" / "deep");
  WriteNewFile(folder / "c.txt", "c");
  WriteNewFile(folder / "a.md", "a");
  WriteNewFile(folder / "b" / "deep" / "x.rst", "bx");
  WriteNewFile(folder / "b" / "a.jsonl", "{\"text\": \"ba\"}\n");
  WriteNewFile(folder / "b" / "no.png", "png");
  CorpusOptions options = Inputs({folder.path()});
  EXPECT_EQ(DocumentsOf(options), (Texts{"a", "ba", "bx", "c"}));
  options.extensions = {".png"};
  EXPECT_EQ(DocumentsOf(options), (Texts{"png"}));
  options.extensions = {".rst.txt"};
  EXPECT_NE(ErrorOf(options).find(".rst.txt"), std::string::npos);
}

TEST(Documents, JsonLinesHoldThemInAField) {
  const TemporaryFolder folder;
  WriteNewFile(folder / "a.jsonl",
               "{\"text\": \"one\\n\", \"body\": \"1\"}\n\n  \r\n"
               "{\"body\": \"2\", \"text\": \"\"}\r\n{\"text\": \"\\u6c34\", \"body\": \"3\"}");
  CorpusOptions options = Inputs({folder / "a.jsonl"});
  EXPECT_EQ(DocumentsOf(options), (Texts{"one\n", "\u6c34"}));
  options.field = "body";
  EXPECT_EQ(DocumentsOf(options), (Texts{"1", "2", "3"}));
}

TEST(Documents, JsonLinesNameTheLineInError) {
  const TemporaryFolder folder;
  const struct {
    const char* line;
    const char* error;
  } kCases[] = {{"{\"text\": \"x\"", "not valid JSON: byte 13 of the line: "},
                {"[1]", "not a JSON object"},
                {"{\"txt\": \"x\"}", "has no field \"text\""},
                {"{\"text\": 3}", "is not a string"},
                {"{\"text\": \"\xff\"}",
                 "not valid JSON: byte 11 of the line: syntax error while parsing value - invalid "
                 "string: ill-formed UTF-8 byte"},
                {"{\"text\": \"\\ud800\"}", "surrogate U+D800..U+DBFF must be followed by"},
                {"{\"text\": \"\", \"n\": 1e999999}",
                 "not valid JSON: byte 26 of the line: number overflow"}};
  for (const auto& entry : kCases) {
    const std::filesystem::path path = folder / "bad.jsonl";
    std::filesystem::remove(path);
    WriteNewFile(path, std::string("{\"text\": \"good\"}\n\n") + entry.line + "\n");
    const std::string error = ErrorOf(Inputs({path}));
    EXPECT_NE(error.find("bad.jsonl:3: "), std::string::npos) << error;
    EXPECT_NE(error.find(entry.error), std::string::npos) << error;
    EXPECT_EQ(error.find('\xff'), std::string::npos) << error;
  }
}

TEST(Documents, LargeFilesComeInBatches) {
  const TemporaryFolder folder;
  std::string lines;
  Texts expected;
  const std::string filler(100'000, 'x');
  for (int i = 0; lines.size() < (40u << 20); ++i) {
    expected.push_back(std::to_string(i) + filler);
    lines += "{\"text\": \"" + expected.back() + "\"}\n";
  }
  WriteNewFile(folder / "large.jsonl", lines);
  WriteNewFile(folder / "small.txt", "end");
  expected.push_back("end");
  EXPECT_TRUE(DocumentsOf(Inputs({folder / "large.jsonl", folder / "small.txt"})) == expected);
}

TEST(Documents, MissingInputsAreNamed) {
  const TemporaryFolder folder;
  EXPECT_NE(ErrorOf(Inputs({folder / "none.txt"})).find("none.txt"), std::string::npos);
  EXPECT_NE(ErrorOf(Inputs({})), "");
  EXPECT_NE(ErrorOf(Inputs({folder.path()})).find("has no files"), std::string::npos);
}

TEST(Pieces, EndAtTheBestPlace) {
  EXPECT_EQ(FirstPieceBytes("", 8), 0);
  EXPECT_EQ(FirstPieceBytes("12345678", 8), 8);
  EXPECT_EQ(FirstPieceBytes("123456789", 8), 8);
  EXPECT_EQ(FirstPieceBytes("1234\n\n7\n9", 8), 6);
  EXPECT_EQ(FirstPieceBytes("12345\n789", 8), 6);
  EXPECT_EQ(FirstPieceBytes("1\n3456789", 8), 8) << "not in the second half";
  EXPECT_EQ(FirstPieceBytes("1234567\u6c34", 8), 7);
  EXPECT_EQ(FirstPieceBytes("12345\U0001f600", 8), 5);
  EXPECT_EQ(FirstPieceBytes("1234\x80\x80\x80\x80\x80\x80", 8), 5)
      << "not UTF-8: any place will do";
}

}  // namespace
}  // namespace terrace
