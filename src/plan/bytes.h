// Amounts of memory as people write and read them. GiB is 2^30 bytes, GB is 10^9.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace terrace {

inline constexpr double kMiB = 1 << 20;
inline constexpr double kGiB = 1 << 30;

// "24GiB", "1.5 TiB", "500 MB", "4096B". Throws Error that names what is wrong.
int64_t ParseBytes(std::string_view text);

// "12.64 GiB", "850.0 MiB", "12 bytes"
std::string BytesText(int64_t bytes);

}  // namespace terrace
