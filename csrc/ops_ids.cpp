#include "ops_ids.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "pool.h"

namespace shoal {
namespace {

constexpr std::int64_t kAhead = 16;
constexpr std::int64_t kSingleDedup = std::int64_t{1} << 21;
constexpr std::size_t kPartition = 4096;  // ids, about

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
  return std::bit_ceil(static_cast<std::size_t>(std::max<std::int64_t>(n, 8)) * 3);
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

struct Slot {
  std::uint64_t hash;
  std::uint64_t number;  // of the id, over all partitions; free when the partition starts later
};

// A lane's hash table, used for one partition after another without clearing: numbers only grow.
class Table {
 public:
  explicit Table(int partition_bits) : skipped_(partition_bits) {}

  // Room for `more` ids beside those numbered in [first, next), at a load of a half at most.
  void reserve(std::uint64_t first, std::uint64_t next, std::size_t more) {
    const std::size_t slots = 2 * (next - first + more);
    if (slots <= slots_.size()) return;
    std::vector<Slot> old(std::bit_ceil(std::max<std::size_t>(slots, 64)));
    old.swap(slots_);
    shift_ = 64 - std::countr_zero(slots_.size());
    for (const Slot& slot : old) {
      if (slot.number >= first) this->slot(slot.hash, first) = slot;
    }
  }

  // The slot of a hash, or the free one where it belongs.
  Slot& slot(std::uint64_t hash, std::uint64_t first) {
    std::size_t at = (hash << skipped_) >> shift_;
    for (;;) {
      Slot& slot = slots_[at];
      if (((slot.hash ^ hash) & mask_of<std::uint64_t>(slot.number >= first)) == 0) return slot;
      at = (at + 1) & (slots_.size() - 1);
    }
  }

 private:
  std::vector<Slot> slots_;
  int skipped_;
  int shift_ = 0;
};

// Ids are grouped by the top bits of their hash; each group is numbered with a table that fits the
// second cache level; passes in input order turn those numbers into ranks of first appearance.
// Nothing of the result depends on the groups or the threads.
template <class Index, class Part>
class Partitioned final : public Dedup {
 public:
  Partitioned(const std::int64_t* ids, std::int64_t n, std::int64_t* inverse, int bits, int threads)
      : ids_(ids),
        n_(static_cast<std::size_t>(n)),
        inverse_(inverse),
        chunks_(static_cast<std::size_t>(threads)),
        bits_(bits),
        n_parts_(std::size_t{1} << bits_),
        starts_(n_parts_ * chunks_ + 1),
        first_(chunks_ + 1),
        lanes_(chunks_, Lane{Table(bits_), {}, {}}),
        parts_(n_),
        local_(n_) {
    const Scratch<std::uint64_t> hashes(n_);
    group(hashes.data());
    std::vector<std::size_t> fresh(n_parts_ * chunks_);
    over_parts([&](std::size_t part, Lane& lane) {
      number(hashes.data(), part, lane, &fresh[part * chunks_]);
    });
    for (std::size_t k = 0; k < fresh.size(); ++k) first_[k % chunks_ + 1] += fresh[k];
    for (std::size_t c = 0; c < chunks_; ++c) first_[c + 1] += first_[c];
  }

  std::int64_t unique() const override { return static_cast<std::int64_t>(first_[chunks_]); }

  void write(std::int64_t* ids, std::int64_t* counts) override {
    over_chunks([&](std::size_t chunk) { rank_new(chunk, ids, counts); });
    over_parts([&](std::size_t part, Lane& lane) { rank_all(part, lane.ranks); });
    over_chunks([&](std::size_t chunk) {
      std::vector<Index*> next = cursors(local_.data(), chunk);
      const std::size_t stop = edge(chunk + 1);
      for (std::size_t i = edge(chunk); i < stop; ++i) inverse_[i] = *next[parts_[i]]++;
    });
  }

 private:
  static constexpr std::size_t kBlock = 4096;
  static constexpr Index kNew = Index{1} << (sizeof(Index) * 8 - 1);

  struct Lane {
    Table table;
    std::vector<Index> ranks;  // counts while numbering
    std::vector<Index> where;  // of each distinct id, its first place
  };

  std::size_t edge(std::size_t chunk) const {
    return n_ / chunks_ * chunk + std::min(chunk, n_ % chunks_);
  }
  template <class T>
  std::vector<T*> cursors(T* grouped, std::size_t chunk) const {
    std::vector<T*> next(n_parts_);
    for (std::size_t p = 0; p < n_parts_; ++p) next[p] = grouped + starts_[p * chunks_ + chunk];
    return next;
  }
  template <class Body>
  void over_chunks(const Body& body) {
    const auto chunks = static_cast<int>(chunks_);
    Pool::instance().run(chunks, chunks,
                         [&](std::int64_t chunk, int) { body(static_cast<std::size_t>(chunk)); });
  }
  // A lane takes parts in rising order, as its table needs.
  template <class Body>
  void over_parts(const Body& body) {
    Pool::instance().run(static_cast<std::int64_t>(n_parts_), static_cast<int>(chunks_),
                         [&](std::int64_t part, int lane) {
                           body(static_cast<std::size_t>(part), lanes_[lane]);
                         });
  }

  // Fills hashes, partition by partition, in input order inside each.
  void group(std::uint64_t* hashes) {
    over_chunks([&](std::size_t chunk) {
      std::vector<std::size_t> sizes(n_parts_, 0);
      const std::size_t stop = edge(chunk + 1);
      for (std::size_t i = edge(chunk); i < stop; ++i) {
        const auto part = static_cast<Part>(spread(ids_[i]) >> (64 - bits_));
        parts_[i] = part;
        ++sizes[part];
      }
      for (std::size_t p = 0; p < n_parts_; ++p) starts_[p * chunks_ + chunk + 1] = sizes[p];
    });
    for (std::size_t k = 1; k < starts_.size(); ++k) starts_[k] += starts_[k - 1];
    over_chunks([&](std::size_t chunk) {
      std::vector<std::uint64_t*> next = cursors(hashes, chunk);
      const std::size_t stop = edge(chunk + 1);
      for (std::size_t i = edge(chunk); i < stop; ++i) *next[parts_[i]]++ = spread(ids_[i]);
    });
  }

  // Numbers the distinct ids of one partition as they appear. Leaves in local_ the number of an
  // id seen before, and the count of a new one, marked as such. fresh [chunks].
  void number(const std::uint64_t* hashes, std::size_t part, Lane& lane, std::size_t* fresh) {
    const std::size_t start = starts_[part * chunks_];
    std::uint64_t next = start + 1;  // 0 is what an unused slot holds
    for (std::size_t c = 0; c < chunks_; ++c) {
      const std::uint64_t before = next;
      const std::size_t stop = starts_[part * chunks_ + c + 1];
      for (std::size_t k = starts_[part * chunks_ + c]; k < stop; k += kBlock) {
        next = number_block(hashes, k, std::min(k + kBlock, stop), start + 1, next, lane);
      }
      fresh[c] = next - before;
    }
    for (std::size_t r = 0; r < next - start - 1; ++r) {
      local_[lane.where[r]] = lane.ranks[r] | kNew;
    }
  }

  std::uint64_t number_block(const std::uint64_t* hashes, std::size_t start, std::size_t stop,
                             std::uint64_t first, std::uint64_t next, Lane& lane) {
    lane.table.reserve(first, next, 2 * (stop - start));
    const std::size_t room = next - first + (stop - start);
    if (lane.ranks.size() <= room) {
      lane.ranks.resize(2 * room + 1);
      lane.where.resize(2 * room + 1);
    }
    Index* const counts = lane.ranks.data();
    Index* const where = lane.where.data();
    for (std::size_t k = start; k < stop; ++k) {
      const std::uint64_t hash = hashes[k];
      Slot& slot = lane.table.slot(hash, first);
      const std::uint64_t seen = mask_of<std::uint64_t>(slot.number >= first);
      const std::uint64_t number = (slot.number & seen) | (next & ~seen);
      slot = Slot{hash, number};
      Index& count = counts[number - first];
      count = (count & static_cast<Index>(seen)) + 1;
      where[next - first] = static_cast<Index>(k);
      next -= ~seen;
      local_[k] = static_cast<Index>(number - first);
    }
    return next;
  }

  // In input order: ranks what is new, into the outputs and into local_.
  void rank_new(std::size_t chunk, std::int64_t* ids, std::int64_t* counts) {
    std::vector<Index*> next = cursors(local_.data(), chunk);
    std::size_t rank = first_[chunk];
    const std::size_t last = first_[chunk + 1];
    for (std::size_t i = edge(chunk); rank < last; ++i) {
      Index*& at = next[parts_[i]];
      __builtin_prefetch(at + 32, 1);
      const Index entry = *at;
      const Index is_new = mask_of<Index>((entry & kNew) != 0);
      ids[rank] = ids_[i];
      counts[rank] = entry & ~kNew;
      *at++ = (entry & ~is_new) | ((static_cast<Index>(rank) | kNew) & is_new);
      rank += is_new & 1;
    }
  }

  // Partition by partition: numbers become ranks.
  void rank_all(std::size_t part, std::vector<Index>& ranks) {
    const std::size_t start = starts_[part * chunks_];
    const std::size_t stop = starts_[(part + 1) * chunks_];
    if (ranks.size() <= stop - start) ranks.resize(stop - start + 1);
    Index* const table = ranks.data();
    std::size_t found = 0;
    for (std::size_t k = start; k < stop; ++k) {
      const Index entry = local_[k];
      const Index is_new = mask_of<Index>((entry & kNew) != 0);
      table[found] = entry & ~kNew;
      found += is_new & 1;
      const Index old = table[entry & ~is_new];
      local_[k] = (entry & ~kNew & is_new) | (old & ~is_new);
    }
  }

  const std::int64_t* ids_;
  std::size_t n_;
  std::int64_t* inverse_;
  std::size_t chunks_;
  int bits_;
  std::size_t n_parts_;
  std::vector<std::size_t> starts_;  // [n_parts, chunks], then the end
  std::vector<std::size_t> first_;   // [chunks + 1]: rank of the chunk's first new id
  std::vector<Lane> lanes_;
  Scratch<Part> parts_;   // [n]: partition of each id
  Scratch<Index> local_;  // [n], grouped as the hashes
};

}  // namespace

std::unique_ptr<Dedup> Dedup::of(const std::int64_t* ids, std::int64_t n, std::int64_t* inverse,
                                 int threads) {
  if (n <= kSmallDedup || (threads <= 1 && n <= kSingleDedup)) {
    return std::make_unique<Single>(ids, n, inverse);
  }
  const std::size_t parts = static_cast<std::size_t>(n) / kPartition;
  const int bits = std::clamp(static_cast<int>(std::bit_width(parts)), 1, 11);
  threads = std::max(threads, 1);
  if (bits <= 8) {
    return std::make_unique<Partitioned<std::uint32_t, std::uint8_t>>(ids, n, inverse, bits,
                                                                      threads);
  }
  if (n < std::int64_t{1} << 31) {
    return std::make_unique<Partitioned<std::uint32_t, std::uint16_t>>(ids, n, inverse, bits,
                                                                       threads);
  }
  return std::make_unique<Partitioned<std::uint64_t, std::uint16_t>>(ids, n, inverse, bits,
                                                                     threads);
}

std::int64_t value_rowids(const std::int64_t* offsets, std::int64_t rows, std::int64_t n,
                          std::int64_t* out, int threads) {
  constexpr std::int64_t kChunk = std::int64_t{1} << 16;
  if (offsets[0] != 0) return 0;
  for (std::int64_t r = 0; r < rows; ++r) {
    if (offsets[r + 1] < offsets[r]) return r + 1;
  }
  if (offsets[rows] != n) return rows;
  Pool::instance().run((n + kChunk - 1) / kChunk, threads, [&](std::int64_t chunk, int) {
    std::int64_t at = chunk * kChunk;
    const std::int64_t stop = std::min(at + kChunk, n);
    std::int64_t row = std::upper_bound(offsets, offsets + rows + 1, at) - offsets - 1;
    for (; at < stop; ++row) {
      const std::int64_t end = std::min(offsets[row + 1], stop);
      for (; at < end; ++at) out[at] = row;
    }
  });
  return kGood;
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
