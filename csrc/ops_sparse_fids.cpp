#include "ops_sparse_fids.h"

#include <algorithm>
#include <vector>

#include "hash.h"
#include "threads.h"

namespace shoal {
namespace {

std::int64_t shard_of(const FidBatch& batch, std::int64_t id) {
  if (!batch.floored) {
    return static_cast<std::int64_t>(static_cast<std::uint64_t>(id) %
                                     static_cast<std::uint64_t>(batch.n_shards));
  }
  const std::int64_t rest = id % batch.n_shards;
  return rest < 0 ? rest + batch.n_shards : rest;
}

// Places of a feature's ids by id. Slots of earlier features count as empty: nothing is cleared.
class PlaceOf {
 public:
  void start(std::int64_t ids) {
    std::size_t slots = 64;
    while (slots < 2 * static_cast<std::size_t>(ids)) slots *= 2;
    if (slots > slots_.size()) {
      slots_.assign(slots, Slot{});
      round_ = 0;
    }
    mask_ = slots_.size() - 1;
    ++round_;
  }

  // The place given to an id before, or `next`, which it then has.
  std::int64_t find_or(std::int64_t id, std::int64_t next) {
    std::size_t at = mix64(static_cast<std::uint64_t>(id)) & mask_;
    for (;; at = (at + 1) & mask_) {
      Slot& slot = slots_[at];
      if (slot.round != round_) {
        slot = Slot{id, next, round_};
        return next;
      }
      if (slot.id == id) return slot.place;
    }
  }

 private:
  struct Slot {
    std::int64_t id = 0, place = 0;
    std::uint64_t round = 0;
  };
  std::vector<Slot> slots_;
  std::size_t mask_ = 0;
  std::uint64_t round_ = 0;
};

void count_feature(const FidBatch& batch, const FidPlan& plan, std::int64_t f, PlaceOf* seen,
                   std::int64_t* places, std::int32_t* buffers) {
  const std::int64_t start = batch.splits[f];
  const std::int64_t stop = batch.splits[f + 1];
  std::int64_t* counts = plan.counts + f * batch.n_shards;
  std::fill(counts, counts + batch.n_shards, 0);
  if (seen != nullptr) seen->start(stop - start);
  const std::int64_t first = plan.tables[f] * batch.n_shards;
  for (std::int64_t i = start; i < stop; ++i) {
    const std::int64_t shard = shard_of(batch, batch.ids[i]);
    std::int64_t place = counts[shard];
    if (seen != nullptr) place = seen->find_or(batch.ids[i], place);
    if (place == counts[shard]) ++counts[shard];
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

bool count_fids(const FidBatch& batch, const FidPlan& plan, bool unique, std::int64_t* places,
                std::int32_t* buffers, int threads) {
  std::int64_t bad = batch.splits[0] != 0 || batch.splits[batch.n_features] != batch.n;
  for (std::int64_t f = 0; f < batch.n_features; ++f) {
    bad += batch.splits[f] > batch.splits[f + 1];
  }
  if (bad != 0) return false;
  std::vector<PlaceOf> seen(static_cast<std::size_t>(unique ? threads : 0));
  Pool::instance().run(batch.n_features, threads, [&](std::int64_t f, int lane) {
    PlaceOf* own = unique ? &seen[static_cast<std::size_t>(lane)] : nullptr;
    count_feature(batch, plan, f, own, places, buffers);
  });
  place_features(batch, plan);
  return true;
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
