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

inline void copy_bytes(char* to, const char* from, std::size_t bytes) {
  switch (bytes) {
    case 0: return;  // there may be no address
    case 4: __builtin_memcpy(to, from, 4); break;
    case 8: __builtin_memcpy(to, from, 8); break;
    case 16: __builtin_memcpy(to, from, 16); break;
    case 32: __builtin_memcpy(to, from, 32); break;
    case 64: __builtin_memcpy(to, from, 64); break;
    case 128: __builtin_memcpy(to, from, 128); break;
    case 256: __builtin_memcpy(to, from, 256); break;
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
