#pragma once
// Index: id -> row number. Extendible hashing over stripes; each stripe is open addressing over
// cache lines of five keys and five row numbers, with a count of ids that overflowed past the line
// (as F14 does), so a miss ends at its first line and erase leaves no tombstones. All 2^64 ids are
// legal: a slot is free because a bit says so, not because its key is special.
//
// A line is chosen by the low 32 bits of the hash scaled to the number of lines. That keeps lines
// in hash order, so a rehash is one sequential pass, and lets a stripe grow by a quarter at a time.
#ifdef __AVX2__
#include <immintrin.h>
#endif

#include <cstdint>
#include <memory>
#include <vector>

#include "hash.h"
#include "memory.h"

namespace shoal {

constexpr int kSlots = 5;
constexpr std::int32_t kNoRow = -1;

struct alignas(64) Line {
  std::int64_t keys[kSlots];
  std::int32_t rows[kSlots];
  std::uint32_t meta;  // bits 0..4: slot in use; bits 8..31: ids that overflowed past this line
};
static_assert(sizeof(Line) == 64);

struct StripeView {
  Line* lines;
  std::uint32_t count;
  std::uint32_t pad;
};

struct IndexView {
  const StripeView* stripes;
  const std::uint32_t* directory;
  std::uint64_t salt;
  int shift;           // directory slot = (hash >> shift) & mask
  std::uint32_t mask;
};

class Index {
 public:
  explicit Index(std::uint64_t salt);

  IndexView view() const;
  std::int32_t find(std::int64_t id) const;
  // The id must be absent. Only the owner of the id's partition may call it in a parallel phase.
  void insert(std::int64_t id, std::int32_t row);
  // Returns the row the id had, or kNoRow.
  std::int32_t erase(std::int64_t id);
  // Where the row number of an id is, until the index changes; null: the id is absent.
  std::int32_t* at(std::int64_t id);
  // Splits stripes that grew past their share; serial, between parallel phases.
  void rebalance();
  void reserve(std::size_t rows);
  // Grows every stripe for these ids (absent, distinct), so that inserting them allocates nothing.
  void make_room(const std::int64_t* ids, std::size_t n);
  // The same in two steps: how many come to each stripe, which no split may follow, then growth.
  void count(std::int64_t id, std::vector<std::uint32_t>& fresh) const;
  void make_room(const std::vector<std::uint32_t>& fresh);
  void clear();

  template <class Visit>
  void each(const Visit& visit) const {
    for (const StripeView& view : views_) each_of(view, visit);
  }

  int partition_bits() const;  // at most kPartitionBits; stripes never straddle partitions
  std::size_t size() const;
  std::size_t slots() const;
  std::size_t bytes() const;

  static constexpr int kPartitionBits = 4;

 private:
  struct Stripe {
    Block block;
    std::uint32_t size = 0;
    std::uint32_t limit = 0;
    std::uint32_t prefix = 0;
    int depth = 0;
  };

  template <class Visit>
  static void each_of(const StripeView& view, const Visit& visit) {
    for (std::uint32_t i = 0; i < view.count; ++i) {
      const Line& line = view.lines[i];
      for (unsigned used = line.meta & ((1U << kSlots) - 1); used != 0; used &= used - 1) {
        const int slot = __builtin_ctz(used);
        visit(line.keys[slot], line.rows[slot]);
      }
    }
  }

  std::uint32_t slot_of(std::uint64_t hash) const;
  void resize(std::uint32_t stripe, std::uint32_t lines);
  void split(std::uint32_t stripe);
  void set_limit(std::uint32_t stripe);

  std::uint64_t salt_;
  int bits_ = 0;
  std::vector<std::uint32_t> directory_;
  std::vector<Stripe> stripes_;
  std::vector<StripeView> views_;
};

namespace {

inline const Line* home_line(const IndexView& v, std::uint64_t hash, const StripeView*& stripe) {
  stripe = v.stripes + v.directory[(hash >> v.shift) & v.mask];
  return stripe->lines + ((hash & 0xffffffffULL) * stripe->count >> 32);
}

// Slots in use that hold the id, as bits.
inline unsigned match(const Line* line, std::int64_t id) {
#ifdef __AVX2__
  static_assert(kSlots == 5);
  const __m256i four = _mm256_cmpeq_epi64(
      _mm256_load_si256(reinterpret_cast<const __m256i*>(line->keys)), _mm256_set1_epi64x(id));
  const auto hit = static_cast<unsigned>(_mm256_movemask_pd(_mm256_castsi256_pd(four))) |
                   static_cast<unsigned>(line->keys[4] == id) << 4;
#else
  unsigned hit = 0;
  for (int k = 0; k < kSlots; ++k) hit |= static_cast<unsigned>(line->keys[k] == id) << k;
#endif
  return hit & line->meta;
}

// A miss ends at the first line nothing overflowed past; churn can leave none, so it also ends
// after one round.
inline const std::int32_t* probe_at(const StripeView* stripe, const Line* line, std::int64_t id) {
  for (std::uint32_t step = 0; step < stripe->count; ++step) {
    const unsigned hit = match(line, id);
    if (hit != 0) return &line->rows[__builtin_ctz(hit)];
    if ((line->meta >> 8) == 0) return nullptr;
    if (++line == stripe->lines + stripe->count) line = stripe->lines;
  }
  return nullptr;
}

inline std::int32_t probe(const StripeView* stripe, const Line* line, std::int64_t id) {
  const std::int32_t* const row = probe_at(stripe, line, id);
  return row == nullptr ? kNoRow : *row;
}

}  // namespace
}  // namespace shoal
