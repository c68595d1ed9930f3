#pragma once
// What the layout's forward and backward passes share: rows by id, and short runs of floats.
#include <algorithm>
#include <cstddef>
#include <cstring>

#include "lanes.h"
#include "ops_layout.h"
#include "prefetch.h"

namespace shoal {
namespace {

// Slices are a few floats wide: wider lanes would cost more branches than they save copies.
template <class T>
inline void copy_floats(T* to, const T* from, std::int64_t n) {
  const bool one = as_one<T>(n, [=]<int k>() {
    Lanes<T, k> x;
    x.load_row(from, n);
    x.store_row(to, n);
  });
  if (!one) copy_columns<16>(to, from, n);
}

template <class T>
inline void zero_floats(T* to, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) to[i] = T(0);
}

template <class T>
inline void add_floats(T* to, const T* from, std::int64_t n) {
  over_columns<T, 16>(0, n, false, [=]<int k>(std::int64_t c) {
    Lanes<T, k> sum, x;
    sum.load(to + c);
    x.load(from + c);
    sum.add(x);
    sum.store(to + c);
  });
}

template <class T>
inline void add_scaled(T* to, const T* from, T factor, std::int64_t n) {
  over_columns<T, 16>(0, n, false, [=]<int k>(std::int64_t c) {
    Lanes<T, k> sum, x;
    sum.load(to + c);
    x.load(from + c);
    x.multiply(factor);
    sum.add(x);
    sum.store(to + c);
  });
}

// Adds `count` runs of n floats, `stride` apart, to `to`; sums stay in registers.
template <class T>
inline void add_strided(T* to, const T* from, std::int64_t stride, std::int64_t count,
                        std::int64_t n) {
  over_columns<T>(0, n, false, [=]<int k>(std::int64_t c) {
    Lanes<T, k> sum, x;
    sum.load(to + c);
    for (std::int64_t i = 0; i < count; ++i) {
      x.load(from + i * stride + c);
      sum.add(x);
    }
    sum.store(to + c);
  });
}

// Columns [start, end) of the sum of count >= 1 rows, to the same columns of out: every row times
// `by`, or the sum over it.
template <bool kEachRow, class T>
inline void pool_rows(const T* const* rows, std::int64_t count, std::int64_t start,
                      std::int64_t end, T by, T* out) {
  constexpr std::int64_t kWidth = 16 / sizeof(T), kMost = 8 * kWidth;
  const auto pool = [=]<int n>(std::int64_t at, std::int64_t width) {
    Lanes<T, n> sum, x;
    sum.load_row(rows[0] + at, width);
    if constexpr (kEachRow) sum.multiply(by);
    for (std::int64_t j = 1; j < count; ++j) {
      x.load_row(rows[j] + at, width);
      if constexpr (kEachRow) x.multiply(by);
      sum.add(x);
    }
    if constexpr (!kEachRow) sum.divide(by);
    sum.store_row(out + at, width);
  };
  if (end - start < kWidth) {
    for (std::int64_t i = start; i < end; ++i) pool.template operator()<1>(i, 1);
    return;
  }
  for (std::int64_t next = start; next < end; next += kMost) {
    const std::int64_t at = std::min(next, end - kWidth), width = std::min(end - at, kMost);
    as_one<T>(width, [=]<int n>() { pool.template operator()<n>(at, width); });
  }
}

// The row of an id, or nullptr when its buffer or its place is out of range.
template <class T>
struct RowFinder {
  const std::int64_t* places;
  const std::int32_t* numbers;
  const void* const* data;
  const std::int64_t* floats;
  std::uint32_t buffers;

  RowFinder(const LayoutIndexView& index, const LayoutBuffers& all)
      : places(index.rows),
        numbers(index.buffers),
        data(all.data.data()),
        floats(all.floats.data()),
        buffers(static_cast<std::uint32_t>(all.data.size())) {}

  T* find(std::int64_t id, std::int64_t width) const {
    const auto number = static_cast<std::uint32_t>(numbers[id]);
    if (number >= buffers) return nullptr;
    const std::int64_t place = places[id];
    if (place < 0 || place > floats[number] - width) return nullptr;
    return static_cast<T*>(const_cast<void*>(data[number])) + place;
  }
};

// Every other line: the hardware fetches their neighbours, and rows that follow each other by itself.
__attribute__((always_inline)) inline void prefetch_lines(const void* from, std::int64_t bytes) {
  prefetch_row<512, 128>(from, static_cast<std::size_t>(bytes));
}

}  // namespace
}  // namespace shoal
