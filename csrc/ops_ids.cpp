#include "ops_ids.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "pool.h"

namespace shoal {
namespace {

// All ones when set. Selecting by masks keeps "new or seen before?", which no predictor knows, out
// of the branches.
template <class Word>
Word mask_of(bool set) {
  return static_cast<Word>(-static_cast<Word>(set));
}

}  // namespace

std::size_t small_slots(std::int64_t n) {
  return std::bit_ceil(static_cast<std::size_t>(std::max<std::int64_t>(n, 8)) * 2);
}

std::int64_t dedup_small(const std::int64_t* ids, std::int64_t n, std::uint32_t* slots,
                         std::int64_t* unique, std::int64_t* counts, std::int64_t* inverse) {
  const std::size_t n_slots = small_slots(n);
  const int shift = 64 - std::countr_zero(n_slots);
  std::memset(slots, 0, n_slots * sizeof(std::uint32_t));
  std::uint32_t found = 0;
  unique[0] = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t id = ids[i];
    std::size_t at = spread(id) >> shift;
    std::uint32_t seen = slots[at];
    while (((unique[seen] ^ id) & mask_of<std::int64_t>(seen != 0)) != 0) {
      at = (at + 1) & (n_slots - 1);
      seen = slots[at];
    }
    const bool is_new = seen == 0;
    found += is_new;
    const std::uint32_t rank = seen | (found & mask_of<std::uint32_t>(is_new));
    slots[at] = rank;
    unique[rank] = id;
    counts[rank] = (counts[rank] & mask_of<std::int64_t>(!is_new)) + 1;
    inverse[i] = rank - 1;
  }
  return found;
}

namespace {

class Small final : public Dedup {
 public:
  Small(const std::int64_t* ids, std::int64_t n, std::int64_t* inverse)
      : unique_(static_cast<std::size_t>(n) + 1), counts_(static_cast<std::size_t>(n) + 1) {
    const Scratch<std::uint32_t> slots(small_slots(n));
    found_ = dedup_small(ids, n, slots.data(), unique_.data(), counts_.data(), inverse);
  }
  std::int64_t unique() const override { return found_; }
  void write(std::int64_t* ids, std::int64_t* counts) override {
    std::copy_n(unique_.data() + 1, found_, ids);
    std::copy_n(counts_.data() + 1, found_, counts);
  }

 private:
  Scratch<std::int64_t> unique_;
  Scratch<std::int64_t> counts_;
  std::int64_t found_ = 0;
};

struct Slot {
  std::uint64_t hash;
  std::uint32_t owner;  // partition + 1; what another partition left behind is free
  std::uint32_t rank;
};

// A lane's hash table, used for one partition after another without clearing.
class Table {
 public:
  explicit Table(int partition_bits) : skipped_(partition_bits) {}

  // Room for `more` ids of a partition that holds `found`, at a load of a half at most.
  void reserve(std::size_t found, std::size_t more, std::uint32_t owner) {
    if (2 * (found + more) <= slots_.size()) return;
    std::vector<Slot> old(std::bit_ceil(std::max<std::size_t>(2 * (found + more), 64)));
    old.swap(slots_);
    shift_ = 64 - std::countr_zero(slots_.size());
    for (const Slot& slot : old) {
      if (slot.owner == owner) entry(slot.hash, owner) = slot;
    }
  }

  // The slot of a hash, or the free one where it belongs.
  Slot& entry(std::uint64_t hash, std::uint32_t owner) {
    std::size_t at = (hash << skipped_) >> shift_;
    for (;;) {
      Slot& slot = slots_[at];
      if (((slot.hash ^ hash) & mask_of<std::uint64_t>(slot.owner == owner)) == 0) return slot;
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
template <class Index>
class Partitioned final : public Dedup {
 public:
  Partitioned(const std::int64_t* ids, std::int64_t n, std::int64_t* inverse, int threads)
      : ids_(ids),
        n_(static_cast<std::size_t>(n)),
        inverse_(inverse),
        chunks_(std::max(threads, 1)),
        bits_(std::clamp(static_cast<int>(std::bit_width(n_ / kPartition)), 1, kMostBits)),
        parts_(std::size_t{1} << bits_),
        starts_(parts_ * chunks_ + 1),
        first_(chunks_ + 1),
        lanes_(chunks_, Lane{Table(bits_), {}, {}}),
        local_(n_) {
    const Scratch<std::uint64_t> hashes(n_);
    group(hashes.data());
    std::vector<std::size_t> fresh(parts_ * chunks_);
    Pool::instance().run(static_cast<std::int64_t>(parts_), chunks_,
                         [&](std::int64_t part, int lane) {
                           number(hashes.data(), static_cast<std::size_t>(part), lanes_[lane],
                                  &fresh[static_cast<std::size_t>(part) * chunks_]);
                         });
    for (std::size_t k = 0; k < fresh.size(); ++k) first_[k % chunks_ + 1] += fresh[k];
    for (std::size_t c = 0; c < chunks_; ++c) first_[c + 1] += first_[c];
  }

  std::int64_t unique() const override { return static_cast<std::int64_t>(first_[chunks_]); }

  void write(std::int64_t* ids, std::int64_t* counts) override {
    const int threads = static_cast<int>(chunks_);
    Pool::instance().run(threads, threads, [&](std::int64_t chunk, int) {
      rank_new(static_cast<std::size_t>(chunk), ids, counts);
    });
    Pool::instance().run(static_cast<std::int64_t>(parts_), threads,
                         [&](std::int64_t part, int lane) {
                           rank_all(static_cast<std::size_t>(part), lanes_[lane].ranks);
                         });
    Pool::instance().run(threads, threads, [&](std::int64_t chunk, int) {
      std::vector<Index*> next = cursors(static_cast<std::size_t>(chunk));
      const std::size_t stop = edge(static_cast<std::size_t>(chunk) + 1);
      for (std::size_t i = edge(static_cast<std::size_t>(chunk)); i < stop; ++i) {
        inverse_[i] = *next[part_of(spread(ids_[i]))]++;
      }
    });
  }

 private:
  static constexpr std::size_t kPartition = 4096;
  static constexpr int kMostBits = 11;
  static constexpr std::size_t kBlock = 4096;
  static constexpr Index kNew = Index{1} << (sizeof(Index) * 8 - 1);

  struct Lane {
    Table table;
    std::vector<Index> ranks;        // counts while numbering
    std::vector<std::size_t> where;  // of each distinct id, its first place
  };

  std::size_t edge(std::size_t chunk) const {
    return n_ / chunks_ * chunk + std::min(chunk, n_ % chunks_);
  }
  std::size_t part_of(std::uint64_t hash) const { return hash >> (64 - bits_); }
  std::vector<Index*> cursors(std::size_t chunk) const {
    std::vector<Index*> next(parts_);
    for (std::size_t p = 0; p < parts_; ++p) next[p] = &local_[starts_[p * chunks_ + chunk]];
    return next;
  }

  // Fills hashes, partition by partition, in input order inside each.
  void group(std::uint64_t* hashes) {
    const int threads = static_cast<int>(chunks_);
    Pool::instance().run(threads, threads, [&](std::int64_t item, int) {
      const auto chunk = static_cast<std::size_t>(item);
      std::vector<std::size_t> sizes(parts_, 0);
      const std::size_t stop = edge(chunk + 1);
      for (std::size_t i = edge(chunk); i < stop; ++i) ++sizes[part_of(spread(ids_[i]))];
      for (std::size_t p = 0; p < parts_; ++p) starts_[p * chunks_ + chunk + 1] = sizes[p];
    });
    for (std::size_t k = 1; k < starts_.size(); ++k) starts_[k] += starts_[k - 1];
    Pool::instance().run(threads, threads, [&](std::int64_t item, int) {
      const auto chunk = static_cast<std::size_t>(item);
      std::vector<std::uint64_t*> next(parts_);
      for (std::size_t p = 0; p < parts_; ++p) next[p] = hashes + starts_[p * chunks_ + chunk];
      const std::size_t stop = edge(chunk + 1);
      for (std::size_t i = edge(chunk); i < stop; ++i) {
        const std::uint64_t hash = spread(ids_[i]);
        std::uint64_t*& to = next[part_of(hash)];
        __builtin_prefetch(to + 16, 1);
        *to++ = hash;
      }
    });
  }

  // Numbers the distinct ids of one partition 0, 1, ... as they appear. Leaves in local_ the
  // number of an id seen before, and the count of a new one, marked as such. fresh [chunks].
  void number(const std::uint64_t* hashes, std::size_t part, Lane& lane, std::size_t* fresh) {
    const auto owner = static_cast<std::uint32_t>(part + 1);
    std::size_t found = 0;
    for (std::size_t c = 0; c < chunks_; ++c) {
      const std::size_t before = found;
      const std::size_t stop = starts_[part * chunks_ + c + 1];
      for (std::size_t k = starts_[part * chunks_ + c]; k < stop; k += kBlock) {
        found = number_block(hashes, k, std::min(k + kBlock, stop), owner, found, lane);
      }
      fresh[c] = found - before;
    }
    for (std::size_t r = 0; r < found; ++r) local_[lane.where[r]] = lane.ranks[r] | kNew;
  }

  std::size_t number_block(const std::uint64_t* hashes, std::size_t start, std::size_t stop,
                           std::uint32_t owner, std::size_t found, Lane& lane) {
    const std::size_t room = found + (stop - start);
    lane.table.reserve(found, 2 * (stop - start), owner);
    if (lane.ranks.size() <= room) {
      lane.ranks.resize(2 * room + 1);
      lane.where.resize(2 * room + 1);
    }
    Index* const counts = lane.ranks.data();
    std::size_t* const where = lane.where.data();
    for (std::size_t k = start; k < stop; ++k) {
      Slot& slot = lane.table.entry(hashes[k], owner);
      const bool is_new = slot.owner != owner;
      const auto rank = static_cast<std::uint32_t>(
          (slot.rank & mask_of<std::uint32_t>(!is_new)) |
          (static_cast<std::uint32_t>(found) & mask_of<std::uint32_t>(is_new)));
      slot = Slot{hashes[k], owner, rank};
      counts[rank] = (counts[rank] & mask_of<Index>(!is_new)) + 1;
      where[found] = k;
      found += is_new;
      local_[k] = rank;
    }
    return found;
  }

  // In input order: ranks what is new, into the outputs and into local_.
  void rank_new(std::size_t chunk, std::int64_t* ids, std::int64_t* counts) {
    std::vector<Index*> next = cursors(chunk);
    std::size_t rank = first_[chunk];
    const std::size_t last = first_[chunk + 1];
    for (std::size_t i = edge(chunk); rank < last; ++i) {
      const std::int64_t id = ids_[i];
      Index*& at = next[part_of(spread(id))];
      const Index entry = *at;
      const Index is_new = mask_of<Index>((entry & kNew) != 0);
      ids[rank] = id;
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
  std::size_t parts_;
  std::vector<std::size_t> starts_;  // [parts, chunks], then the end
  std::vector<std::size_t> first_;   // [chunks + 1]: rank of the chunk's first new id
  std::vector<Lane> lanes_;
  Scratch<Index> local_;
};

}  // namespace

std::unique_ptr<Dedup> Dedup::of(const std::int64_t* ids, std::int64_t n, std::int64_t* inverse,
                                 int threads) {
  if (n <= kSmallDedup) return std::make_unique<Small>(ids, n, inverse);
  if (n < std::int64_t{1} << 31) {
    return std::make_unique<Partitioned<std::uint32_t>>(ids, n, inverse, threads);
  }
  return std::make_unique<Partitioned<std::uint64_t>>(ids, n, inverse, threads);
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
