#include "examples.h"

#include <algorithm>

namespace shoal {
namespace {

constexpr std::int64_t kAhead = 16;
constexpr std::int64_t kLine = 8;  // ids of a cache line

// Columns of `width` single ids, row by row, into one feature after the other: a line of each at a
// time, since single cells that lie a power of two apart push each other out of the caches.
void take_columns(const std::int64_t* from, std::int64_t width, const std::int64_t* rows,
                  std::int64_t n, std::int64_t* to) {
  for (std::int64_t begin = 0; begin < n; begin += kLine) {
    const std::int64_t end = std::min(n, begin + kLine);
    for (std::int64_t i = begin + kAhead; i < std::min(n, end + kAhead); ++i) {
      __builtin_prefetch(from + rows[i] * width);
    }
    for (std::int64_t f = 0; f < width; ++f) {
      for (std::int64_t i = begin; i < end; ++i) to[f * n + i] = from[rows[i] * width + f];
    }
  }
}

template <class T>
void take_lists(const T* from, const std::int64_t* starts, const std::int64_t* rows, std::int64_t n,
                const std::int64_t* offsets, T* to) {
  for (std::int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) __builtin_prefetch(from + starts[rows[i + kAhead]]);
    std::copy_n(from + starts[rows[i]], offsets[i + 1] - offsets[i], to + offsets[i]);
  }
}

}  // namespace

std::int64_t example_offsets(const ExampleIds* parts, std::int64_t count,
                             const std::int64_t* rows, std::int64_t n, std::int64_t* offsets) {
  std::int64_t total = 0;
  *offsets++ = 0;
  for (const ExampleIds* part = parts; part < parts + count; ++part) {
    if (part->offsets == nullptr) {
      for (std::int64_t i = 0; i < part->width * n; ++i) *offsets++ = ++total;
      continue;
    }
    for (std::int64_t i = 0; i < n; ++i) {
      if (i + kAhead < n) __builtin_prefetch(part->offsets + rows[i + kAhead]);
      const std::int64_t start = part->offsets[rows[i]], end = part->offsets[rows[i] + 1];
      if (start < 0 || end < start || end > part->count) return -1 - i;
      total += end - start;
      *offsets++ = total;
    }
  }
  return total;
}

void example_ids(const ExampleIds* parts, std::int64_t count, const std::int64_t* rows,
                 std::int64_t n, const std::int64_t* offsets, std::int64_t* values,
                 float* weights) {
  for (const ExampleIds* part = parts; part < parts + count; ++part) {
    if (part->offsets == nullptr) {
      take_columns(part->values, part->width, rows, n, values + *offsets);
    } else {
      take_lists(part->values, part->offsets, rows, n, offsets, values);
    }
    const std::int64_t* end = offsets + part->width * n;
    if (weights != nullptr && part->weights != nullptr) {
      take_lists(part->weights, part->offsets, rows, n, offsets, weights);
    } else if (weights != nullptr) {
      std::fill(weights + *offsets, weights + *end, 1.0F);
    }
    offsets = end;
  }
}

}  // namespace shoal
