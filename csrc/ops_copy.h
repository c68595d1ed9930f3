#pragma once
// Copies and sums of rows, for loops that move memory.
#include <cstddef>
#include <cstdint>

#include "stream.h"

namespace shoal {
namespace {

// Outputs from here on are written past the cache: they would not stay there, and a cached write
// reads its line first.
constexpr std::size_t kStreamBytes = std::size_t{16} << 20;

template <std::size_t kBytes>
inline void copy_fixed(char* to, const char* from) {
  __builtin_memcpy(to, from, kBytes);
}

inline void copy_bytes(char* to, const char* from, std::size_t bytes) {
  switch (bytes) {
    case 0: return;  // there may be no address
    case 4: return copy_fixed<4>(to, from);
    case 8: return copy_fixed<8>(to, from);
    case 16: return copy_fixed<16>(to, from);
    case 32: return copy_fixed<32>(to, from);
    case 64: return copy_fixed<64>(to, from);
    case 128: return copy_fixed<128>(to, from);
    case 256: return copy_fixed<256>(to, from);
    default: __builtin_memcpy(to, from, bytes);
  }
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
