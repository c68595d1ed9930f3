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

// High and low words of eight 32 x 32 bit products.
inline void multiply_lanes(__m256i x, __m256i factor, __m256i& high, __m256i& low) {
  const __m256i even = _mm256_mul_epu32(x, factor);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), factor);
  low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
  high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
}

// philox() for eight (id, block) pairs at once, one lane each. Written out, because the compiler's
// own vectorisation of the plain loop is slower than no vectorisation.
inline void philox_lanes(std::uint64_t key, const std::uint64_t* ids, const std::uint32_t* blocks,
                         std::uint32_t domain, std::uint32_t (*out)[kPhiloxLanes]) {
  alignas(32) std::uint32_t low_ids[kPhiloxLanes], high_ids[kPhiloxLanes];
  for (int l = 0; l < kPhiloxLanes; ++l) {
    low_ids[l] = static_cast<std::uint32_t>(ids[l]);
    high_ids[l] = static_cast<std::uint32_t>(ids[l] >> 32);
  }
  __m256i c0 = _mm256_load_si256(reinterpret_cast<const __m256i*>(low_ids));
  __m256i c1 = _mm256_load_si256(reinterpret_cast<const __m256i*>(high_ids));
  __m256i c2 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(blocks));
  __m256i c3 = _mm256_set1_epi32(static_cast<int>(domain));
  __m256i k0 = _mm256_set1_epi32(static_cast<int>(static_cast<std::uint32_t>(key)));
  __m256i k1 = _mm256_set1_epi32(static_cast<int>(static_cast<std::uint32_t>(key >> 32)));
  const __m256i m0 = _mm256_set1_epi32(static_cast<int>(0xD2511F53U));
  const __m256i m1 = _mm256_set1_epi32(static_cast<int>(0xCD9E8D57U));
  for (int round = 0; round < 10; ++round) {
    __m256i high_a, low_a, high_b, low_b;
    multiply_lanes(c0, m0, high_a, low_a);
    multiply_lanes(c2, m1, high_b, low_b);
    c0 = _mm256_xor_si256(_mm256_xor_si256(high_b, c1), k0);
    c2 = _mm256_xor_si256(_mm256_xor_si256(high_a, c3), k1);
    c1 = low_b;
    c3 = low_a;
    k0 = _mm256_add_epi32(k0, _mm256_set1_epi32(static_cast<int>(0x9E3779B9U)));
    k1 = _mm256_add_epi32(k1, _mm256_set1_epi32(static_cast<int>(0xBB67AE85U)));
  }
  const __m256i words[4] = {c0, c1, c2, c3};
  for (int j = 0; j < 4; ++j) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out[j]), words[j]);
  }
}

#else

inline void philox_lanes(std::uint64_t key, const std::uint64_t* ids, const std::uint32_t* blocks,
                         std::uint32_t domain, std::uint32_t (*out)[kPhiloxLanes]) {
  for (int l = 0; l < kPhiloxLanes; ++l) {
    const PhiloxBlock words = philox(key, ids[l], blocks[l], domain);
    for (int j = 0; j < 4; ++j) out[j][l] = words.lane[j];
  }
}

#endif

}  // namespace
}  // namespace shoal
