#pragma once
// What the files of the segment family share: their rows, offsets and shares of work.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "lanes.h"
#include "ops_segments.h"
#include "stream.h"

namespace shoal {
namespace {

constexpr std::int64_t kTile = 16;  // rows that the first level of cache holds
// Outputs beyond this leave the caches before they are read: they are written past them.
constexpr std::int64_t kStreamBytes = std::int64_t{4} << 20;

template <class T>
inline T* pointer(const void* at) {
  return static_cast<T*>(const_cast<void*>(at));
}

inline bool may_stream(const void* data, std::int64_t row_bytes, std::int64_t rows) {
  return row_bytes * rows >= kStreamBytes && streamable(data, static_cast<std::size_t>(row_bytes));
}

inline void end_stream(bool stream) {
  if (stream) end_stream();
}

template <class T>
inline T divisor_of(SegmentMode mode, std::int64_t count) {
  if (count < 2 || mode == SegmentMode::sum || mode == SegmentMode::l2) return T(1);
  const auto n = static_cast<T>(count);
  return mode == SegmentMode::mean ? n : std::sqrt(n);
}

// Rows [at, at + count) of the values, columns [begin, end): one gradient row over a divisor, times
// inputs where there are some. Rows are written one after the other: streamed stores are slow where
// they leave parts of cache lines behind.
template <class T>
inline void spread_rows(const SegmentTable& t, const T* row, T divisor, std::int64_t at,
                        std::int64_t count, std::int64_t begin, std::int64_t end, bool stream) {
  T* out = pointer<T>(t.values) + at * t.dim;
  const T* inputs = t.inputs == nullptr ? nullptr : pointer<T>(t.inputs) + at * t.dim;
  for (std::int64_t r = 0; r < count; ++r) {
    over_columns<T>(begin, end, true, [=]<int n>(std::int64_t c) {
      Lanes<T, n> value;
      value.load(row + c);
      value.divide(divisor);
      if (inputs != nullptr) {
        Lanes<T, n> x;
        x.load(inputs + c);
        value.multiply(x);
      }
      value.store(out + c, stream);
    });
    out += t.dim;
    if (inputs != nullptr) inputs += t.dim;
  }
}

// Gradient of one segment's result, over its norm where there is one, and 0 where that is 0.
// `scratch` holds dim elements.
template <class T>
inline const T* gradient_row(const SegmentTable& t, std::int64_t segment, T* scratch) {
  const T* row = pointer<T>(t.parts[0].data) + segment * t.parts[0].width;
  if (t.parts.size() > 1) {
    T* to = scratch;
    for (const SegmentPart& part : t.parts) {
      std::memcpy(to, pointer<T>(part.data) + segment * part.width,
                  static_cast<std::size_t>(part.width) * sizeof(T));
      to += part.width;
    }
    row = scratch;
  }
  if (t.norms == nullptr) return row;
  const T* norms = pointer<T>(t.norms) + segment * t.dim;
  over_columns<T>(0, t.dim, row != scratch, [=]<int n>(std::int64_t c) {
    Lanes<T, n> value, norm;
    value.load(row + c);
    norm.load(norms + c);
    value.divide_or_zero(norm);
    value.store(scratch + c);
  });
  return scratch;
}

// Offsets begin at 0 and end at the number of rows; `bad` is the one that does not.
inline bool good_ends(const std::int64_t* offsets, std::int64_t segments, std::int64_t rows,
                      std::int64_t& bad) {
  bad = offsets[0] != 0 ? 0 : offsets[segments] != rows ? segments : -1;
  return bad < 0;
}

// visit(segment, start, stop) for segments [first, last). First bad offset or -1.
template <class Visit>
inline std::int64_t each_segment(const std::int64_t* offsets, std::int64_t rows,
                                 std::int64_t first, std::int64_t last, const Visit& visit) {
  for (std::int64_t segment = first; segment < last; ++segment) {
    const std::int64_t start = offsets[segment], stop = offsets[segment + 1];
    if (start < 0 || start > stop || stop > rows) return segment + 1;
    visit(segment, start, stop);
  }
  return -1;
}

// First segment at which rows plus segments before it reach `work`.
inline std::int64_t segment_at(const std::int64_t* offsets, std::int64_t segments,
                               std::int64_t work) {
  std::int64_t low = 0;
  std::int64_t high = segments;
  while (low < high) {
    const std::int64_t middle = low + (high - low) / 2;
    if (offsets[middle] + middle < work) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Threads that work of so many bytes is worth.
inline int worth_threads(std::int64_t bytes, int threads) {
  constexpr std::int64_t kBytesPerThread = std::int64_t{64} << 10;
  const std::int64_t most = std::max(threads, 1);
  return static_cast<int>(std::clamp<std::int64_t>(bytes / kBytesPerThread, 1, most));
}

}  // namespace

// Row i of table.values = gradient of row i, by the index. First position out of range, or -1.
std::int64_t spread_by_index(const SegmentTable& table, SegmentMode mode, bool is_double,
                             int threads);

}  // namespace shoal
