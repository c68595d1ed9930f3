#pragma once
// Copies and sums of rows, for loops that move memory.
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "stream.h"

namespace shoal {
namespace {

// Outputs from here on are written past the cache: they would not stay there, and a cached write
// reads its line first.
constexpr std::size_t kStreamBytes = std::size_t{16} << 20;

template <std::size_t kBytes>
using Bytes = std::integral_constant<std::size_t, kBytes>;

// Calls visit(bytes) with the common row widths as constants, so that a loop inlines its copies.
template <class Visit>
inline auto with_bytes(std::size_t bytes, const Visit& visit) {
  switch (bytes) {
    case 4: return visit(Bytes<4>{});
    case 8: return visit(Bytes<8>{});
    case 16: return visit(Bytes<16>{});
    case 32: return visit(Bytes<32>{});
    case 64: return visit(Bytes<64>{});
    case 128: return visit(Bytes<128>{});
    case 256: return visit(Bytes<256>{});
    default: return visit(bytes);
  }
}

inline void copy_bytes(char* to, const char* from, std::size_t bytes) {
  if (bytes == 0) return;  // there may be no address
  with_bytes(bytes, [=](auto width) { __builtin_memcpy(to, from, width); });
}

inline bool streams(const void* to, std::size_t row_bytes, std::size_t total_bytes) {
  return total_bytes >= kStreamBytes && streamable(to, row_bytes);
}

template <class T>
inline void add_row(T* __restrict to, const T* __restrict from, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) to[i] += from[i];
}

}  // namespace
}  // namespace shoal
