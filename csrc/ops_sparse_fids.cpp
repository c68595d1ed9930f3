#include "ops_sparse_fids.h"

#include <algorithm>
#include <vector>

#include "ops_ids.h"
#include "threads.h"

namespace shoal {

// A lane's memory for the distinct ids of a feature.
struct FidSplit::Room {
  std::uint32_t* slots;
  Distinct* found;
};

void FidSplit::count_feature(std::int64_t f, const Room* room, std::int64_t* places,
                             std::int32_t* buffers) const {
  const std::int64_t start = splits_[f];
  const std::int64_t stop = splits_[f + 1];
  std::int64_t* counts = counts_ + f * n_shards_;
  std::fill(counts, counts + n_shards_, 0);
  const std::int64_t first = tables_[f] * n_shards_;
  const ShardOf shard_of(rule_, n_shards_);
  if (room == nullptr) {
    for (std::int64_t i = start; i < stop; ++i) {
      const std::int64_t shard = shard_of(ids_[i]);
      places[i] = counts[shard]++;
      buffers[i] = static_cast<std::int32_t>(first + shard);
    }
    return;
  }
  const std::int64_t size =
      dedup_span(ids_ + start, stop - start, room->slots, room->found, places + start);
  // From here on an entry holds a shard and a place there.
  Distinct* const found = room->found + 1;
  for (std::int64_t u = 0; u < size; ++u) {
    const std::int64_t shard = shard_of(found[u].id);
    found[u] = {shard, counts[shard]++};
  }
  for (std::int64_t i = start; i < stop; ++i) {
    const auto [shard, place] = found[places[i]];
    places[i] = place;
    buffers[i] = static_cast<std::int32_t>(first + shard);
  }
}

// Features come in order within their table's buffers.
void FidSplit::place_features() const {
  const std::int64_t n_buffers = n_tables_ * n_shards_;
  std::fill(fid_sizes_, fid_sizes_ + n_buffers, 0);
  std::fill(emb_sizes_, emb_sizes_ + n_buffers, 0);
  for (std::int64_t f = 0; f < n_features_; ++f) {
    for (std::int64_t p = 0; p < n_shards_; ++p) {
      const std::int64_t at = f * n_shards_ + p;
      const std::int64_t buffer = tables_[f] * n_shards_ + p;
      begins_[at] = fid_sizes_[buffer];
      floats_[at] = emb_sizes_[buffer];
      fid_sizes_[buffer] += counts_[at];
      emb_sizes_[buffer] += counts_[at] * widths_[f];
    }
  }
}

void FidSplit::count(bool unique, std::int64_t* places, std::int32_t* buffers, int threads) {
  std::int64_t longest = 0;
  for (std::int64_t f = 0; unique && f < n_features_; ++f) {
    longest = std::max(longest, splits_[f + 1] - splits_[f]);
  }
  const std::size_t lanes = unique ? static_cast<std::size_t>(std::max(threads, 1)) : 0;
  const std::size_t slots = span_slots(longest), entries = static_cast<std::size_t>(longest) + 1;
  const Scratch<std::uint32_t> all_slots(slots * lanes);
  const Scratch<Distinct> all_found(entries * lanes);
  Pool::instance().run(n_features_, threads, [&](std::int64_t f, int lane) {
    const auto at = static_cast<std::size_t>(lane);
    const Room room{all_slots.data() + slots * at, all_found.data() + entries * at};
    count_feature(f, unique ? &room : nullptr, places, buffers);
  });
  place_features();
}

void FidSplit::fill(std::int64_t* places, const std::int32_t* buffers, std::int64_t* lists,
                    int threads) {
  const auto n_buffers = static_cast<std::size_t>(n_tables_ * n_shards_);
  std::vector<std::int64_t*> starts(n_buffers);
  for (std::size_t m = 0; m < n_buffers; ++m) {
    starts[m] = lists;
    lists += fid_sizes_[m];
  }
  Pool::instance().run(n_features_, threads, [&](std::int64_t f, int) {
    const std::int64_t* begins = begins_ + f * n_shards_;
    const std::int64_t* floats = floats_ + f * n_shards_;
    const std::int64_t first = tables_[f] * n_shards_;
    for (std::int64_t i = splits_[f]; i < splits_[f + 1]; ++i) {
      const std::int64_t shard = buffers[i] - first;
      starts[static_cast<std::size_t>(buffers[i])][begins[shard] + places[i]] = ids_[i];
      places[i] = floats[shard] + places[i] * widths_[f];
    }
  });
}

}  // namespace shoal
