#include "ops_sparse_fids.h"

#include <algorithm>
#include <vector>

#include "ops_ids.h"
#include "threads.h"

namespace shoal {
namespace {

// A lane's memory for the distinct ids of a feature.
struct Room {
  std::uint32_t* slots;
  Distinct* found;
};

void count_feature(const FidBatch& batch, const FidPlan& plan, std::int64_t f, const Room* room,
                   std::int64_t* places, std::int32_t* buffers) {
  const std::int64_t start = batch.splits[f];
  const std::int64_t stop = batch.splits[f + 1];
  std::int64_t* counts = plan.counts + f * batch.n_shards;
  std::fill(counts, counts + batch.n_shards, 0);
  const std::int64_t first = plan.tables[f] * batch.n_shards;
  const ShardOf shard_of(batch.rule, batch.n_shards);
  if (room == nullptr) {
    for (std::int64_t i = start; i < stop; ++i) {
      const std::int64_t shard = shard_of(batch.ids[i]);
      places[i] = counts[shard]++;
      buffers[i] = static_cast<std::int32_t>(first + shard);
    }
    return;
  }
  const std::int64_t size =
      dedup_span(batch.ids + start, stop - start, room->slots, room->found, places + start);
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
void place_features(const FidBatch& batch, const FidPlan& plan) {
  const std::int64_t n_buffers = plan.n_tables * batch.n_shards;
  std::fill(plan.fid_sizes, plan.fid_sizes + n_buffers, 0);
  std::fill(plan.emb_sizes, plan.emb_sizes + n_buffers, 0);
  for (std::int64_t f = 0; f < batch.n_features; ++f) {
    for (std::int64_t p = 0; p < batch.n_shards; ++p) {
      const std::int64_t at = f * batch.n_shards + p;
      const std::int64_t buffer = plan.tables[f] * batch.n_shards + p;
      plan.begins[at] = plan.fid_sizes[buffer];
      plan.floats[at] = plan.emb_sizes[buffer];
      plan.fid_sizes[buffer] += plan.counts[at];
      plan.emb_sizes[buffer] += plan.counts[at] * plan.widths[f];
    }
  }
}

}  // namespace

void count_fids(const FidBatch& batch, const FidPlan& plan, bool unique, std::int64_t* places,
                std::int32_t* buffers, int threads) {
  std::int64_t longest = 0;
  for (std::int64_t f = 0; unique && f < batch.n_features; ++f) {
    longest = std::max(longest, batch.splits[f + 1] - batch.splits[f]);
  }
  const std::size_t lanes = unique ? static_cast<std::size_t>(std::max(threads, 1)) : 0;
  const std::size_t slots = span_slots(longest), entries = static_cast<std::size_t>(longest) + 1;
  const Scratch<std::uint32_t> all_slots(slots * lanes);
  const Scratch<Distinct> all_found(entries * lanes);
  Pool::instance().run(batch.n_features, threads, [&](std::int64_t f, int lane) {
    const auto at = static_cast<std::size_t>(lane);
    const Room room{all_slots.data() + slots * at, all_found.data() + entries * at};
    count_feature(batch, plan, f, unique ? &room : nullptr, places, buffers);
  });
  place_features(batch, plan);
}

void fill_fids(const FidBatch& batch, const FidPlan& plan, std::int64_t* places,
               const std::int32_t* buffers, std::int64_t* lists, int threads) {
  const auto n_buffers = static_cast<std::size_t>(plan.n_tables * batch.n_shards);
  std::vector<std::int64_t*> starts(n_buffers);
  for (std::size_t m = 0; m < n_buffers; ++m) {
    starts[m] = lists;
    lists += plan.fid_sizes[m];
  }
  Pool::instance().run(batch.n_features, threads, [&](std::int64_t f, int) {
    const std::int64_t* begins = plan.begins + f * batch.n_shards;
    const std::int64_t* floats = plan.floats + f * batch.n_shards;
    const std::int64_t first = plan.tables[f] * batch.n_shards;
    for (std::int64_t i = batch.splits[f]; i < batch.splits[f + 1]; ++i) {
      const std::int64_t shard = buffers[i] - first;
      starts[static_cast<std::size_t>(buffers[i])][begins[shard] + places[i]] = batch.ids[i];
      places[i] = floats[shard] + places[i] * plan.widths[f];
    }
  });
}

}  // namespace shoal
