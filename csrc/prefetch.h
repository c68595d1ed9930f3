#pragma once
// Asking for rows ahead of their turn.
#include <cstddef>

namespace shoal {
namespace {

// The first kMost bytes of a row, a line every kStep bytes, into the second level: many rows are
// under way at once, and the first level tracks few misses. Forced inline: a function that only
// prefetches counts as free of effects, and GCC drops its calls.
// kLocality 0: a row that is read once shall not push others out of the caches.
template <std::size_t kMost = 512, std::size_t kStep = 64, int kLocality = 2>
__attribute__((always_inline)) inline void prefetch_row(const void* row, std::size_t bytes) {
  const std::size_t limit = bytes < kMost ? bytes : kMost;
  const char* p = static_cast<const char*>(row);
  for (std::size_t at = 0; at < limit; at += kStep) __builtin_prefetch(p + at, 0, kLocality);
}

// The same for a row that is about to be written.
__attribute__((always_inline)) inline void prefetch_write(const char* p, std::size_t bytes) {
  const std::size_t limit = bytes < 512 ? bytes : 512;
  for (std::size_t at = 0; at < limit; at += 64) __builtin_prefetch(p + at, 1, 2);
}

}  // namespace
}  // namespace shoal
