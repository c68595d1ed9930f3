#pragma once
// The loops of ops_segments.cpp and ops_segment_index.cpp. A block of columns stays in registers
// while it runs over a tile of rows that the first level of cache holds.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "ops_segments.h"
#include "stream.h"

namespace shoal {
namespace {

constexpr std::int64_t kTile = 16;
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

inline void copy_bytes(char* to, const char* from, std::int64_t bytes, bool stream) {
  const auto size = static_cast<std::size_t>(bytes);
  if (stream) {
    stream_bytes(to, from, size);
  } else if (size > 0) {  // else there may be no address
    std::memcpy(to, from, size);
  }
}

inline void zero_bytes(char* to, std::int64_t bytes, bool stream) {
  const auto size = static_cast<std::size_t>(bytes);
  if (stream) {
    stream_zeros(to, size);
  } else {
    std::memset(to, 0, size);
  }
}

// n neighbouring columns in registers. Spelled as vectors: left to itself the compiler jams rows
// together and adds them one element at a time.
template <class T, int n>
struct Block {
  static constexpr int kLanes = n * sizeof(T) >= 16 ? 16 / sizeof(T) : 1;
  static constexpr int kVectors = n / kLanes;
  typedef T Vector __attribute__((vector_size(kLanes * sizeof(T))));
  Vector v[kVectors];

  void zero() {
    for (int i = 0; i < kVectors; ++i) v[i] = Vector{};
  }
  void load(const T* from) {
    for (int i = 0; i < kVectors; ++i) __builtin_memcpy(&v[i], from + i * kLanes, sizeof(Vector));
  }
  void add(const Block& x) {
    for (int i = 0; i < kVectors; ++i) v[i] += x.v[i];
  }
  void multiply(const Block& x) {
    for (int i = 0; i < kVectors; ++i) v[i] *= x.v[i];
  }
  void divide(T divisor) {
    for (int i = 0; i < kVectors; ++i) v[i] /= divisor;
  }
  void divide_or_zero(const Block& x) {
    for (int i = 0; i < kVectors; ++i) v[i] = x.v[i] == Vector{} ? Vector{} : v[i] / x.v[i];
  }
  void root() {
    for (int i = 0; i < kVectors; ++i) root_vector(v[i]);
  }
  void store(T* to, bool stream) const {
    for (int i = 0; i < kVectors; ++i) store_vector(to + i * kLanes, v[i], stream);
  }

  // A whole row of `dim` columns, n - kLanes < dim <= n: the last vector overlaps the one before.
  void load_row(const T* from, std::int64_t dim) {
    for (int i = 0; i + 1 < kVectors; ++i) {
      __builtin_memcpy(&v[i], from + i * kLanes, sizeof(Vector));
    }
    __builtin_memcpy(&v[kVectors - 1], from + dim - kLanes, sizeof(Vector));
  }
  void store_row(T* to, std::int64_t dim, bool stream) const {
    for (int i = 0; i + 1 < kVectors; ++i) store_vector(to + i * kLanes, v[i], stream);
    store_vector(to + dim - kLanes, v[kVectors - 1], stream);
  }

 private:
  static void store_vector(T* to, const Vector& from, bool stream) {
#if defined(__SSE2__)
    if constexpr (sizeof(Vector) == 16) {
      if (stream) {
        __m128i part;
        __builtin_memcpy(&part, &from, 16);
        _mm_stream_si128(reinterpret_cast<__m128i*>(to), part);
        return;
      }
    }
#endif
    (void)stream;
    __builtin_memcpy(to, &from, sizeof(Vector));
  }

  static void root_vector(Vector& x) {
#if defined(__SSE2__)
    if constexpr (sizeof(Vector) == 16 && sizeof(T) == 4) {
      x = Vector(_mm_sqrt_ps(__m128(x)));
      return;
    } else if constexpr (sizeof(Vector) == 16) {
      x = Vector(_mm_sqrt_pd(__m128d(x)));
      return;
    }
#endif
    for (int k = 0; k < kLanes; ++k) x[k] = std::sqrt(x[k]);
  }
};

// Calls body.template operator()<n>(column) for blocks that cover columns [begin, end). Where a
// column may be done twice, the last block overlaps the one before.
template <class T, class Body>
inline void for_blocks(std::int64_t begin, std::int64_t end, bool twice, const Body& body) {
  constexpr int kWide = 128 / sizeof(T);
  std::int64_t c = begin;
  for (; c + kWide <= end; c += kWide) body.template operator()<kWide>(c);
  if (c + kWide / 2 <= end) {
    body.template operator()<kWide / 2>(c);
    c += kWide / 2;
  }
  if (c + kWide / 4 <= end) {
    body.template operator()<kWide / 4>(c);
    c += kWide / 4;
  }
  if (c + kWide / 8 <= end) {
    body.template operator()<kWide / 8>(c);
    c += kWide / 8;
  }
  if (twice && c < end && end - begin >= kWide / 8) {
    body.template operator()<kWide / 8>(end - kWide / 8);
    return;
  }
  for (; c < end; ++c) body.template operator()<1>(c);
}

// Calls body.template operator()<n>() when one block of n holds a row of `dim`; else says no.
template <class T, class Body>
inline bool as_one_block(std::int64_t dim, const Body& body) {
  constexpr int kLanes = 16 / sizeof(T);
  if (dim < kLanes) return false;
  switch ((dim + kLanes - 1) / kLanes) {
    case 1: return body.template operator()<kLanes>(), true;
    case 2: return body.template operator()<2 * kLanes>(), true;
    case 3: return body.template operator()<3 * kLanes>(), true;
    case 4: return body.template operator()<4 * kLanes>(), true;
    case 5: return body.template operator()<5 * kLanes>(), true;
    case 6: return body.template operator()<6 * kLanes>(), true;
    case 7: return body.template operator()<7 * kLanes>(), true;
    case 8: return body.template operator()<8 * kLanes>(), true;
    default: return false;
  }
}

template <class T>
struct Finish {
  T divisor;
  bool root;

  template <int n>
  void apply(Block<T, n>& sum) const {
    if (root) {
      sum.root();
    } else if (divisor != T(1)) {
      sum.divide(divisor);
    }
  }
};

template <class T>
inline T divisor_of(SegmentMode mode, std::int64_t count) {
  if (count < 2 || mode == SegmentMode::sum || mode == SegmentMode::l2) return T(1);
  const auto n = static_cast<T>(count);
  return mode == SegmentMode::mean ? n : std::sqrt(n);
}

// Rows from this width on are read in an order of blocks that the hardware does not foresee:
// what lies this far ahead is fetched a line at a time.
constexpr std::int64_t kWideBytes = 512;
constexpr std::int64_t kAheadBytes = 8192;

// Adds rows to out (to zeros when `fresh`); `finish` after the last ones. Rows follow each other
// from `first`, or lie where `rows` says.
template <class T, bool kSquare, bool kOrdered>
struct ReduceTile {
  const T* first;
  const T* const* rows;
  std::int64_t dim, count;
  bool fresh;
  const Finish<T>* finish;
  T* out;
  bool stream;
  mutable const char* ahead;  // null: nothing to fetch

  template <int n>
  void operator()(std::int64_t c) const {
    Block<T, n> sum;
    if (fresh) {
      sum.zero();
    } else {
      sum.load(out + c);
    }
    const T* at = first + c;
    for (std::int64_t r = 0; r < count; ++r, at += dim) {
      if (n * sizeof(T) == 128 && ahead != nullptr) {
        __builtin_prefetch(ahead, 0, 3);
        __builtin_prefetch(ahead + 64, 0, 3);
        ahead += 128;
      }
      Block<T, n> x;
      x.load(kOrdered ? rows[r] + c : at);
      if constexpr (kSquare) x.multiply(x);
      sum.add(x);
    }
    if (finish != nullptr) finish->apply(sum);
    sum.store(out + c, stream);
  }
};

// out = row over a divisor, times inputs where there are some. Rows are written one after the
// other: streamed stores are slow where they leave parts of cache lines behind.
template <class T>
struct SpreadRow {
  const T* row;
  const T* inputs;
  T* out;
  T divisor;
  bool stream;

  template <int n>
  void operator()(std::int64_t c) const {
    Block<T, n> value;
    value.load(row + c);
    if (divisor != T(1)) value.divide(divisor);
    if (inputs != nullptr) {
      Block<T, n> x;
      x.load(inputs + c);
      value.multiply(x);
    }
    value.store(out + c, stream);
  }
};

// Rows [at, at + count) of the values, columns [begin, end), from one gradient row.
template <class T>
inline void spread_rows(const SegmentTable& t, const T* row, T divisor, std::int64_t at,
                        std::int64_t count, std::int64_t begin, std::int64_t end, bool stream) {
  T* out = pointer<T>(t.values) + at * t.dim;
  const T* inputs = t.inputs == nullptr ? nullptr : pointer<T>(t.inputs) + at * t.dim;
  for (std::int64_t r = 0; r < count; ++r) {
    for_blocks<T>(begin, end, true, SpreadRow<T>{row, inputs, out, divisor, stream});
    out += t.dim;
    if (inputs != nullptr) inputs += t.dim;
  }
}

// out = row over the norms, and 0 where a norm is 0.
template <class T>
struct OverNorm {
  const T* row;
  const T* norms;
  T* out;

  template <int n>
  void operator()(std::int64_t c) const {
    Block<T, n> value, norm;
    value.load(row + c);
    norm.load(norms + c);
    value.divide_or_zero(norm);
    value.store(out + c, false);
  }
};

// Gradient of one segment's result, over its norm where there is one. `scratch` holds dim elements.
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
  const T* y = pointer<T>(t.norms) + segment * t.dim;
  for_blocks<T>(0, t.dim, row != scratch, OverNorm<T>{row, y, scratch});
  return scratch;
}

// Offsets begin at 0 and end at the number of rows; `bad` is the one that does not.
inline bool good_ends(const std::int64_t* offsets, std::int64_t segments, std::int64_t rows,
               std::int64_t& bad) {
  bad = offsets[0] != 0 ? 0 : offsets[segments] != rows ? segments : -1;
  return bad < 0;
}

inline bool inside(const std::int64_t* offsets, std::int64_t segment, std::int64_t rows) {
  const std::int64_t start = offsets[segment];
  const std::int64_t stop = offsets[segment + 1];
  return 0 <= start && start <= stop && stop <= rows;
}

// First segment at which rows plus segments before it reach `work`.
inline std::int64_t segment_at(const SegmentTable& t, std::int64_t work) {
  std::int64_t low = 0;
  std::int64_t high = t.segments;
  while (low < high) {
    const std::int64_t middle = low + (high - low) / 2;
    if (t.offsets[middle] + middle < work) {
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
