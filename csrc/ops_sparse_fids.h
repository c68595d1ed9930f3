#pragma once
// Ids of a batch split per table and shard, for the thread that prepares batches.
#include <cstdint>
#include <vector>

#include "ops_shard_rules.h"

namespace shoal {

// Ids of features, `splits` (n_features + 1) of them, which are checked; buffer
// table * n_shards + shard has a list of ids and a row for each. By rule floormod or unsigned_mod.
class FidSplit {
 public:
  // (n_features) each: tables, widths of rows; (n_features, n_shards), to be found: numbers of ids,
  // where they begin in their buffer's list, and where their rows begin in the buffer, in floats;
  // (n_tables, n_shards), to be found: numbers of ids and of floats.
  FidSplit(const std::int64_t* ids, const std::int64_t* splits, std::int64_t n_features,
           std::int64_t n_shards, ShardRule rule, const std::vector<std::int64_t*>& parts,
           std::int64_t n_tables)
      : ids_(ids),
        splits_(splits),
        n_features_(n_features),
        n_shards_(n_shards),
        n_tables_(n_tables),
        rule_(rule),
        tables_(parts[0]),
        widths_(parts[1]),
        counts_(parts[2]),
        begins_(parts[3]),
        floats_(parts[4]),
        fid_sizes_(parts[5]),
        emb_sizes_(parts[6]) {}

  // Each id's place among the ids of its feature and shard goes to `places`, its buffer to
  // `buffers`. With `unique`, equal ids of a feature share a place.
  void count(bool unique, std::int64_t* places, std::int32_t* buffers, int threads);
  // Writes the lists, table-major, and turns places into places of rows, in floats.
  void fill(std::int64_t* places, const std::int32_t* buffers, std::int64_t* lists, int threads);

 private:
  struct Room;

  void count_feature(std::int64_t f, const Room* room, std::int64_t* places,
                     std::int32_t* buffers) const;
  void place_features() const;

  const std::int64_t *ids_, *splits_;
  std::int64_t n_features_, n_shards_, n_tables_;
  ShardRule rule_;
  const std::int64_t *tables_, *widths_;
  std::int64_t *counts_, *begins_, *floats_, *fid_sizes_, *emb_sizes_;
};

}  // namespace shoal
