#pragma once
// Operations on ids alone: distinct ids in order of first appearance, row numbers, joined offsets.
#include <cstddef>
#include <cstdint>
#include <memory>

#include "buffers.h"

namespace shoal {

// One dedup under way: the number of distinct ids is known once it exists, so that the caller can
// make room for them; `ids` and `inverse` stay the caller's until write() returns.
class Dedup {
 public:
  static std::unique_ptr<Dedup> of(const std::int64_t* ids, std::int64_t n, std::int64_t* inverse,
                                   int threads);
  virtual ~Dedup() = default;
  virtual std::int64_t unique() const = 0;
  virtual void write(std::int64_t* ids, std::int64_t* counts) = 0;
};

// Odd, drawn once a process: ids chosen to collide under one factor do not under another.
extern const std::uint64_t kSpreadFactor;

// Bijective; the high bits are the well mixed ones. What comes out of dedup does not depend on it.
inline std::uint64_t spread(std::int64_t id) {
  std::uint64_t x = static_cast<std::uint64_t>(id);
  x ^= x >> 32;
  return x * kSpreadFactor;
}

struct Distinct {
  std::int64_t id;
  std::int64_t count;
};

// Ids up to this many are deduplicated by one thread with a table in its own cache.
constexpr std::int64_t kSmallDedup = std::int64_t{1} << 15;

// Whether one table is best for n ids: it fits the cache, or no other thread could help.
constexpr bool dedup_alone(std::int64_t n, int threads) {
  return n <= kSmallDedup || (threads <= 1 && n <= std::int64_t{1} << 21);
}

// Slots dedup_span needs for n ids; a power of two.
std::size_t span_slots(std::int64_t n);

// Dedup in one pass over one table: returns the number of distinct ids; inverse[i] is the rank of
// ids[i]. slots has span_slots(n) entries; found has n + 1, of which [1, number] are the answer.
std::int64_t dedup_span(const std::int64_t* ids, std::int64_t n, std::uint32_t* slots,
                        Distinct* found, std::int64_t* inverse);

constexpr std::int64_t kGood = -1;  // what checked operations return when nothing is wrong

// Joins row splits that each start at 0 into one; sizes [parts] are their lengths. Returns kGood,
// the first bad split (below `total`), or total + the first bad size.
std::int64_t normalize_merged_split(const std::int64_t* splits, std::int64_t total,
                                    const std::int64_t* sizes, std::int64_t parts,
                                    std::int64_t* out);

}  // namespace shoal
