#pragma once
// mix64 and Philox4x32-10: the only sources of hashed and random bits in the core.
// Everything here has internal linkage, because it is compiled once per instruction set.
#include <cstdint>

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

}  // namespace
}  // namespace shoal
