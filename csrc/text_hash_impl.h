#pragma once
// blake2b of texts of at most one block, four at a time. Included by kernels_isa.cpp only.
#include "text_ids.h"

namespace shoal {
namespace {

using Word4 = std::uint64_t __attribute__((vector_size(32)));
using Byte32 = std::uint8_t __attribute__((vector_size(32)));

template <int bytes>
[[gnu::always_inline]] inline Word4 rotated(Word4 x) {
  // To the right by whole bytes: one shuffle where the machine has it.
  Byte32 order{};
  for (int i = 0; i < 32; ++i) order[i] = static_cast<std::uint8_t>((i & ~7) | ((i + bytes) & 7));
  return reinterpret_cast<Word4>(__builtin_shuffle(reinterpret_cast<Byte32>(x), order));
}

inline constexpr std::uint8_t kSigma[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

[[gnu::always_inline]] inline void quarter(Word4& a, Word4& b, Word4& c, Word4& d, Word4 x, Word4 y) {
  a += b + x;
  d = rotated<4>(d ^ a);
  c += d;
  b = rotated<3>(b ^ c);
  a += b + y;
  d = rotated<2>(d ^ a);
  c += d;
  b ^= c;
  b = (b << 1) | (b >> 63);
}

template <int round>
[[gnu::always_inline]] inline void mix_round(Word4* v, const Word4* m) {
  constexpr const std::uint8_t* s = kSigma[round % 10];
  quarter(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]]);
  quarter(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]]);
  quarter(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]]);
  quarter(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]]);
  quarter(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]]);
  quarter(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]]);
  quarter(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]]);
  quarter(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]]);
}

template <int... rounds>
[[gnu::always_inline]] inline void mix_rounds(Word4* v, const Word4* m, std::integer_sequence<int, rounds...>) {
  (mix_round<rounds>(v, m), ...);
}

template <int given>
void hash_blocks(std::uint64_t* state, const std::uint64_t* words, const std::uint64_t* counts,
                 const std::uint64_t* last) {
  Word4 h[8], m[16] = {}, v[16], count, final_one;
  std::memcpy(h, state, sizeof h);
  std::memcpy(m, words, given * sizeof m[0]);
  std::memcpy(&count, counts, sizeof count);
  std::memcpy(&final_one, last, sizeof final_one);
  for (int i = 0; i < 8; ++i) {
    v[i] = h[i];
    v[i + 8] = Word4{} + kBlakeIv[i];
  }
  v[12] ^= count;
  v[14] ^= final_one;
  mix_rounds(v, m, std::make_integer_sequence<int, 12>());
  for (int i = 0; i < 8; ++i) h[i] ^= v[i] ^ v[i + 8];
  std::memcpy(state, h, sizeof h);
}

// State h of four messages, by one block each: `words` [16][4] (`brief`: [2][4], the others are
// zero), `counts` bytes until its end, `last` all ones where it is the last. Everything is [.][4].
void blake_blocks(std::uint64_t* state, const std::uint64_t* words, const std::uint64_t* counts,
                  const std::uint64_t* last, bool brief) {
  (brief ? hash_blocks<2> : hash_blocks<16>)(state, words, counts, last);
}

}  // namespace
}  // namespace shoal
