#pragma once
// Stores past the caches, for outputs that would not stay there: a cached store reads its line
// first. What is compiled once for each instruction set includes this too: no name leaves the file.
#include <cstddef>
#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace shoal {
namespace {

#if defined(__AVX2__)
constexpr std::size_t kStreamVector = 32;
inline __m256i stream_load(const char* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
inline void stream_store(char* to, __m256i vector) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), vector);
}
inline __m256i stream_zero() { return _mm256_setzero_si256(); }
#elif defined(__SSE2__)
constexpr std::size_t kStreamVector = 16;
inline __m128i stream_load(const char* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}
inline void stream_store(char* to, __m128i vector) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), vector);
}
inline __m128i stream_zero() { return _mm_setzero_si128(); }
#else
constexpr std::size_t kStreamVector = 0;  // there are none
#endif

// Whether rows `stride` bytes apart may be streamed to: each begins at a whole vector.
inline bool streamable([[maybe_unused]] const void* to, [[maybe_unused]] std::size_t stride) {
  if constexpr (kStreamVector == 0) {
    return false;
  } else {
    return (reinterpret_cast<std::uintptr_t>(to) | stride) % kStreamVector == 0;
  }
}

// `to` is streamable. A line is loaded whole before it is stored: stores that follow each other
// fill one write buffer, which then leaves as one line. Width: a size, maybe a constant.
template <class Width>
inline void stream_bytes(char* to, const char* from, Width width) {
  const std::size_t bytes = width;
  std::size_t at = 0;
#if defined(__AVX2__) || defined(__SSE2__)
  constexpr std::size_t v = kStreamVector;
  for (; at + 64 <= bytes; at += 64) {
    const auto a = stream_load(from + at), b = stream_load(from + at + v);
    if constexpr (v == 32) {
      stream_store(to + at, a);
      stream_store(to + at + v, b);
    } else {
      const auto c = stream_load(from + at + 2 * v), d = stream_load(from + at + 3 * v);
      stream_store(to + at, a);
      stream_store(to + at + v, b);
      stream_store(to + at + 2 * v, c);
      stream_store(to + at + 3 * v, d);
    }
  }
  for (; at + v <= bytes; at += v) stream_store(to + at, stream_load(from + at));
#endif
  if (at < bytes) __builtin_memcpy(to + at, from + at, bytes - at);
}

inline void stream_zeros(char* to, std::size_t bytes) {
  std::size_t at = 0;
#if defined(__AVX2__) || defined(__SSE2__)
  for (; at + kStreamVector <= bytes; at += kStreamVector) stream_store(to + at, stream_zero());
#endif
  if (at < bytes) __builtin_memset(to + at, 0, bytes - at);
}

// Streamed stores are not ordered with others: before another thread may read them.
inline void end_stream() {
#if defined(__AVX2__) || defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace
}  // namespace shoal
