#pragma once
// Copies and sums of rows, for loops that move memory.
#include <cstddef>
#include <cstdint>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

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

#ifdef __SSE2__

// `to` is a multiple of 16. A line is loaded whole before it is stored: stores that
// follow each other fill one write buffer, which then leaves as one line.
inline void stream_bytes(char* to, const char* from, std::size_t bytes) {
  const auto* source = reinterpret_cast<const __m128i*>(from);
  auto* target = reinterpret_cast<__m128i*>(to);
  const std::size_t words = bytes / 16;
  std::size_t at = 0;
  for (; at + 4 <= words; at += 4) {
    const __m128i a = _mm_loadu_si128(source + at), b = _mm_loadu_si128(source + at + 1);
    const __m128i c = _mm_loadu_si128(source + at + 2), d = _mm_loadu_si128(source + at + 3);
    _mm_stream_si128(target + at, a);
    _mm_stream_si128(target + at + 1, b);
    _mm_stream_si128(target + at + 2, c);
    _mm_stream_si128(target + at + 3, d);
  }
  for (; at < words; ++at) _mm_stream_si128(target + at, _mm_loadu_si128(source + at));
  if (bytes % 16 != 0) __builtin_memcpy(to + words * 16, from + words * 16, bytes % 16);
}
inline bool streams(const void* to, std::size_t row_bytes, std::size_t total_bytes) {
  return total_bytes >= kStreamBytes && row_bytes % 16 == 0 &&
         reinterpret_cast<std::uintptr_t>(to) % 16 == 0;
}
inline void end_stream() { _mm_sfence(); }

#else

inline void stream_bytes(char* to, const char* from, std::size_t bytes) {
  __builtin_memcpy(to, from, bytes);
}
inline bool streams(const void*, std::size_t, std::size_t) { return false; }
inline void end_stream() {}

#endif

template <class T>
inline void add_row(T* __restrict to, const T* __restrict from, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) to[i] += from[i];
}

}  // namespace
}  // namespace shoal
