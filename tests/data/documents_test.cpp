#include "data/documents.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "core/error.h"
#include "data/pieces.h"
#include "support/compressed.h"
#include "support/message_of.h"
#include "support/temporary_folder.h"

namespace terrace {
namespace {

using Texts = std::vector<std::string>;

// Pieces of a document joined; none is longer than `piece_bytes`.
Texts DocumentsOf(const CorpusOptions& options, int64_t piece_bytes = 16384) {
  DocumentReader reader(options, FindFiles(options), piece_bytes);
  std::vector<Piece> batch;
  Texts texts;
  bool begins = true;
  while (reader.Next(batch)) {
    for (const Piece& piece : batch) {
      EXPECT_FALSE(piece.text.empty());
      EXPECT_LE(std::ssize(piece.text), piece_bytes);
      if (begins) texts.emplace_back();
      texts.back() += piece.text;
      begins = piece.ends_document;
    }
  }
  EXPECT_TRUE(begins);
  EXPECT_TRUE(batch.empty());
  EXPECT_EQ(reader.done_bytes(), reader.total_bytes());
  return texts;
}

std::string ErrorOf(const CorpusOptions& options) {
  return MessageOf([&] { DocumentsOf(options); });
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

TEST(Documents, CompressedFilesAreReadAsWhatTheyHold) {
  const TemporaryFolder folder;
  const std::string lines = "{\"text\": \"one\"}\n\n{\"text\": \"two\"}\n";
  WriteNewFile(folder / "a.txt.gz", Gzip("a text"));
  WriteNewFile(folder / "b.jsonl.gz", Gzip(lines));
  WriteNewFile(folder / "c.jsonl.zst", Zstandard(lines));
  WriteNewFile(folder / "d.md.zst", Zstandard("d text"));
  WriteNewFile(folder / "e.tar.gz", Gzip("not taken"));
  const Texts expected = {"a text", "one", "two", "one", "two", "d text"};
  EXPECT_EQ(DocumentsOf(Inputs({folder.path()})), expected);
  WriteNewFile(folder / "bad.jsonl.gz", Gzip(lines + "{\n"));
  EXPECT_NE(ErrorOf(Inputs({folder / "bad.jsonl.gz"})).find("bad.jsonl.gz:4: "), std::string::npos);
}

TEST(Documents, LongOnesComeInPieces) {
  const TemporaryFolder folder;
  std::string text;
  for (int64_t i = 0; text.size() < (20u << 20); ++i) text += std::to_string(i * 7919) + "\n";
  // Documents that end where a batch does, within a separator, and far beyond.
  const std::string separator = "<|end|>";
  WriteNewFile(folder / "a.txt", text);
  WriteNewFile(folder / "b.txt", text.substr(0, (8u << 20) - 3) + separator + "x" + separator +
                                     text.substr(0, 9u << 20));
  CorpusOptions options = Inputs({folder / "a.txt", folder / "b.txt"});
  options.separator = separator;
  const Texts expected = {text, text.substr(0, (8u << 20) - 3), "x", text.substr(0, 9u << 20)};
  EXPECT_TRUE(DocumentsOf(options) == expected);
  EXPECT_TRUE(DocumentsOf(options, 30 << 20) == expected) << "pieces longer than a batch";
  // Cut as the whole document would be.
  DocumentReader reader(Inputs({folder / "a.txt"}), {folder / "a.txt"}, 16384);
  std::vector<Piece> batch;
  std::string_view rest = text;
  while (reader.Next(batch)) {
    for (const Piece& piece : batch) {
      ASSERT_EQ(std::ssize(piece.text), FirstPieceBytes(rest, 16384));
      rest.remove_prefix(piece.text.size());
    }
  }
  EXPECT_TRUE(rest.empty());
}

TEST(Documents, ALineMayBeLongerThanABatch) {
  const TemporaryFolder folder;
  const std::string text(10u << 20, 'x');
  WriteNewFile(folder / "a.jsonl",
               "{\"text\": \"first\"}\n{\"text\": \"" + text + "\"}\n{\"text\": \"last\"}");
  EXPECT_TRUE(DocumentsOf(Inputs({folder / "a.jsonl"})) == (Texts{"first", text, "last"}));
}

TEST(Documents, LinksAreFollowedAndNoFolderIsReadTwice) {
  namespace fs = std::filesystem;
  const TemporaryFolder folder;
  for (const char* name : {"store/books", "store/web", "data/own"}) {
    fs::create_directories(folder / name);
    WriteNewFile(folder / name / "a.txt", name);
  }
  fs::create_directory_symlink("../store/books", folder / "data/books");
  fs::create_directory_symlink("../store/web", folder / "data/web");
  fs::create_directory_symlink("../../data", folder / "data/own/up");
  fs::create_directory_symlink("../store/books", folder / "data/x-books");
  fs::create_symlink("../store/web/a.txt", folder / "data/z.txt");
  fs::create_symlink("../store/gone", folder / "data/gone.txt");
  CorpusOptions options = Inputs({folder / "data"});
  Texts notices;
  options.notice = [&](const std::string& text) { notices.push_back(text); };
  EXPECT_EQ(DocumentsOf(options), (Texts{"store/books", "data/own", "store/web", "store/web"}));
  ASSERT_EQ(notices.size(), 2u);
  EXPECT_EQ(notices[0],
            "1 link that leads nowhere is skipped: " + (folder / "data/gone.txt").string());
  EXPECT_EQ(notices[1],
            "2 folders met a second time are read once: " + (folder / "data/own/up").string() +
                ", " + (folder / "data/x-books").string());
}

TEST(Documents, FoldersNamedTwiceAreReadOnce) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder / "deep");
  WriteNewFile(folder / "deep/a.txt", "a");
  EXPECT_EQ(DocumentsOf(Inputs({folder.path(), folder / "deep", folder.path()})), Texts{"a"});
}

TEST(Documents, WhatIsLeftOutIsCountedAndNamed) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder / "deep");
  WriteNewFile(folder / "a.txt", "a");
  for (const char* name : {"a.pdf", "deep/b.pdf", "c.docx", "d.tar.gz", "README", "e.p\nx"}) {
    WriteNewFile(folder / name, "x");
  }
  CorpusOptions options = Inputs({folder.path()});
  Texts notices;
  options.notice = [&](const std::string& text) { notices.push_back(text); };
  FindFiles(options);
  EXPECT_EQ(notices, (Texts{"6 files of other kinds are left out: .pdf (2), \".p\\nx\" (1), "
                            ".docx (1), .tar.gz (1), no ending (1)"}));
  std::filesystem::remove(folder / "a.txt");
  const std::string error = ErrorOf(options);
  EXPECT_NE(error.find("has no files ending in .txt"), std::string::npos) << error;
  EXPECT_NE(error.find(".pdf (2)"), std::string::npos) << error;
}

// What this program has left there itself is no surprise.
TEST(Documents, OwnFilesAreNotCounted) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder / "shards");
  std::filesystem::create_directory(folder / "others");
  WriteNewFile(folder / "a.txt", "a");
  for (const char* name : {"tokenizer.json", "shards/tokenizer.json", "shards/meta.json",
                           "shards/train-00000.bin", "shards/val-00000.bin"}) {
    WriteNewFile(folder / name, "x");
  }
  CorpusOptions options = Inputs({folder.path()});
  Texts notices;
  options.notice = [&](const std::string& text) { notices.push_back(text); };
  FindFiles(options);
  EXPECT_EQ(notices, Texts{});
  // Names like them that are not beside a meta.json.
  WriteNewFile(folder / "others/train-00000.bin", "x");
  WriteNewFile(folder / "shards/more.bin", "x");
  WriteNewFile(folder / "b.json", "x");
  FindFiles(options);
  EXPECT_EQ(notices, Texts{"3 files of other kinds are left out: .bin (2), .json (1)"});
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
