#include "ops_reorder.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "hash.h"
#include "ops_partition.h"

namespace shoal {
namespace {

constexpr std::int64_t kWorthThreads = std::int64_t{1} << 15;
constexpr std::int64_t kRowsAhead = 16;

// x modulo a divisor below 2^31, by multiplication: q is the quotient or one less.
class Modulo {
 public:
  explicit Modulo(std::int64_t divisor)
      : divisor_(static_cast<std::uint64_t>(divisor)),
        inverse_(~std::uint64_t{0} / divisor_),
        wrap_((~std::uint64_t{0} % divisor_ + 1) % divisor_) {}

  std::uint64_t of_unsigned(std::uint64_t x) const {
    __extension__ using Wide = unsigned __int128;
    const auto q = static_cast<std::uint64_t>((static_cast<Wide>(x) * inverse_) >> 64);
    const std::uint64_t r = x - q * divisor_;
    return r >= divisor_ ? r - divisor_ : r;
  }

  // As Python's %: a negative id read as unsigned is 2^64 too large.
  std::uint64_t of_signed(std::int64_t x) const {
    const std::uint64_t r = of_unsigned(static_cast<std::uint64_t>(x));
    if (x >= 0) return r;
    return r >= wrap_ ? r - wrap_ : r + divisor_ - wrap_;
  }

 private:
  std::uint64_t divisor_;
  std::uint64_t inverse_;
  std::uint64_t wrap_;  // 2^64 modulo the divisor
};

// Moves rows [start, stop) of kBytes, 0: of any length; returns the first bad position or kGood.
template <std::size_t kBytes, bool kTake>
std::int64_t move_span(const char* rows, const std::int64_t* order, std::int64_t start,
                       std::int64_t stop, std::int64_t n, std::size_t bytes, char* out) {
  if constexpr (kBytes != 0) bytes = kBytes;
  for (std::int64_t i = start; i < stop; ++i) {
    if (i + kRowsAhead < stop) {
      // An address beyond the rows is never read, only fetched in vain.
      const auto far = reinterpret_cast<std::uintptr_t>(kTake ? rows : out) +
                       static_cast<std::size_t>(order[i + kRowsAhead]) * bytes;
      __builtin_prefetch(reinterpret_cast<const char*>(far), kTake ? 0 : 1);
    }
    const std::int64_t row = order[i];
    if (static_cast<std::uint64_t>(row) >= static_cast<std::uint64_t>(n)) return i;
    const std::size_t near = static_cast<std::size_t>(i) * bytes;
    const std::size_t far = static_cast<std::size_t>(row) * bytes;
    __builtin_memcpy(out + (kTake ? near : far), rows + (kTake ? far : near), bytes);
  }
  return kGood;
}

using Move = std::int64_t (*)(const char*, const std::int64_t*, std::int64_t, std::int64_t,
                              std::int64_t, std::size_t, char*);

template <bool kTake>
Move mover(std::size_t bytes) {
  switch (bytes) {
    case 2: return move_span<2, kTake>;
    case 4: return move_span<4, kTake>;
    case 8: return move_span<8, kTake>;
    case 16: return move_span<16, kTake>;
    case 32: return move_span<32, kTake>;
    case 64: return move_span<64, kTake>;
    case 128: return move_span<128, kTake>;
    case 256: return move_span<256, kTake>;
    default: return move_span<0, kTake>;
  }
}

}  // namespace

template <class Shard>
std::int64_t partition(const Shard* shards, std::int64_t n, std::int64_t num, std::int64_t* order,
                       std::int64_t* sizes, int threads) {
  // A counter for each chunk and shard, which must stay few against the ids.
  const std::int64_t most = n < kWorthThreads ? 1 : std::max<std::int64_t>(1, n / (4 * num));
  const Shares shares{n, std::clamp<std::int64_t>(threads, 1, most)};
  std::vector<std::int64_t> starts(static_cast<std::size_t>(num) + 1);
  const auto room = [order](std::int64_t) { return order; };
  const std::int64_t bad = partition_into<std::int64_t>(
      shares, num, threads, starts.data(), room,
      [shards, num](std::int64_t begin, std::int64_t end, auto put) -> std::int64_t {
        for (std::int64_t i = begin; i < end; ++i) {
          const auto shard = static_cast<std::int64_t>(shards[i]);
          if (shard < 0 || shard >= num) return i;
          put(shard, i);
        }
        return kGood;
      });
  if (bad != kGood) return bad;
  for (std::int64_t s = 0; s < num; ++s) sizes[s] = starts[s + 1] - starts[s];
  return kGood;
}

template std::int64_t partition(const std::int32_t*, std::int64_t, std::int64_t, std::int64_t*,
                                std::int64_t*, int);
template std::int64_t partition(const std::int64_t*, std::int64_t, std::int64_t, std::int64_t*,
                                std::int64_t*, int);

std::int64_t move_rows(const char* rows, const std::int64_t* order, std::int64_t n,
                       std::size_t bytes, bool take, char* out, int threads) {
  const Move move = take ? mover<true>(bytes) : mover<false>(bytes);
  const bool parallel = n * static_cast<std::int64_t>(bytes) >= kWorthThreads;
  const Shares shares{n, parallel ? std::min<std::int64_t>(n, threads * 4) : 1};
  return first_bad(shares, threads, [&](std::int64_t begin, std::int64_t end) {
    return move(rows, order, begin, end, n, bytes, out);
  });
}

FusedReorder::FusedReorder(IdLists lists, std::int64_t num_shards, ShardRule rule,
                           const std::int64_t* shards, std::int64_t* offsets, int threads)
    : lists_(std::move(lists)),
      num_shards_(num_shards),
      rule_(rule),
      shards_(shards),
      offsets_(offsets),
      threads_(std::max(threads, 1)),
      starts_(lists_.ids.size() + 1, 0),
      found_(lists_.ids.size()),
      sizes_(lists_.ids.size() * static_cast<std::size_t>(num_shards), 0),
      rows_(sizes_.size()),
      floats_(sizes_.size()),
      distinct_(static_cast<std::size_t>(std::accumulate(
          lists_.lengths.begin(), lists_.lengths.end(), std::int64_t{0})) + lists_.ids.size()),
      owners_(distinct_.size()) {
  const std::size_t k_lists = lists_.ids.size();
  std::partial_sum(lists_.lengths.begin(), lists_.lengths.end(), starts_.begin() + 1);
  if (rule_ == ShardRule::given) bad_ = first_bad_shard();
  if (bad_ != kGood) return;
  std::int64_t longest = 0;
  for (std::size_t k = 0; k < k_lists; ++k) {
    if (small(k)) {
      longest = std::max(longest, lists_.lengths[k]);
    } else {
      dedup_list(k, nullptr);  // uses all threads itself
    }
  }
  const std::size_t slots = span_slots(longest);
  const Scratch<std::uint32_t> tables(slots * static_cast<std::size_t>(threads_));
  Pool::instance().run(static_cast<std::int64_t>(k_lists), threads_, [&](std::int64_t k, int lane) {
    const auto list = static_cast<std::size_t>(k);
    if (small(list)) dedup_list(list, &tables[slots * static_cast<std::size_t>(lane)]);
    shard_list(list);
  });
  std::int64_t float_at = 0;
  for (std::size_t s = 0; s < static_cast<std::size_t>(num_shards_); ++s) {
    for (std::size_t k = 0; k < k_lists; ++k) {
      const std::size_t group = k * static_cast<std::size_t>(num_shards_) + s;
      rows_[group] = unique_;
      floats_[group] = float_at;
      unique_ += sizes_[group];
      float_at += sizes_[group] * lists_.dims[k];
    }
  }
}

// Looked for before anything is written, so that a bad one leaves the caller's offsets as they were.
std::int64_t FusedReorder::first_bad_shard() const {
  const auto k_lists = static_cast<std::int64_t>(lists_.ids.size());
  return first_bad({k_lists, k_lists}, threads_, [&](std::int64_t k, std::int64_t) {
    const auto list = static_cast<std::size_t>(k);
    for (std::int64_t i = starts_[list]; i < starts_[list + 1]; ++i) {
      if (static_cast<std::uint64_t>(shards_[i]) >= static_cast<std::uint64_t>(num_shards_)) {
        return i;
      }
    }
    return kGood;
  });
}

void FusedReorder::dedup_list(std::size_t list, std::uint32_t* slots) {
  const std::int64_t n = lists_.lengths[list];
  Distinct* const distinct = distinct_.data() + starts_[list] + list;
  std::int64_t* const inverse = offsets_ + starts_[list];
  if (slots != nullptr) {
    found_[list] = dedup_span(lists_.ids[list], n, slots, distinct, inverse);
    return;
  }
  const auto dedup = Dedup::of(lists_.ids[list], n, inverse, threads_);
  found_[list] = dedup->unique();
  const Scratch<std::int64_t> ids(static_cast<std::size_t>(found_[list]));
  const Scratch<std::int64_t> counts(static_cast<std::size_t>(found_[list]));
  dedup->write(ids.data(), counts.data());
  for (std::size_t u = 0; u < static_cast<std::size_t>(found_[list]); ++u) {
    distinct[u + 1] = Distinct{ids[u], counts[u]};
  }
}

// Shard of each distinct id: by rule, or what was given where it first appears.
void FusedReorder::shard_list(std::size_t list) {
  const Distinct* const distinct = distinct_.data() + starts_[list] + list + 1;
  std::uint32_t* const owners = owners_.data() + starts_[list] + list + 1;
  std::int64_t* const sizes = &sizes_[list * static_cast<std::size_t>(num_shards_)];
  if (rule_ == ShardRule::given) {
    std::int64_t found = 0;
    for (std::int64_t i = starts_[list]; i < starts_[list + 1]; ++i) {
      if (offsets_[i] == found) {
        owners[found++] = static_cast<std::uint32_t>(shards_[i]);
        ++sizes[shards_[i]];
      }
    }
    return;
  }
  if (rule_ == ShardRule::hash_ranges) {
    const std::int64_t* const line = shards_ + list * (2 + static_cast<std::size_t>(num_shards_));
    const auto salt = static_cast<std::uint64_t>(line[0]);
    const auto shares = static_cast<std::uint64_t>(line[1]);
    for (std::int64_t u = 0; u < found_[list]; ++u) {
      const std::uint64_t hash = hash_of(distinct[u].id, salt);
      const std::int64_t shard = line[2 + (((hash >> 48) * shares) >> 16)];
      owners[u] = static_cast<std::uint32_t>(shard);
      ++sizes[shard];
    }
    return;
  }
  const Modulo modulo(num_shards_);
  for (std::int64_t u = 0; u < found_[list]; ++u) {
    const std::int64_t id = distinct[u].id;
    const std::uint64_t shard = rule_ == ShardRule::floormod
                                    ? modulo.of_signed(id)
                                    : modulo.of_unsigned(static_cast<std::uint64_t>(id));
    owners[u] = static_cast<std::uint32_t>(shard);
    ++sizes[shard];
  }
}

// Puts the distinct ids of one list at their rows; leaves in distinct_ where each row starts.
void FusedReorder::place(std::size_t list, std::int64_t* ids, std::int64_t* counts) {
  Distinct* const distinct = distinct_.data() + starts_[list] + list + 1;
  const std::uint32_t* const owners = owners_.data() + starts_[list] + list + 1;
  std::int64_t* const rows = &rows_[list * static_cast<std::size_t>(num_shards_)];
  std::int64_t* const floats = &floats_[list * static_cast<std::size_t>(num_shards_)];
  const std::int64_t dim = lists_.dims[list];
  for (std::int64_t u = 0; u < found_[list]; ++u) {
    const std::uint32_t shard = owners[u];
    const std::int64_t row = rows[shard]++;
    ids[row] = distinct[u].id;
    counts[row] = distinct[u].count;
    distinct[u].id = floats[shard];
    floats[shard] += dim;
  }
}

void FusedReorder::write(std::int64_t* ids, std::int64_t* counts, std::int64_t* sizes) {
  const std::size_t k_lists = lists_.ids.size();
  for (std::size_t k = 0; k < k_lists; ++k) {
    for (std::size_t s = 0; s < static_cast<std::size_t>(num_shards_); ++s) {
      sizes[s * k_lists + k] = sizes_[k * static_cast<std::size_t>(num_shards_) + s];
    }
  }
  const auto map = [this](std::size_t list, std::int64_t start, std::int64_t stop) {
    const Distinct* const at = distinct_.data() + starts_[list] + list + 1;
    for (std::int64_t i = start; i < stop; ++i) offsets_[i] = at[offsets_[i]].id;
  };
  Pool::instance().run(static_cast<std::int64_t>(k_lists), threads_, [&](std::int64_t k, int) {
    const auto list = static_cast<std::size_t>(k);
    place(list, ids, counts);
    if (small(list)) map(list, starts_[list], starts_[list + 1]);
  });
  for (std::size_t list = 0; list < k_lists; ++list) {
    if (small(list)) continue;
    over_shares({lists_.lengths[list], threads_}, threads_,
                [&](std::int64_t, std::int64_t begin, std::int64_t end) {
                  map(list, starts_[list] + begin, starts_[list] + end);
                  return kGood;
                });
  }
}

}  // namespace shoal
