#pragma once
// Neighbouring columns of rows in registers, and loops that cover rows of any width with them.
#include <cmath>
#include <cstdint>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace shoal {
namespace {

// n columns. Spelled as vectors: left to itself the compiler jams rows together and adds them one
// element at a time, and for a few columns calls and loop prologues cost more than the work.
template <class T, int n>
struct Lanes {
  static constexpr int kWidth = n * sizeof(T) >= 16 ? 16 / sizeof(T) : 1;
  static constexpr int kVectors = n / kWidth;
  typedef T Vector __attribute__((vector_size(kWidth * sizeof(T))));
  Vector v[kVectors];

  void zero() {
    for (int i = 0; i < kVectors; ++i) v[i] = Vector{};
  }
  void add(const Lanes& x) {
    for (int i = 0; i < kVectors; ++i) v[i] += x.v[i];
  }
  void multiply(const Lanes& x) {
    for (int i = 0; i < kVectors; ++i) v[i] *= x.v[i];
  }
  void multiply(T factor) {
    for (int i = 0; i < kVectors; ++i) v[i] *= factor;
  }
  void divide(T divisor) {
    if (divisor == T(1)) return;
    for (int i = 0; i < kVectors; ++i) v[i] /= divisor;
  }
  void divide_or_zero(const Lanes& x) {
    for (int i = 0; i < kVectors; ++i) v[i] = x.v[i] == Vector{} ? Vector{} : v[i] / x.v[i];
  }
  void root() {
    for (int i = 0; i < kVectors; ++i) root_vector(v[i]);
  }

  void load(const T* from) { load_row(from, n); }
  void store(T* to, bool stream = false) const { store_row(to, n, stream); }
  // A whole row of `dim` columns, n - kWidth < dim <= n: the last vector overlaps the one before.
  void load_row(const T* from, std::int64_t dim) {
    for (int i = 0; i + 1 < kVectors; ++i) {
      __builtin_memcpy(&v[i], from + i * kWidth, sizeof(Vector));
    }
    __builtin_memcpy(&v[kVectors - 1], from + dim - kWidth, sizeof(Vector));
  }
  void store_row(T* to, std::int64_t dim, bool stream = false) const {
    for (int i = 0; i + 1 < kVectors; ++i) store_vector(to + i * kWidth, v[i], stream);
    store_vector(to + dim - kWidth, v[kVectors - 1], stream);
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
    for (int k = 0; k < kWidth; ++k) x[k] = std::sqrt(x[k]);
  }
};

// Calls body.template operator()<n>(column) for lanes of at most kWidest bytes that cover columns
// [begin, end). Where a column may be done twice, the last lanes overlap those before.
template <class T, int kWidest = 128, class Body>
inline void over_columns(std::int64_t begin, std::int64_t end, bool twice, const Body& body) {
  constexpr int kWide = kWidest / sizeof(T), kVector = 16 / sizeof(T);
  std::int64_t c = begin;
  for (; c + kWide <= end; c += kWide) body.template operator()<kWide>(c);
  const auto half = [&]<int n>() {
    if (c + n > end) return;
    body.template operator()<n>(c);
    c += n;
  };
  if constexpr (kWide > kVector) {
    static_assert(kWidest == 128);
    half.template operator()<kWide / 2>();
    half.template operator()<kWide / 4>();
    half.template operator()<kVector>();
  }
  if (twice && c < end && end - begin >= kVector) {
    body.template operator()<kVector>(end - kVector);
    return;
  }
  for (; c < end; ++c) body.template operator()<1>(c);
}

// Calls body.template operator()<n>() when n lanes hold a row of `dim`; else says no.
template <class T, class Body>
inline bool as_one(std::int64_t dim, const Body& body) {
  constexpr int kWidth = 16 / sizeof(T);
  if (dim < kWidth) return false;
  switch ((dim + kWidth - 1) / kWidth) {
    case 1: return body.template operator()<kWidth>(), true;
    case 2: return body.template operator()<2 * kWidth>(), true;
    case 3: return body.template operator()<3 * kWidth>(), true;
    case 4: return body.template operator()<4 * kWidth>(), true;
    case 5: return body.template operator()<5 * kWidth>(), true;
    case 6: return body.template operator()<6 * kWidth>(), true;
    case 7: return body.template operator()<7 * kWidth>(), true;
    case 8: return body.template operator()<8 * kWidth>(), true;
    default: return false;
  }
}

template <int kWidest = 128, class T>
inline void copy_columns(T* to, const T* from, std::int64_t n, bool stream = false) {
  over_columns<T, kWidest>(0, n, true, [=]<int k>(std::int64_t c) {
    Lanes<T, k> x;
    x.load(from + c);
    x.store(to + c, stream);
  });
}

}  // namespace
}  // namespace shoal
