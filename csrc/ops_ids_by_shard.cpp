#include "ops_ids_by_shard.h"

#include <algorithm>

#include "ops_buckets.h"

namespace shoal {

FusedReorder::FusedReorder(const std::vector<const std::int64_t*>& id_lists,
                           const std::vector<std::int64_t>& lengths,
                           const std::vector<std::int64_t>& dims, std::int64_t num_shards,
                           ShardRule rule, const std::int64_t* shards, std::int64_t* offsets,
                           int threads)
    : ids_(id_lists),
      lengths_(lengths),
      dims_(dims),
      num_shards_(num_shards),
      rule_(rule),
      shards_(shards),
      offsets_(offsets),
      threads_(std::max(threads, 1)),
      starts_(splits_of(lengths)),
      found_(ids_.size()),
      sizes_(ids_.size() * static_cast<std::size_t>(num_shards), 0),
      rows_(sizes_.size()),
      floats_(sizes_.size()),
      distinct_(static_cast<std::size_t>(starts_.back()) + ids_.size()),
      owners_(distinct_.size()) {
  const std::size_t k_lists = ids_.size();
  if (rule_ == ShardRule::given) bad_ = first_bad_shard();
  if (bad_ != kGood) return;
  std::int64_t longest = 0;
  for (std::size_t k = 0; k < k_lists; ++k) {
    if (small(k)) {
      longest = std::max(longest, lengths_[k]);
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
      float_at += sizes_[group] * dims_[k];
    }
  }
}

// Looked for before anything is written, so that a bad one leaves the caller's offsets as they were.
std::int64_t FusedReorder::first_bad_shard() const {
  const auto k_lists = static_cast<std::int64_t>(ids_.size());
  return over_shares({k_lists, k_lists}, threads_, [&](std::int64_t k, std::int64_t, std::int64_t) {
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
  const std::int64_t n = lengths_[list];
  Distinct* const distinct = distinct_.data() + starts_[list] + list;
  std::int64_t* const inverse = offsets_ + starts_[list];
  if (slots != nullptr) {
    found_[list] = dedup_span(ids_[list], n, slots, distinct, inverse);
    return;
  }
  const auto dedup = Dedup::of(ids_[list], n, inverse, threads_);
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
  const bool ranges = rule_ == ShardRule::hash_ranges;
  const std::int64_t width = ranges ? 2 + num_shards_ : 0;
  const ShardOf shard_of(rule_, num_shards_, shards_ + static_cast<std::int64_t>(list) * width);
  for (std::int64_t u = 0; u < found_[list]; ++u) {
    const std::int64_t shard = shard_of(distinct[u].id);
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
  const std::int64_t dim = dims_[list];
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
  const std::size_t k_lists = ids_.size();
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
    over_shares({lengths_[list], threads_}, threads_,
                [&](std::int64_t, std::int64_t begin, std::int64_t end) {
                  map(list, starts_[list] + begin, starts_[list] + end);
                  return kGood;
                });
  }
}

}  // namespace shoal
