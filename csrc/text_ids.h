#pragma once
// Ids of texts: the integer that a text spells, or the first 8 bytes of its blake2b hash
// (RFC 7693, digest of 8 bytes, no key), little-endian.
#include <cstddef>
#include <cstdint>

namespace shoal {

inline constexpr std::uint64_t kBlakeIv[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};
inline constexpr std::size_t kBlakeBlock = 128;
inline constexpr int kBlakeLanes = 4;

// Text i of [first, first + n) is data[offsets[i], offsets[i + 1]); where bit i of `valid` is 0 (null:
// none is), its id is `missing`. `spelled`: integers and booleans are what they spell.
// One thread; what it hashed last it remembers, since values of a column repeat.
template <class Offset>
void ids_of_texts(const char* data, const Offset* offsets, const std::uint8_t* valid,
                  std::int64_t first, std::int64_t n, bool spelled, std::int64_t missing,
                  std::int64_t* ids);

}  // namespace shoal
