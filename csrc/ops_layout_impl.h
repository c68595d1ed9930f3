#pragma once
// What the layout's forward and backward passes share: rows by id, and short runs of floats.
#include <cstddef>
#include <cstring>

#include "ops_layout.h"
#include "prefetch.h"

namespace shoal {
namespace {

// Sixteen bytes at any address. Slices are a few floats wide: calls and loop prologues would cost
// more than the copy. Where a run is no multiple of it, its last vector overlaps the one before.
template <class T>
struct Lanes {
  typedef T Type __attribute__((vector_size(16)));
  static constexpr std::int64_t kCount = 16 / sizeof(T);

  static Type load(const T* from) {
    Type value;
    __builtin_memcpy(&value, from, 16);
    return value;
  }
  static void store(T* to, Type value) { __builtin_memcpy(to, &value, 16); }
};

// kRun vectors, the last of which ends at n.
template <class T, int kRun>
inline void copy_run(T* to, const T* from, std::int64_t n) {
  using V = Lanes<T>;
  const std::int64_t last = n - V::kCount;
  for (int k = 0; k + 1 < kRun; ++k) V::store(to + k * V::kCount, V::load(from + k * V::kCount));
  V::store(to + last, V::load(from + last));
}

template <class T>
inline void copy_floats(T* to, const T* from, std::int64_t n) {
  using V = Lanes<T>;
  switch ((n + V::kCount - 1) / V::kCount) {
    case 2: return copy_run<T, 2>(to, from, n);
    case 3: return copy_run<T, 3>(to, from, n);
    case 4: return copy_run<T, 4>(to, from, n);
    case 5: return copy_run<T, 5>(to, from, n);
    case 6: return copy_run<T, 6>(to, from, n);
    case 8: return copy_run<T, 8>(to, from, n);
    default: break;
  }
  if (n < V::kCount) {
    for (std::int64_t i = 0; i < n; ++i) to[i] = from[i];
    return;
  }
  for (std::int64_t i = 0; i + V::kCount <= n; i += V::kCount) V::store(to + i, V::load(from + i));
  V::store(to + n - V::kCount, V::load(from + n - V::kCount));
}

template <class T>
inline void zero_floats(T* to, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) to[i] = T(0);
}

template <class T>
inline void add_floats(T* to, const T* from, std::int64_t n) {
  using V = Lanes<T>;
  std::int64_t i = 0;
  for (; i + V::kCount <= n; i += V::kCount) {
    V::store(to + i, V::load(to + i) + V::load(from + i));
  }
  for (; i < n; ++i) to[i] += from[i];
}

template <class T>
inline void add_scaled(T* to, const T* from, T factor, std::int64_t n) {
  using V = Lanes<T>;
  std::int64_t i = 0;
  for (; i + V::kCount <= n; i += V::kCount) {
    V::store(to + i, V::load(to + i) + V::load(from + i) * factor);
  }
  for (; i < n; ++i) to[i] += from[i] * factor;
}

// Adds `count` runs of n floats, `stride` apart, to `to`; sums stay in registers.
template <class T, int kRun>
inline void add_runs(T* to, const T* from, std::int64_t stride, std::int64_t count) {
  using V = Lanes<T>;
  typename V::Type sums[kRun];
  for (int k = 0; k < kRun; ++k) sums[k] = V::load(to + k * V::kCount);
  for (std::int64_t i = 0; i < count; ++i, from += stride) {
    for (int k = 0; k < kRun; ++k) sums[k] += V::load(from + k * V::kCount);
  }
  for (int k = 0; k < kRun; ++k) V::store(to + k * V::kCount, sums[k]);
}

template <class T>
inline void add_strided(T* to, const T* from, std::int64_t stride, std::int64_t count,
                        std::int64_t n) {
  using V = Lanes<T>;
  std::int64_t i = 0;
  for (; i + 4 * V::kCount <= n; i += 4 * V::kCount) {
    add_runs<T, 4>(to + i, from + i, stride, count);
  }
  for (; i + V::kCount <= n; i += V::kCount) add_runs<T, 1>(to + i, from + i, stride, count);
  for (; i < n; ++i) {
    T sum = to[i];
    for (std::int64_t k = 0; k < count; ++k) sum += from[k * stride + i];
    to[i] = sum;
  }
}

constexpr std::int64_t kMostVectors = 8;

// Mean of rows: their sum over a number, or every row times a factor first.
template <class T>
struct Divided {
  T divisor;
  template <class X>
  X row(X x) const { return x; }
  template <class X>
  X sum(X x) const { return divisor == T(1) ? x : x / divisor; }
};
template <class T>
struct Shared {
  T factor;
  template <class X>
  X row(X x) const { return x * factor; }
  template <class X>
  X sum(X x) const { return x; }
};

// kRun vectors of columns of all rows, summed in registers; the last one ends at column `end`.
template <class T, int kRun, class Scale>
inline void pool_run(const T* const* rows, std::int64_t count, std::int64_t column,
                     std::int64_t end, Scale scale, T* out) {
  using V = Lanes<T>;
  const std::int64_t last = end - V::kCount;
  typename V::Type sums[kRun];
  for (int k = 0; k < kRun; ++k) {
    sums[k] = scale.row(V::load(rows[0] + (k + 1 < kRun ? column + k * V::kCount : last)));
  }
  for (std::int64_t j = 1; j < count; ++j) {
    for (int k = 0; k < kRun; ++k) {
      sums[k] += scale.row(V::load(rows[j] + (k + 1 < kRun ? column + k * V::kCount : last)));
    }
  }
  for (int k = 0; k < kRun; ++k) {
    V::store(out + (k + 1 < kRun ? column + k * V::kCount : last), scale.sum(sums[k]));
  }
}

// Scaled sum of columns [start, end) of count >= 1 rows, to the same columns of out.
template <class T, class Scale>
inline void pool_rows(const T* const* rows, std::int64_t count, std::int64_t start,
                      std::int64_t end, Scale scale, T* out) {
  using V = Lanes<T>;
  if (end - start < V::kCount) {
    for (std::int64_t i = start; i < end; ++i) {
      T sum = scale.row(rows[0][i]);
      for (std::int64_t j = 1; j < count; ++j) sum += scale.row(rows[j][i]);
      out[i] = scale.sum(sum);
    }
    return;
  }
  for (std::int64_t at = start; at < end; at += kMostVectors * V::kCount) {
    const std::int64_t vectors = (end - at + V::kCount - 1) / V::kCount;
    switch (vectors) {
      case 1: pool_run<T, 1>(rows, count, at, end, scale, out); break;
      case 2: pool_run<T, 2>(rows, count, at, end, scale, out); break;
      case 3: pool_run<T, 3>(rows, count, at, end, scale, out); break;
      case 4: pool_run<T, 4>(rows, count, at, end, scale, out); break;
      case 5: pool_run<T, 5>(rows, count, at, end, scale, out); break;
      case 6: pool_run<T, 6>(rows, count, at, end, scale, out); break;
      case 7: pool_run<T, 7>(rows, count, at, end, scale, out); break;
      default: {
        const std::int64_t full = at + kMostVectors * V::kCount;
        pool_run<T, 8>(rows, count, at, full < end ? full : end, scale, out);
      }
    }
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
