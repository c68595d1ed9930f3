#include "ops_ids.h"

#include <algorithm>
#include <random>
#include <bit>
#include <cstring>
#include <vector>

#include "ops_buckets.h"

namespace shoal {

const std::uint64_t kSpreadFactor = [] {
  std::random_device source;
  const std::uint64_t high = source(), low = source();
  return (high << 32 | low) | 1;
}();
namespace {

constexpr std::int64_t kAhead = 24;

inline std::size_t home(std::int64_t id, int shift) {
  return static_cast<std::size_t>(spread(id) >> shift);
}

// Place of an id in a table of entries into `found`, 0 where it belongs but is not.
inline std::size_t slot_of(const std::uint32_t* slots, std::size_t mask, std::size_t at,
                           const Distinct* found, std::int64_t id) {
  while (slots[at] != 0 && found[slots[at]].id != id) at = (at + 1) & mask;
  return at;
}

// kFar: the table is larger than the cache, so lines are asked for two steps ahead: first the
// slot, then what it points at.
template <bool kFar>
std::int64_t dedup_span_as(const std::int64_t* ids, std::int64_t n, std::uint32_t* slots,
                           Distinct* found, std::int64_t* inverse) {
  const std::size_t n_slots = span_slots(n);
  const int shift = 64 - std::countr_zero(n_slots);
  std::memset(slots, 0, n_slots * sizeof(std::uint32_t));
  std::uint32_t last = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    if constexpr (kFar) {
      if (i + 2 * kAhead < n) {
        __builtin_prefetch(&slots[home(ids[i + 2 * kAhead], shift)], 1);
        __builtin_prefetch(&found[slots[home(ids[i + kAhead], shift)]], 1);
      }
    }
    const std::int64_t id = ids[i];
    const std::size_t at = slot_of(slots, n_slots - 1, home(id, shift), found, id);
    std::uint32_t rank = slots[at];
    if (rank == 0) {
      slots[at] = rank = ++last;
      found[rank] = Distinct{id, 1};
    } else {
      ++found[rank].count;
    }
    inverse[i] = rank - 1;
  }
  return last;
}

}  // namespace

std::size_t span_slots(std::int64_t n) {
  return std::bit_ceil(static_cast<std::size_t>(std::max<std::int64_t>(n, 8)) * 2);
}

std::int64_t dedup_span(const std::int64_t* ids, std::int64_t n, std::uint32_t* slots,
                        Distinct* found, std::int64_t* inverse) {
  return n <= kSmallDedup ? dedup_span_as<false>(ids, n, slots, found, inverse)
                          : dedup_span_as<true>(ids, n, slots, found, inverse);
}

namespace {

// One thread, one table.
class Single final : public Dedup {
 public:
  Single(const std::int64_t* ids, std::int64_t n, std::int64_t* inverse)
      : found_(static_cast<std::size_t>(n) + 1) {
    const Scratch<std::uint32_t> slots(span_slots(n));
    size_ = dedup_span(ids, n, slots.data(), found_.data(), inverse);
  }
  std::int64_t unique() const override { return size_; }
  void write(std::int64_t* ids, std::int64_t* counts) override {
    const Distinct* const found = found_.data() + 1;
    for (std::int64_t r = 0; r < size_; ++r) {
      ids[r] = found[r].id;
      counts[r] = found[r].count;
    }
  }

 private:
  Scratch<Distinct> found_;
  std::int64_t size_ = 0;
};

// All ones when set. Selecting by masks keeps "new or seen before?", which no predictor knows, out
// of the branches.
template <class Word>
Word mask_of(bool set) {
  return static_cast<Word>(-static_cast<Word>(set));
}

template <class Word>
Word choose(Word mask, Word yes, Word no) {
  return (yes & mask) | (no & ~mask);
}

struct Slot {
  std::uint64_t hash;
  std::uint64_t place;  // where the id first stands among the grouped ids, plus 1
};

// A lane's hash table, used for one group after another without clearing: places only grow, so
// what an earlier group left behind is free.
class Table {
 public:
  explicit Table(int group_bits) : skipped_(group_bits) {}

  // Room for `ids` ids of the group that starts at `start`, at a load of a half at most.
  void reserve(std::size_t ids, std::size_t start) {
    if (2 * ids <= slots_.size()) return;
    std::vector<Slot> old(std::bit_ceil(std::max<std::size_t>(2 * ids, 64)));
    old.swap(slots_);
    shift_ = 64 - std::countr_zero(slots_.size());
    for (const Slot& slot : old) {
      if (slot.place > start) this->slot(slot.hash, start) = slot;
    }
  }

  // The slot of a hash, or the free one where it belongs.
  Slot& slot(std::uint64_t hash, std::size_t start) {
    std::size_t at = (hash << skipped_) >> shift_;
    for (;;) {
      Slot& slot = slots_[at];
      if (((slot.hash ^ hash) & mask_of<std::uint64_t>(slot.place > start)) == 0) return slot;
      at = (at + 1) & (slots_.size() - 1);
    }
  }

 private:
  std::vector<Slot> slots_;
  int skipped_;
  int shift_ = 0;
};

// Ids are grouped by the top bits of their hash; each group is searched with a table that fits the
// second cache level; passes in input order rank what they see for the first time. Nothing of the
// result depends on the groups or the threads.
//
// entries_, in the order of the groups, holds for an id seen before the place of its first
// occurrence. For a first occurrence it holds, marked as such, the count, and later the rank.
template <class Index>
class Grouped final : public Dedup {
 public:
  Grouped(const std::int64_t* ids, std::int64_t n, std::int64_t* inverse, int threads)
      : ids_(ids),
        n_(static_cast<std::size_t>(n)),
        inverse_(inverse),
        chunks_(static_cast<std::size_t>(std::max(threads, 1))),
        bits_(std::clamp(static_cast<int>(std::bit_width(n_ / kGroup)), 1, kMostBits)),
        groups_(std::size_t{1} << bits_),
        starts_(groups_ * chunks_ + 1),
        first_(chunks_ + 1),
        places_(n_ + kAhead),
        entries_(n_) {
    const Scratch<std::uint64_t> hashes(n_);
    group(hashes.data());
    std::vector<Table> tables(chunks_, Table(bits_));
    std::vector<std::size_t> fresh(groups_ * chunks_);
    // A lane takes groups in rising order, as its table needs.
    over_groups([&](std::size_t g, int lane) {
      search(hashes.data(), g, tables[lane], &fresh[g * chunks_]);
    });
    for (std::size_t k = 0; k < fresh.size(); ++k) first_[k % chunks_ + 1] += fresh[k];
    for (std::size_t c = 0; c < chunks_; ++c) first_[c + 1] += first_[c];
  }

  std::int64_t unique() const override { return static_cast<std::int64_t>(first_[chunks_]); }

  void write(std::int64_t* ids, std::int64_t* counts) override {
    over_chunks([&](std::size_t chunk, std::size_t begin, std::size_t) {
      rank(chunk, begin, ids, counts);
    });
    over_groups([&](std::size_t g, int) {
      const std::size_t stop = starts_[(g + 1) * chunks_];
      for (std::size_t k = starts_[g * chunks_]; k < stop; ++k) {
        const Index entry = entries_[k];
        const Index place = choose(mask_of<Index>(entry >= kFirst), static_cast<Index>(k), entry);
        entries_[k] = entries_[place] | kFirst;
      }
    });
    over_chunks([&](std::size_t, std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i) {
        inverse_[i] = static_cast<std::int64_t>(entries_[places_[i]] & ~kFirst);
      }
    });
  }

 private:
  static constexpr std::size_t kGroup = 4096;  // ids, about
  static constexpr int kMostBits = 11;
  static constexpr std::size_t kBlock = 4096;
  static constexpr Index kFirst = Index{1} << (sizeof(Index) * 8 - 1);

  template <class Body>
  void over_chunks(const Body& body) {
    const auto chunks = static_cast<int>(chunks_);
    const Shares shares{static_cast<std::int64_t>(n_), chunks};
    over_shares(shares, chunks, [&](std::int64_t chunk, std::int64_t begin, std::int64_t end) {
      body(static_cast<std::size_t>(chunk), static_cast<std::size_t>(begin),
           static_cast<std::size_t>(end));
      return kGood;
    });
  }
  template <class Body>
  void over_groups(const Body& body) {
    Pool::instance().run(
        static_cast<std::int64_t>(groups_), static_cast<int>(chunks_),
        [&](std::int64_t g, int lane) { body(static_cast<std::size_t>(g), lane); });
  }

  // Fills hashes, group by group, in input order inside each, and places_.
  void group(std::uint64_t* hashes) {
    const int shift = 64 - bits_;
    over_chunks([&](std::size_t chunk, std::size_t begin, std::size_t end) {
      std::vector<std::size_t> sizes(groups_, 0);
      for (std::size_t i = begin; i < end; ++i) ++sizes[spread(ids_[i]) >> shift];
      for (std::size_t g = 0; g < groups_; ++g) starts_[g * chunks_ + chunk + 1] = sizes[g];
    });
    for (std::size_t k = 1; k < starts_.size(); ++k) starts_[k] += starts_[k - 1];
    over_chunks([&](std::size_t chunk, std::size_t begin, std::size_t end) {
      std::vector<Index> next(groups_);
      for (std::size_t g = 0; g < groups_; ++g) {
        next[g] = static_cast<Index>(starts_[g * chunks_ + chunk]);
      }
      for (std::size_t i = begin; i < end; ++i) {
        const std::uint64_t hash = spread(ids_[i]);
        const Index place = next[hash >> shift]++;
        hashes[place] = hash;
        places_[i] = place;
      }
    });
    std::fill_n(&places_[n_], kAhead, Index{0});
  }

  // Finds the first occurrences of one group, and counts. fresh [chunks]: how many there are.
  void search(const std::uint64_t* hashes, std::size_t g, Table& table, std::size_t* fresh) {
    const std::size_t start = starts_[g * chunks_];
    std::size_t found = 0;
    for (std::size_t c = 0; c < chunks_; ++c) {
      const std::size_t before = found;
      const std::size_t end = starts_[g * chunks_ + c + 1];
      for (std::size_t at = starts_[g * chunks_ + c]; at < end; at += kBlock) {
        const std::size_t stop = std::min(at + kBlock, end);
        table.reserve(found + 2 * (stop - at), start);
        for (std::size_t k = at; k < stop; ++k) {
          Slot& slot = table.slot(hashes[k], start);
          const auto seen = mask_of<std::uint64_t>(slot.place > start);
          slot = Slot{hashes[k], choose<std::uint64_t>(seen, slot.place, k + 1)};
          const auto place = static_cast<Index>(slot.place - 1);
          entries_[k] = choose(static_cast<Index>(seen), place, kFirst);
          ++entries_[place];
          found += 1 + seen;
        }
      }
      fresh[c] = found - before;
    }
  }

  // In input order: first occurrences get their rank, and the outputs their id and count.
  void rank(std::size_t chunk, std::size_t begin, std::int64_t* ids, std::int64_t* counts) {
    std::size_t rank = first_[chunk];
    const std::size_t last = first_[chunk + 1];
    for (std::size_t i = begin; rank < last; ++i) {
      __builtin_prefetch(&entries_[places_[i + kAhead]], 1);
      Index& entry = entries_[places_[i]];
      const Index first = mask_of<Index>(entry >= kFirst);
      ids[rank] = ids_[i];
      counts[rank] = static_cast<std::int64_t>(entry & ~kFirst);
      entry = choose(first, static_cast<Index>(rank) | kFirst, entry);
      rank += first & 1;
    }
  }

  const std::int64_t* ids_;
  std::size_t n_;
  std::int64_t* inverse_;
  std::size_t chunks_;
  int bits_;
  std::size_t groups_;
  std::vector<std::size_t> starts_;  // [groups, chunks], then the end
  std::vector<std::size_t> first_;   // [chunks + 1]: rank of the chunk's first new id
  Scratch<Index> places_;            // [n] of each id among the grouped, then some to look ahead
  Scratch<Index> entries_;           // [n]
};

}  // namespace

std::unique_ptr<Dedup> Dedup::of(const std::int64_t* ids, std::int64_t n, std::int64_t* inverse,
                                 int threads) {
  if (dedup_alone(n, threads)) {
    return std::make_unique<Single>(ids, n, inverse);
  }
  if (n < std::int64_t{1} << 31) {
    return std::make_unique<Grouped<std::uint32_t>>(ids, n, inverse, threads);
  }
  return std::make_unique<Grouped<std::uint64_t>>(ids, n, inverse, threads);
}

std::int64_t normalize_merged_split(const std::int64_t* splits, std::int64_t total,
                                    const std::int64_t* sizes, std::int64_t parts,
                                    std::int64_t* out) {
  std::int64_t at = 0;
  for (std::int64_t p = 0; p < parts; ++p) {
    if (sizes[p] < 1 || sizes[p] > total - at) return total + p;
    if (splits[at] != 0) return at;
    for (std::int64_t k = 1; k < sizes[p]; ++k) {
      if (splits[at + k] < splits[at + k - 1]) return at + k;
    }
    at += sizes[p];
  }
  if (at != total) return total + parts - 1;
  std::int64_t base = 0;
  *out = 0;
  for (std::int64_t p = 0; p < parts; ++p) {
    for (std::int64_t k = 1; k < sizes[p]; ++k) *++out = base + splits[k];
    base += splits[sizes[p] - 1];
    splits += sizes[p];
  }
  return kGood;
}

}  // namespace shoal
