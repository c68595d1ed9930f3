#include "crc32.h"

#include <algorithm>
#include <array>
#include <cstring>

#ifdef SHOAL_X86
#include <immintrin.h>
#endif

#include "stream.h"

namespace shoal {
namespace {

constexpr int kTables = 8;
using Tables = std::array<std::array<std::uint32_t, 256>, kTables>;

// [0] advances by one byte; [k] by one byte and k zeros.
constexpr Tables kSteps = [] {
  Tables t{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t c = byte;
    for (int bit = 0; bit < 8; ++bit) c = (c >> 1) ^ (c & 1 ? 0xEDB88320U : 0U);
    t[0][byte] = c;
  }
  for (int k = 1; k < kTables; ++k) {
    for (int byte = 0; byte < 256; ++byte) {
      t[k][byte] = (t[k - 1][byte] >> 8) ^ t[0][t[k - 1][byte] & 0xff];
    }
  }
  return t;
}();

// The register itself, which starts and ends inverted.
std::uint32_t advance(std::uint32_t c, const unsigned char* p, std::size_t n) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  for (; n >= 8; p += 8, n -= 8) {
    std::uint32_t low, high;
    std::memcpy(&low, p, 4);
    std::memcpy(&high, p + 4, 4);
    low ^= c;
    c = kSteps[7][low & 0xff] ^ kSteps[6][(low >> 8) & 0xff] ^ kSteps[5][(low >> 16) & 0xff] ^
        kSteps[4][low >> 24] ^ kSteps[3][high & 0xff] ^ kSteps[2][(high >> 8) & 0xff] ^
        kSteps[1][(high >> 16) & 0xff] ^ kSteps[0][high >> 24];
  }
#endif
  for (; n > 0; ++p, --n) c = (c >> 8) ^ kSteps[0][(c ^ *p) & 0xff];
  return c;
}

#ifdef SHOAL_X86
constexpr std::size_t kLane = 16;
constexpr std::size_t kRound = 4 * kLane;

#define SHOAL_CLMUL __attribute__((target("pclmul,sse4.1")))

SHOAL_CLMUL inline __m128i load(const unsigned char* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}

// What is in `x` moved on by as many bits as `by` stands for, and `next` added.
SHOAL_CLMUL inline __m128i folded(__m128i x, __m128i by, __m128i next) {
  return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x, by, 0x00),
                                     _mm_clmulepi64_si128(x, by, 0x11)), next);
}

// Folds 64 bytes onto the next 64 (Gopal et al., "Fast CRC Computation Using PCLMULQDQ"), then to
// 16, which have the same remainder as all before: tables do them and the rest.
SHOAL_CLMUL std::uint32_t advance_by_folds(std::uint32_t c, const unsigned char* p,
                                           std::size_t n) {
  // x^(bits + 32) and x^(bits - 32) mod the polynomial, reflected.
  const __m128i by_512 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
  const __m128i by_128 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
  __m128i a = _mm_xor_si128(load(p), _mm_cvtsi32_si128(static_cast<int>(c)));
  __m128i b = load(p + kLane), d = load(p + 2 * kLane), e = load(p + 3 * kLane);
  for (p += kRound, n -= kRound; n >= kRound; p += kRound, n -= kRound) {
    a = folded(a, by_512, load(p));
    b = folded(b, by_512, load(p + kLane));
    d = folded(d, by_512, load(p + 2 * kLane));
    e = folded(e, by_512, load(p + 3 * kLane));
  }
  a = folded(folded(folded(a, by_128, b), by_128, d), by_128, e);
  for (; n >= kLane; p += kLane, n -= kLane) a = folded(a, by_128, load(p));
  unsigned char left[kLane];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(left), a);
  return advance(advance(0, left, kLane), p, n);
}

#undef SHOAL_CLMUL

bool has_folds() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
}
#endif

}  // namespace

std::uint32_t crc32_by_tables(std::uint32_t before, const void* data, std::size_t bytes) {
  return ~advance(~before, static_cast<const unsigned char*>(data), bytes);
}

std::uint32_t crc32(std::uint32_t before, const void* data, std::size_t bytes) {
#ifdef SHOAL_X86
  static const bool folds = has_folds();
  if (folds && bytes >= kRound) {
    return ~advance_by_folds(~before, static_cast<const unsigned char*>(data), bytes);
  }
#endif
  return crc32_by_tables(before, data, bytes);
}

std::uint32_t crc32_copy(std::uint32_t before, void* to, const void* data, std::size_t bytes) {
  constexpr std::size_t kPiece = std::size_t{16} << 10;  // stays in the nearest cache
  auto* target = static_cast<char*>(to);
  const auto* source = static_cast<const char*>(data);
  std::size_t first = kPiece;  // so that what follows begins at a whole vector
  if constexpr (kStreamVector > 0) {
    first -= reinterpret_cast<std::uintptr_t>(target) % kStreamVector;
  }
  for (std::size_t at = 0, many = first; at < bytes; at += many, many = kPiece) {
    many = std::min(many, bytes - at);
    before = crc32(before, source + at, many);
    if (streamable(target + at, 0)) {
      stream_bytes(target + at, source + at, many);
    } else {
      std::memcpy(target + at, source + at, many);
    }
  }
  end_stream();
  return before;
}

}  // namespace shoal
