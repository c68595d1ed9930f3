#pragma once
// mix64 and Philox4x32-10: the only sources of hashed and random bits in the core.
// Everything here has internal linkage, because it is compiled once per instruction set.
#include <cstdint>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace shoal {
namespace {

inline std::uint64_t mix64(std::uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ULL;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebULL;
  x ^= x >> 31;
  return x;
}

// Where an id of a table with this salt lies in the space of hashes.
inline std::uint64_t hash_of(std::int64_t id, std::uint64_t salt) {
  return mix64(static_cast<std::uint64_t>(id) ^ salt);
}

struct PhiloxBlock {
  std::uint32_t lane[4];
};

// One block: 4 lanes for columns 4*block .. 4*block+3 of row `id` (Salmon et al., 2011).
inline PhiloxBlock philox(std::uint64_t key, std::uint64_t id, std::uint32_t block,
                          std::uint32_t domain) {
  std::uint32_t c0 = static_cast<std::uint32_t>(id);
  std::uint32_t c1 = static_cast<std::uint32_t>(id >> 32);
  std::uint32_t c2 = block;
  std::uint32_t c3 = domain;
  std::uint32_t k0 = static_cast<std::uint32_t>(key);
  std::uint32_t k1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = 0xD2511F53ULL * c0;
    const std::uint64_t b = 0xCD9E8D57ULL * c2;
    const std::uint32_t n0 = static_cast<std::uint32_t>(b >> 32) ^ c1 ^ k0;
    const std::uint32_t n2 = static_cast<std::uint32_t>(a >> 32) ^ c3 ^ k1;
    c1 = static_cast<std::uint32_t>(b);
    c3 = static_cast<std::uint32_t>(a);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
  return PhiloxBlock{{c0, c1, c2, c3}};
}

constexpr int kPhiloxLanes = 8;

#ifdef __AVX2__

// Eight ids as two vectors of four, each id in a 64-bit lane.
struct PhiloxIds {
  __m256i low, high;  // ids 0..3 and 4..7
};

inline PhiloxIds philox_ids(const std::int64_t* ids) {
  return PhiloxIds{_mm256_loadu_si256(reinterpret_cast<const __m256i*>(ids)),
                   _mm256_loadu_si256(reinterpret_cast<const __m256i*>(ids + 4))};
}

// One round of four blocks. A word lives in the low half of its 64-bit lane; what is in the high
// half never matters, because the multiplication reads low halves only.
inline void philox_round(__m256i& c0, __m256i& c1, __m256i& c2, __m256i& c3, __m256i k0,
                         __m256i k1) {
  const __m256i a = _mm256_mul_epu32(c0, _mm256_set1_epi64x(0xD2511F53));
  const __m256i b = _mm256_mul_epu32(c2, _mm256_set1_epi64x(0xCD9E8D57));
  c0 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(b, 32), c1), k0);
  c2 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(a, 32), c3), k1);
  c1 = b;
  c3 = a;
}

// philox() of eight ids: out[l] is what philox(key, ids[l], block, domain) gives.
inline void philox_lanes(std::uint64_t key, const PhiloxIds& ids, std::uint32_t block,
                         std::uint32_t domain, PhiloxBlock (&out)[kPhiloxLanes]) {
  __m256i c[2][4];
  for (int h = 0; h < 2; ++h) {
    c[h][0] = h == 0 ? ids.low : ids.high;
    c[h][1] = _mm256_srli_epi64(c[h][0], 32);
    c[h][2] = _mm256_set1_epi64x(block);
    c[h][3] = _mm256_set1_epi64x(domain);
  }
  auto k0 = static_cast<std::uint32_t>(key);
  auto k1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const __m256i x0 = _mm256_set1_epi64x(k0), x1 = _mm256_set1_epi64x(k1);
    for (auto& w : c) philox_round(w[0], w[1], w[2], w[3], x0, x1);
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
  for (int h = 0; h < 2; ++h) {
    // Words 0 and 1 of a lane side by side, then all four.
    const __m256i first = _mm256_blend_epi32(c[h][0], _mm256_slli_epi64(c[h][1], 32), 0xAA);
    const __m256i second = _mm256_blend_epi32(c[h][2], _mm256_slli_epi64(c[h][3], 32), 0xAA);
    const __m256i even = _mm256_unpacklo_epi64(first, second);  // lanes 0 and 2
    const __m256i odd = _mm256_unpackhi_epi64(first, second);   // lanes 1 and 3
    auto* to = reinterpret_cast<__m128i*>(&out[4 * h]);
    _mm_storeu_si128(to, _mm256_castsi256_si128(even));
    _mm_storeu_si128(to + 1, _mm256_castsi256_si128(odd));
    _mm_storeu_si128(to + 2, _mm256_extracti128_si256(even, 1));
    _mm_storeu_si128(to + 3, _mm256_extracti128_si256(odd, 1));
  }
}

#else

struct PhiloxIds {
  const std::int64_t* ids;
};

inline PhiloxIds philox_ids(const std::int64_t* ids) { return PhiloxIds{ids}; }

inline void philox_lanes(std::uint64_t key, const PhiloxIds& ids, std::uint32_t block,
                         std::uint32_t domain, PhiloxBlock (&out)[kPhiloxLanes]) {
  for (int l = 0; l < kPhiloxLanes; ++l) {
    out[l] = philox(key, static_cast<std::uint64_t>(ids.ids[l]), block, domain);
  }
}

#endif

}  // namespace
}  // namespace shoal
