// Text files line by line, however long they are.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <istream>
#include <string>

namespace terrace {

// Holds one line at a time. Ends before a last line that is not ended, which a kill may have cut.
class LineReader {
 public:
  static constexpr size_t kLongestLine = size_t{1} << 24;  // bytes

  explicit LineReader(std::istream& in) : in_(in) {}

  // The next line, without its end. False at the end, and where a line is longer than kLongestLine.
  bool Next() {
    line_.clear();
    while (line_.size() < kLongestLine) {
      in_.getline(buffer_.data(), static_cast<std::streamsize>(buffer_.size()));
      const auto count = static_cast<size_t>(in_.gcount());
      if (in_.eof() || in_.bad()) return false;
      if (!in_.fail()) {
        line_.append(buffer_.data(), count - 1);
        ++number_;
        bytes_ += line_.size() + 1;
        return true;
      }
      if (count == 0) return false;
      line_.append(buffer_.data(), count);  // it goes on
      in_.clear();
    }
    return false;
  }

  const std::string& line() const { return line_; }
  int64_t number() const { return number_; }  // from 1
  uint64_t bytes() const { return bytes_; }   // up to the end of the line

 private:
  std::istream& in_;
  std::array<char, 1 << 16> buffer_;
  std::string line_;
  int64_t number_ = 0;
  uint64_t bytes_ = 0;
};

}  // namespace terrace
